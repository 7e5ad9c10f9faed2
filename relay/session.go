package relay

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/identity"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
)

// newSession returns what keeps this relay known to be alive.
func (r *Relay) newSession() *session.Session {
	return &session.Session{
		Config: session.Config{
			Pool: r.cfg.Pool, Pooler: r.cfg.Pooler, Schema: r.cfg.Schema, AllowSuperuser: r.cfg.AllowSuperuser, Name: r.cfg.Name, Version: r.cfg.Version,
			PollInterval: r.cfg.PollInterval, Lease: r.cfg.Lease, Log: r.cfg.Log,
		},
		Guard: identity.NewGuard(r.guardConfig()), Presence: &r.presence, Producers: &r.producers,
		Restore: r.settler.WriteAgain, Enter: r.enter, Beaten: r.beaten, Wake: r.wakeFor, Listening: r.mailbox.listening.Store, Idle: r.idle,
		Waits:      func() []string { return r.lanes.Waits(time.Now()) },
		SleepAfter: r.cfg.SleepAfter,
		FallAsleep: func(relayID int32, schema string) { r.fail(&Asleep{RelayID: relayID, Schema: schema}) },
		Rescued: func(relayID int32) {
			r.mailbox.post(agenda.CauseRescue)
			if hook := r.cfg.Hooks.Rescued; hook != nil {
				hook(relayID)
			}
		},
		Failed: r.databaseError,
	}
}

// enter applies the routes before this relay counts as alive. One that was not resumed was taken
// for dead, if it was registered before: others send what it had.
func (r *Relay) enter(ctx context.Context, resumed bool, alive func()) error {
	if !resumed {
		void := time.Now().Add(r.cfg.Lease)
		for _, l := range r.lanes.All() {
			l.VoidLeases(void)
		}
		r.senders.GiveBackUnsent(policy.ReasonLease)
	}
	return r.meetRoutes(ctx, func() {
		r.markBeat() // the database has just taken the registration
		alive()
	})
}

// beaten passes on what a beat found that began at the given time.
func (r *Relay) beaten(began time.Time, relayID int32, found session.News) {
	r.markBeat()
	r.settler.ForgetDurable(began)
	changed, closed := r.lanes.ApplyStates(began, time.Now(), found.States, relayID)
	if changed {
		r.mailbox.post(agenda.CauseSweep)
	}
	for _, destination := range found.Resumed {
		if l := r.lanes.Get(destination); l != nil {
			l.EndWait(time.Now())
			r.mailbox.post(agenda.CauseSweep)
			r.cfg.Log.Info().Str("destination", destination).Msg("an operator has ended the wait that the destination had asked for")
		}
	}
	for _, destination := range closed {
		r.cfg.Log.Info().Str("destination", destination).Msg("breaker closed by another relay or an operator: nothing is held any more")
	}
	if found.Unheard {
		r.mailbox.post(agenda.CauseNotifyGap)
	}
	if found.Alerts {
		signal(r.signals.alerts)
	}
	if found.Parked {
		signal(r.signals.parked)
	}
}

// wakeFor makes the claimer or maintenance do what is asked.
func (r *Relay) wakeFor(asked session.Requests) {
	if asked.Commits > 0 {
		r.mailbox.commits.Add(int64(asked.Commits))
		r.mailbox.post(agenda.CauseNotified)
	}
	if asked.Sweep {
		r.mailbox.post(agenda.CauseSweep)
		r.waiting.Sweep()
	}
	if asked.Routes {
		signal(r.signals.routes)
	}
}
