package relay

import (
	"slices"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// applyStates applies the states of destinations that a beat read, which began at the given time. A destination that is not
// among them has a closed breaker and no evidence against it. It reports whether a breaker has opened or closed.
func (ls *lanes) applyStates(began, now time.Time, states []policy.DestinationState, instance int32) (changed bool) {
	for _, l := range ls.list() {
		state := policy.DestinationState{Destination: l.name, Breaker: "closed"}
		if i := slices.IndexFunc(states, func(s policy.DestinationState) bool { return s.Destination == l.name }); i >= 0 {
			state = states[i]
		}
		_, hold, _ := l.breakerAt(now)
		l.changeBreaker(func(b *policy.Breaker) {
			if state.Remaining > implausible(b, hold) {
				state.Remaining = 0
			}
			before := b.State
			b.ApplyState(began, now, state, instance)
			changed = changed || b.State != before
		})
	}
	return changed
}

// lockedAgain is how long a breaker's statement waits that met another session's lock on the destination.
const lockedAgain = 2 * time.Second

// implausible is a longer time than any relay gives a breaker: the database's clock must have been put back since.
func implausible(b *policy.Breaker, hold time.Duration) time.Duration {
	return 2 * max(b.Policy.ProbeMax, hold)
}

// tendBreakers writes what the breakers of all lanes have decided, begins trials that are due, and plans when to do so again.
func (c *claimer) tendBreakers(now time.Time, instance int32) error {
	for _, l := range c.lanes.list() {
		if now.Before(l.tend) {
			c.plan(l.tend)
			continue
		}
		at, err := c.tendBreaker(l, now, instance)
		if pg.HasCode(err, pg.LockNotAvailable) { // the other lanes must not wait for one row
			c.failed("breaker", err)
			l.tend = time.Now().Add(lockedAgain)
			at, err = l.tend, nil
		}
		if err != nil {
			return err
		}
		if !at.IsZero() {
			c.plan(at)
		}
	}
	return nil
}

// tendBreaker does what is due about one breaker, and returns when to look again; zero: when a result changes it.
func (c *claimer) tendBreaker(l *lane, now time.Time, instance int32) (next time.Time, err error) {
	b, hold, turn := l.breakerAt(now)
	switch {
	case b.Write == policy.WriteOpen:
		return c.openBreaker(l, b, instance)
	case b.Write == policy.WriteClosed:
		return time.Time{}, c.closeBreaker(l, instance)
	case b.State == policy.BreakerOpen && now.Before(b.TryAt):
		return b.TryAt, nil
	case b.State == policy.BreakerOpen && turn > 0:
		return now.Add(turn), nil // the lane's rate allows no request yet; another relay may try meanwhile
	case b.State == policy.BreakerOpen:
		return c.tryBreaker(l, b, now, instance, hold)
	case b.State == policy.BreakerHalfOpen && b.Until.Sub(now) < hold/2:
		return time.Time{}, c.renewTrial(l, now, instance, hold, turn)
	case b.State == policy.BreakerHalfOpen && turn == 0 && !l.busy() && !l.walked(now):
		return now, nil
	case b.State == policy.BreakerHalfOpen:
		return b.Until.Add(-hold / 2), nil
	case b.Unwritten != 0 && now.Before(b.WriteAt):
		return b.WriteAt, nil
	case b.Unwritten != 0:
		return time.Time{}, c.recordEvidence(l, b)
	}
	return time.Time{}, nil
}

// openBreaker writes that a breaker has opened, and returns when its first or next trial is due.
func (c *claimer) openBreaker(l *lane, b policy.Breaker, instance int32) (next time.Time, err error) {
	wait, probes, err := c.store.openBreaker(c.settling, l.name, instance, b)
	if err != nil {
		return time.Time{}, err
	}
	l.changeBreaker(func(b *policy.Breaker) { b.Opened(time.Now(), wait) })
	level := zerolog.WarnLevel
	if probes > 0 { // news once; each probe has its attempt's line
		level = zerolog.DebugLevel
	}
	c.config().Log.WithLevel(level).Str("destination", l.name).Str("error", b.Cause).Int("failed_probes", probes).
		Int64("next_probe_in_ms", wait.Milliseconds()).Msg("breaker open: deliveries are held, and spend no attempts")
	signal(c.wake.alerts)
	return time.Now().Add(wait), nil
}

// closeBreaker writes that a breaker has closed, and makes the next claims look at all that was held.
func (c *claimer) closeBreaker(l *lane, instance int32) error {
	if err := c.store.closeBreaker(c.settling, l.name, instance); err != nil {
		return err
	}
	l.changeBreaker(func(b *policy.Breaker) {
		if b.Write == policy.WriteClosed {
			b.Write, b.Since = policy.WriteNothing, time.Now()
		}
	})
	c.config().Log.Info().Str("destination", l.name).Msg("breaker closed: nothing is held any more")
	l.walkNow()
	c.pace.look()
	signal(c.wake.alerts)
	return nil
}

// tryBreaker begins a trial of a lane if no other relay does, and returns when to try that again if it has not.
func (c *claimer) tryBreaker(l *lane, b policy.Breaker, now time.Time, instance int32, hold time.Duration) (next time.Time, err error) {
	taken, events, err := c.store.tryBreaker(c.settling, l.name, instance, hold, implausible(&b, hold))
	if err != nil {
		return time.Time{}, err
	}
	if !taken { // nothing that waits is due, or another relay was first, as the next beat will show
		next = now.Add(c.config().PollInterval)
		l.changeBreaker(func(b *policy.Breaker) { b.TryAt = next })
		return next, nil
	}
	l.changeBreaker(func(b *policy.Breaker) {
		b.Events = events
		b.Try(time.Now(), hold)
	})
	for i := range l.walks { // each probe goes on behind the one before it, then at the front: another delivery may pass
		w := &l.walks[i]
		w.due, w.again = time.Time{}, w.position != (keyset{})
	}
	c.pace.look()
	return time.Time{}, nil
}

// renewTrial prolongs this relay's trial of a lane, or closes the breaker when there was nothing to send: all that waited is
// gone, or waits behind another delivery.
func (c *claimer) renewTrial(l *lane, now time.Time, instance int32, hold, turn time.Duration) error {
	vain := !l.busy() && turn == 0
	l.changeBreaker(func(b *policy.Breaker) {
		if vain = vain && b.State == policy.BreakerHalfOpen && !b.Accepted; vain {
			b.Close(now)
		}
	})
	if vain {
		return c.closeBreaker(l, instance)
	}
	held, err := c.store.renewTrial(c.settling, l.name, instance, hold)
	if err != nil {
		return err
	}
	l.changeBreaker(func(b *policy.Breaker) {
		if b.State != policy.BreakerHalfOpen {
			return
		}
		b.Until = now.Add(hold)
		if !held {
			b.Enter(now, policy.BreakerOpen)
			b.TryAt = now.Add(hold)
		}
	})
	return nil
}

// recordEvidence writes what this relay adds to the evidence against a destination, and learns what all relays hold.
func (c *claimer) recordEvidence(l *lane, b policy.Breaker) error {
	failures, events, closed, err := c.store.recordEvidence(c.settling, l.name, b.Unwritten, b.Events)
	if err != nil {
		return err
	}
	if !closed {
		failures, events = 0, nil // another relay has opened the breaker, as the next beat will show
	}
	written := b.Unwritten
	l.changeBreaker(func(b *policy.Breaker) { b.EvidenceRecorded(time.Now(), written, failures, events) })
	return nil
}

// tried ends the trial of a lane that has nothing more to send.
func (l *lane) tried(now time.Time) (ended bool) {
	if l.busy() || !l.walked(now) {
		return false
	}
	l.changeBreaker(func(b *policy.Breaker) {
		if ended = b.State == policy.BreakerHalfOpen && b.Accepted; ended {
			b.Close(now)
		}
	})
	return ended
}
