package alert

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/relay/pg"
)

// Rules that relays alert about. An alert's subject is the destination, or the database where the rule is about all of it.
const (
	// RuleFailed tells that deliveries to a destination failed for good.
	RuleFailed = "failed"
	// RuleLag tells that due deliveries to a destination wait for too long, though nothing holds them.
	RuleLag = "lag"
	// RuleBreakerOpen tells that a destination is down as a whole and its deliveries are held.
	RuleBreakerOpen = "breaker_open"
	// RuleParked tells that events match no route.
	RuleParked = "parked"
	// RuleUndelivered tells that events have no deliveries, because the trigger did not run when they were inserted.
	RuleUndelivered = "undelivered_events"
	// RuleBlockedKeys tells that ordering keys wait behind a delivery that failed.
	RuleBlockedKeys = "blocked_keys"
	// RuleWaitingKeys: ordering keys wait for too long behind a delivery that is scheduled or retried later.
	RuleWaitingKeys = "waiting_keys"
	// RuleRescueStorm tells that relays die one after the other.
	RuleRescueStorm = "rescue_storm"
	// RuleVacuumBlocked tells that a session keeps the database from cleaning up.
	RuleVacuumBlocked = "vacuum_blocked"
	// RuleUnserved tells that deliveries wait for a destination that no running relay serves.
	RuleUnserved = "unserved"
	// RuleRoutesChanged tells that a relay changed the routes and another one was configured with others.
	RuleRoutesChanged = "routes_changed"
	// RuleNeverDelivered says that a destination has accepted nothing yet, and fails in a way that only a person mends.
	RuleNeverDelivered = "never_delivered"
	// RuleQuarantined tells that a relay found itself on a copy of its database, and sends nothing.
	RuleQuarantined = "quarantined"
)

// Rules returns all of them.
func Rules() []string {
	return []string{
		RuleFailed, RuleLag, RuleBreakerOpen, RuleParked, RuleUndelivered, RuleBlockedKeys, RuleWaitingKeys, RuleRescueStorm, RuleVacuumBlocked,
		RuleUnserved, RuleRoutesChanged, RuleNeverDelivered, RuleQuarantined,
	}
}

// Defaults of the fields below.
const (
	DefaultWindow            = 15 * time.Minute
	DefaultLagOver           = 10 * time.Minute
	DefaultVacuumBlockedOver = 5 * time.Minute
)

// Config says whom to tell of what. Every alert also stands in the log.
type Config struct {
	// Channels that each alert is sent to. None: only the log tells.
	Channels []Channel
	// Window during which a rule tells of one subject once, however often it fires. 0: 15 min.
	Window time.Duration
	// LagOver is how long a due delivery may wait before an alert: RuleLag, or RuleWaitingKeys if an earlier delivery of its
	// ordering key that is not due holds it up. 0: 10 min.
	LagOver time.Duration
	// VacuumBlockedOver is for how long a session may keep the database from cleaning up. 0: 5 min.
	VacuumBlockedOver time.Duration
}

// WithDefaults returns a copy in which every zero value is replaced by its default.
func (a Config) WithDefaults() Config {
	a.Window = cmp.Or(a.Window, DefaultWindow)
	a.LagOver = cmp.Or(a.LagOver, DefaultLagOver)
	a.VacuumBlockedOver = cmp.Or(a.VacuumBlockedOver, DefaultVacuumBlockedOver)
	return a
}

// Problems returns the mistakes in a Config with its defaults.
func (a Config) Problems(path string) []check.Problem {
	var v check.Problems
	v.Require(a.Window > 0, path+".window", "%s is negative; write a duration such as 15m", a.Window)
	v.Require(a.LagOver > 0, path+".lag_over", "%s is negative; write a duration such as 10m", a.LagOver)
	v.Require(a.VacuumBlockedOver > 0, path+".vacuum_blocked_over", "%s is negative; write a duration such as 5m", a.VacuumBlockedOver)
	return v
}

// A Channel carries alerts to people. Notify may be called again with the same alert if it fails, and must respect ctx.
type Channel interface {
	// Name of the channel in logs and metrics; unique among the configured channels.
	Name() string
	// Notify sends one alert and returns nil once the other side has taken it.
	Notify(ctx context.Context, alert Alert) error
}

const (
	// alertGather is how long the first occurrence waits for company before it is told.
	alertGather = time.Second
	// alertTimeout bounds one notification.
	alertTimeout = 10 * time.Second
)

// A Sender sends what is due to every channel, each alert once across all relays of the database.
type Sender struct {
	DB     pg.DB           // one statement at a time
	Due    <-chan struct{} // there may be something to send
	Config func() Config   // in effect
	Alive  func() bool     // false: the relay is not sure where it is, and sends only that
	Always func(context.Context) context.Context
	Log    zerolog.Logger
	// Notified is called with the result of each notification. Nil: no call.
	Notified func(channel string, alert Alert, err error)
	// Failed is called with the error of a statement that will be repeated.
	Failed func(operation string, err error)
}

// channels returns all channels; the log is one of them, so that many relays log an alert once.
func (s *Sender) channels() []Channel {
	return append([]Channel{logChannel{s.Log}}, s.Config().Channels...)
}

// channel returns the channel of that name; nil: there is none any more.
func (s *Sender) channel(name string) Channel {
	for _, c := range s.channels() {
		if c.Name() == name {
			return c
		}
	}
	return nil
}

func (s *Sender) channelNames() (names []string) {
	for _, c := range s.channels() {
		names = append(names, c.Name())
	}
	return names
}

// Run sends what is due whenever it is signalled, until ctx is done. It shares nothing with deliveries but the
// database, and every channel has a goroutine of its own, so that a dead one delays neither deliveries nor the others.
func (s *Sender) Run(ctx context.Context) {
	var senders sync.WaitGroup
	defer senders.Wait()
	due := map[string]chan struct{}{} // by the channel's name
	for {
		select {
		case <-s.Due:
		case <-ctx.Done():
			return
		}
		select {
		case <-time.After(alertGather):
		case <-ctx.Done():
			return
		}
		names := s.channelNames()
		for _, name := range names {
			if due[name] == nil {
				wake := make(chan struct{}, 1)
				due[name] = wake
				senders.Go(func() { s.runChannel(ctx, name, wake) })
			}
		}
		for name, wake := range due {
			if !slices.Contains(names, name) { // any more
				delete(due, name)
				close(wake)
			}
		}
		for _, wake := range due {
			select {
			case wake <- struct{}{}:
			default: // it has yet to look
			}
		}
	}
}

// runChannel tells one channel whenever it is signalled, until it is removed.
func (s *Sender) runChannel(ctx context.Context, name string, wake <-chan struct{}) {
	for {
		select {
		case _, open := <-wake:
			if !open {
				return
			}
		case <-ctx.Done():
			return
		}
		if err := s.SendTo(ctx, name); err != nil && ctx.Err() == nil {
			s.Failed("alert", err)
		}
	}
}

// SendDue tells every channel what is due there, once.
func (s *Sender) SendDue(ctx context.Context) error {
	var senders sync.WaitGroup
	names := s.channelNames()
	errs := make([]error, len(names))
	for i, name := range names {
		senders.Go(func() { errs[i] = s.SendTo(ctx, name) })
	}
	senders.Wait()
	return errors.Join(errs...)
}

// SendTo sends one channel everything that is due there, one alert after the other, and says when there is more to do.
func (s *Sender) SendTo(ctx context.Context, name string) error {
	alive := s.Alive()
	if !alive {
		ctx = s.Always(ctx) // where nothing else may run
	}
	channel := s.channel(name)
	for channel != nil && ctx.Err() == nil {
		notice, found, err := s.ClaimNotice(ctx, name, s.Config().Window, alive)
		if err != nil {
			return err
		}
		if channel = s.channel(name); channel == nil || !found { // a reload may have removed it meanwhile
			break
		}
		if err := s.send(ctx, channel, notice); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return nil
	}
	return s.scheduleAlerts(ctx, s.channelNames(), s.Config().Window, alive)
}

// send sends an alert to a channel and records what came of it.
func (s *Sender) send(ctx context.Context, channel Channel, notice Notice) error {
	sending, cancel := context.WithTimeout(ctx, alertTimeout)
	err := channel.Notify(sending, notice.Alert)
	cancel()
	// What was sent is written down, though the relay be told to stop meanwhile: its successor would send it again.
	ctx = context.WithoutCancel(ctx)
	if _, isLog := channel.(logChannel); isLog {
		return s.markTold(ctx, channel.Name(), notice)
	}
	if hook := s.Notified; hook != nil {
		defer hook(channel.Name(), notice.Alert, err)
	}
	if err != nil {
		s.Log.Error().Err(err).Str("channel", channel.Name()).Str("rule", notice.Rule).Str("subject", notice.Subject).
			Msg("alert not sent; will be tried again")
		return s.postponeNotice(ctx, channel.Name(), notice)
	}
	return s.markTold(ctx, channel.Name(), notice)
}
