package relay

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/identity"
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
	// RuleHorizonPinned tells that a session keeps the database from cleaning up.
	RuleHorizonPinned = "horizon_pinned"
	// RuleUnserved tells that deliveries wait for a destination that no running relay serves.
	RuleUnserved = "unserved"
	// RuleRoutesChanged tells that a relay changed the routes and another one was configured with others.
	RuleRoutesChanged = "routes_changed"
	// RuleQuarantined tells that a relay found itself on a copy of its database, and sends nothing.
	RuleQuarantined = "quarantined"
)

// Defaults of the fields below.
const (
	DefaultLagOver     = 10 * time.Minute
	DefaultHorizonOver = 5 * time.Minute
)

// Alerts says whom to tell of what. Every alert also stands in the log.
type Alerts struct {
	// Channels that each alert is sent to. None: only the log tells.
	Channels []Channel
	// Window during which a rule tells of one subject once, however often it fires. 0: 15 min.
	Window time.Duration
	// LagOver is how long a due delivery may wait before an alert: RuleLag, or RuleWaitingKeys if an earlier delivery of its
	// ordering key that is not due holds it up. 0: 10 min.
	LagOver time.Duration
	// HorizonOver is for how long a session may keep the database from cleaning up. 0: 5 min.
	HorizonOver time.Duration
}

func (a Alerts) withDefaults() Alerts {
	setDefault(&a.Window, DefaultAlertWindow)
	setDefault(&a.LagOver, DefaultLagOver)
	setDefault(&a.HorizonOver, DefaultHorizonOver)
	return a
}

func (v *validator) alerts(a Alerts) {
	v.Require(a.Window > 0, "alerts.window", "%s is negative; write a duration such as 15m", a.Window)
	v.Require(a.LagOver > 0, "alerts.lag_over", "%s is negative; write a duration such as 10m", a.LagOver)
	v.Require(a.HorizonOver > 0, "alerts.horizon_over", "%s is negative; write a duration such as 5m", a.HorizonOver)
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

// channels returns all channels; the log is one of them, so that many relays log an alert once.
func (r *Relay) channels() []Channel {
	return append([]Channel{logChannel{r.cfg.Log}}, r.config().Alerts.Channels...)
}

// channel returns the channel of that name; nil: there is none any more.
func (r *Relay) channel(name string) Channel {
	for _, c := range r.channels() {
		if c.Name() == name {
			return c
		}
	}
	return nil
}

func (r *Relay) channelNames() (names []string) {
	for _, c := range r.channels() {
		names = append(names, c.Name())
	}
	return names
}

// tellAlerts sends what is due whenever it is signalled, until ctx is done. It shares nothing with deliveries but the
// database, and every channel has a goroutine of its own, so that a dead one delays neither deliveries nor the others.
func (r *Relay) tellAlerts(ctx context.Context) {
	var tellers sync.WaitGroup
	defer tellers.Wait()
	due := map[string]chan struct{}{} // by the channel's name
	for {
		select {
		case <-r.alerts:
		case <-ctx.Done():
			return
		}
		select {
		case <-time.After(alertGather):
		case <-ctx.Done():
			return
		}
		names := r.channelNames()
		for _, name := range names {
			if due[name] == nil {
				wake := make(chan struct{}, 1)
				due[name] = wake
				tellers.Go(func() { r.tellChannel(ctx, name, wake) })
			}
		}
		for name, wake := range due {
			if !slices.Contains(names, name) { // any more
				delete(due, name)
				close(wake)
			}
		}
		for _, wake := range due {
			signal(wake)
		}
	}
}

// tellChannel tells one channel whenever it is signalled, until it is removed.
func (r *Relay) tellChannel(ctx context.Context, name string, wake <-chan struct{}) {
	for {
		select {
		case _, open := <-wake:
			if !open {
				return
			}
		case <-ctx.Done():
			return
		}
		if err := r.tellDue(ctx, name); err != nil && ctx.Err() == nil {
			r.databaseError("alert", err)
		}
	}
}

// tellDueAlerts tells every channel what is due there, once.
func (r *Relay) tellDueAlerts(ctx context.Context) error {
	var tellers sync.WaitGroup
	names := r.channelNames()
	errs := make([]error, len(names))
	for i, name := range names {
		tellers.Go(func() { errs[i] = r.tellDue(ctx, name) })
	}
	tellers.Wait()
	return errors.Join(errs...)
}

// tellDue sends one channel everything that is due there, one alert after the other, and says when there is more to do.
func (r *Relay) tellDue(ctx context.Context, name string) error {
	_, alive := r.session.current()
	if !alive {
		ctx = identity.Unguarded(ctx) // where nothing else may run
	}
	channel := r.channel(name)
	for channel != nil && ctx.Err() == nil {
		notice, found, err := r.chores.claimNotice(ctx, name, r.config().Alerts.Window, alive)
		if err != nil {
			return err
		}
		if channel = r.channel(name); channel == nil || !found { // a reload may have removed it meanwhile
			break
		}
		if err := r.tell(ctx, channel, notice); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return nil
	}
	return r.chores.scheduleAlerts(ctx, r.channelNames(), r.config().Alerts.Window, alive)
}

// tell sends an alert to a channel and records what came of it.
func (r *Relay) tell(ctx context.Context, channel Channel, notice dueNotice) error {
	sending, cancel := context.WithTimeout(ctx, alertTimeout)
	err := channel.Notify(sending, notice.Alert)
	cancel()
	// What was sent is written down, though the relay be told to stop meanwhile: its successor would send it again.
	ctx = context.WithoutCancel(ctx)
	if _, isLog := channel.(logChannel); isLog {
		return r.chores.markTold(ctx, channel.Name(), notice)
	}
	if hook := r.cfg.Hooks.Notified; hook != nil {
		defer hook(channel.Name(), notice.Alert, err)
	}
	if err != nil {
		r.cfg.Log.Error().Err(err).Str("channel", channel.Name()).Str("rule", notice.Rule).Str("subject", notice.Subject).
			Msg("alert not sent; will be tried again")
		return r.chores.postponeNotice(ctx, channel.Name(), notice)
	}
	return r.chores.markTold(ctx, channel.Name(), notice)
}
