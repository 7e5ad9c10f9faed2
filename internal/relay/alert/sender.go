package alert

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

const (
	// alertTimeout bounds one notification.
	alertTimeout = 10 * time.Second
	// troubleEvery is how often a channel is compared with the state of the database.
	troubleEvery = time.Second
)

// A Sender sends what is due to every channel, each alert once across all relays of the database.
type Sender struct {
	DB     pg.DB           // one statement at a time
	Due    <-chan struct{} // there may be something to send; nil: of the database's trouble alone is told
	Config func() Config   // in effect
	Alive  func() bool     // false: the relay is not sure where it is, and sends only that
	Always func(context.Context) context.Context
	// Refresh makes the alerts that are stored true, before any is sent. Nil: they are as they are.
	Refresh func(context.Context) error
	// Trouble is what this relay sees of its database. Nil: it is not observed.
	Trouble *Trouble
	// Entry, Environment and Relay are said in each alert.
	Entry, Environment, Relay string
	Log                       zerolog.Logger
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

// Run sends what is due whenever it is signalled, until ctx is done. It shares nothing with
// deliveries but the database, and every channel has its own goroutine, so that a dead one
// delays neither deliveries nor the others.
func (s *Sender) Run(ctx context.Context) {
	var senders sync.WaitGroup
	defer senders.Wait()
	due := map[string]chan struct{}{} // by the channel's name
	for {
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
		select {
		case <-s.Due:
		case <-ctx.Done():
			return
		}
		for _, wake := range due {
			select {
			case wake <- struct{}{}:
			default: // it has yet to look
			}
		}
	}
}

// runChannel sends to one channel whenever it is signalled, until it is removed.
func (s *Sender) runChannel(ctx context.Context, name string, wake <-chan struct{}) {
	ticks := time.NewTicker(troubleEvery)
	defer ticks.Stop()
	for {
		select {
		case _, open := <-wake:
			if !open {
				return
			}
			if err := s.SendTo(ctx, name); err != nil && ctx.Err() == nil {
				s.Failed("alert", err)
			}
		case now := <-ticks.C:
			s.sendTrouble(ctx, now, name)
		case <-ctx.Done():
			return
		}
	}
}

// SendDue sends every channel what is due there, once.
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

// SendTo sends one channel everything that is due there, one alert after the other, and notes when
// there is more to do.
func (s *Sender) SendTo(ctx context.Context, name string) error {
	alive := s.Alive()
	if !alive {
		ctx = s.Always(ctx) // where nothing else may run
	}
	refreshed := s.Refresh == nil || !alive
	list, err := s.due(ctx, []string{name}, alive)
	if err != nil || len(list) == 0 {
		return err
	}
	for i := range list {
		c := &list[i]
		if !s.Config().Policy().Decide(c.now, c.state()).Send {
			continue
		}
		if !refreshed {
			refreshed = true
			if err := s.Refresh(ctx); err != nil && ctx.Err() == nil {
				s.Failed("watch", err) // what is stored is at most as old as the last look
			}
		}
		if err := s.sendOne(ctx, c); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return nil
		}
	}
	return s.schedule(ctx, alive)
}

// sendOne sends an alert to a channel as it is now, and records what came of it. It is decided
// again, as numbers and states may have changed.
func (s *Sender) sendOne(ctx context.Context, c *candidate) error {
	n, claimed, err := s.claim(ctx, c)
	if err != nil || !claimed {
		return err
	}
	channel := s.channel(c.channel) // a reload may have removed it meanwhile
	cfg := s.Config()
	if channel == nil || !cfg.Policy().Decide(n.now, n.state).Send {
		var held *time.Duration
		if n.state.Tried { // as it was
			held = new(time.Duration)
		}
		return s.record(ctx, c.channel, n, sentNothing, held)
	}
	composed := s.compose(n.Alert, n.state, cfg)
	err = s.notify(ctx, channel, composed)
	defer s.notified(channel, composed, err) // once the database knows it
	// What was sent is written down, though the relay be told to stop meanwhile: its successor
	// would send it again.
	ctx = context.WithoutCancel(ctx)
	retry := Retry
	switch {
	case err != nil:
		return s.record(ctx, c.channel, n, sentNothing, &retry)
	case n.ResolvedAt != nil:
		return s.record(ctx, c.channel, n, sentEnded, nil)
	}
	return s.record(ctx, c.channel, n, sentLasts, nil)
}

// compose completes an alert that is about to be sent.
func (s *Sender) compose(a Alert, state State, cfg Config) Alert {
	a.Source = Source{Entry: s.Entry, Environment: s.Environment, Relay: s.Relay, Repeated: a.ResolvedAt == nil && !state.SentAt.IsZero()}
	if cfg.PublicURL != "" {
		a.Page = cfg.PublicURL + "/alerts"
	}
	if slices.Contains(Rules(), a.Rule) {
		a.Runbook = runbook + a.Rule
	}
	return a
}

// notify sends an alert to a channel.
func (s *Sender) notify(ctx context.Context, channel Channel, a Alert) error {
	sending, cancel := context.WithTimeout(ctx, alertTimeout)
	err := channel.Notify(sending, a)
	cancel()
	if _, isLog := channel.(logChannel); err != nil && !isLog {
		s.Log.Error().Err(err).Str("channel", channel.Name()).Str("rule", a.Rule).Str("subject", a.Subject).
			Msg("alert not sent; will be tried again")
	}
	return err
}

// notified calls the hook, unless the channel is the log.
func (s *Sender) notified(channel Channel, a Alert, err error) {
	if _, isLog := channel.(logChannel); !isLog && s.Notified != nil {
		s.Notified(channel.Name(), a, err)
	}
}
