package relay

import (
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// lockedAgain is how long a breaker's statement waits that met another session's lock on the destination.
const lockedAgain = 2 * time.Second

// A breakerKeeper writes what breakers decide into outbox_destination, until the database takes it. It is the claimer's.
type breakerKeeper struct {
	*core
	looks bool // the claimer must look for what was held
}

// tend writes what the breakers of all lanes have decided, begins trials that are due, and returns when to do so again; zero:
// when a result changes something.
func (k *breakerKeeper) tend(now time.Time, instance int32) (next time.Time, err error) {
	plan := func(at time.Time) {
		if !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	for _, l := range k.lanes.list() {
		if now.Before(l.tend) {
			plan(l.tend)
			continue
		}
		at, err := k.tendLane(l, now, instance)
		if pg.HasCode(err, pg.LockNotAvailable) { // the other lanes must not wait for one row
			k.databaseError("breaker", err)
			l.tend = time.Now().Add(lockedAgain)
			at, err = l.tend, nil
		}
		if err != nil {
			return next, err
		}
		plan(at)
	}
	return next, nil
}

// tendLane does what is due about one breaker, and returns when to look again; zero: when a result changes it.
func (k *breakerKeeper) tendLane(l *lane, now time.Time, instance int32) (next time.Time, err error) {
	b, hold, turn := l.breakerAt(now)
	switch {
	case b.Write == policy.WriteOpen:
		return k.openBreaker(l, b, instance)
	case b.Write == policy.WriteClosed:
		return time.Time{}, k.closeBreaker(l, instance)
	case b.State == policy.BreakerOpen && now.Before(b.TryAt):
		return b.TryAt, nil
	case b.State == policy.BreakerOpen && turn > 0:
		return now.Add(turn), nil // the lane's rate allows no request yet; another relay may try meanwhile
	case b.State == policy.BreakerOpen:
		return k.tryBreaker(l, b, now, instance, hold)
	case b.State == policy.BreakerHalfOpen && b.Until.Sub(now) < hold/2:
		return time.Time{}, k.renewTrial(l, now, instance, hold, turn)
	case b.State == policy.BreakerHalfOpen && turn == 0 && !l.busy() && !l.walked(now):
		return now, nil
	case b.State == policy.BreakerHalfOpen:
		return b.Until.Add(-hold / 2), nil
	case b.Unwritten != 0 && now.Before(b.WriteAt):
		return b.WriteAt, nil
	case b.Unwritten != 0:
		return time.Time{}, k.recordEvidence(l, b)
	}
	return time.Time{}, nil
}

// openBreaker writes that a breaker has opened, and returns when its first or next trial is due.
func (k *breakerKeeper) openBreaker(l *lane, b policy.Breaker, instance int32) (next time.Time, err error) {
	wait, probes, err := k.store.openBreaker(k.settling, l.name, instance, b)
	if err != nil {
		return time.Time{}, err
	}
	l.changeBreaker(func(b *policy.Breaker) { b.Opened(time.Now(), wait) })
	level := zerolog.WarnLevel
	if probes > 0 { // news once; each probe has its attempt's line
		level = zerolog.DebugLevel
	}
	k.config().Log.WithLevel(level).Str("destination", l.name).Str("error", b.Cause).Int("failed_probes", probes).
		Int64("next_probe_in_ms", wait.Milliseconds()).Msg("breaker open: deliveries are held, and spend no attempts")
	signal(k.wake.alerts)
	return time.Now().Add(wait), nil
}

// closeBreaker writes that a breaker has closed, and makes the next claims look at all that was held.
func (k *breakerKeeper) closeBreaker(l *lane, instance int32) error {
	if err := k.store.closeBreaker(k.settling, l.name, instance); err != nil {
		return err
	}
	l.changeBreaker(func(b *policy.Breaker) {
		if b.Write == policy.WriteClosed {
			b.Write, b.Since = policy.WriteNothing, time.Now()
		}
	})
	k.config().Log.Info().Str("destination", l.name).Msg("breaker closed: nothing is held any more")
	l.walkNow()
	k.looks = true
	signal(k.wake.alerts)
	return nil
}

// tryBreaker begins a trial of a lane if no other relay does, and returns when to try that again if it has not.
func (k *breakerKeeper) tryBreaker(l *lane, b policy.Breaker, now time.Time, instance int32, hold time.Duration) (next time.Time, err error) {
	taken, events, err := k.store.tryBreaker(k.settling, l.name, instance, hold, implausible(&b, hold))
	if err != nil {
		return time.Time{}, err
	}
	if !taken { // nothing that waits is due, or another relay was first, as the next beat will show
		next = now.Add(k.config().PollInterval)
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
	k.looks = true
	return time.Time{}, nil
}

// renewTrial prolongs this relay's trial of a lane, or closes the breaker when there was nothing to send: all that waited is
// gone, or waits behind another delivery.
func (k *breakerKeeper) renewTrial(l *lane, now time.Time, instance int32, hold, turn time.Duration) error {
	vain := !l.busy() && turn == 0
	l.changeBreaker(func(b *policy.Breaker) {
		if vain = vain && b.State == policy.BreakerHalfOpen && !b.Accepted; vain {
			b.Close(now)
		}
	})
	if vain {
		return k.closeBreaker(l, instance)
	}
	held, err := k.store.renewTrial(k.settling, l.name, instance, hold)
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
func (k *breakerKeeper) recordEvidence(l *lane, b policy.Breaker) error {
	failures, events, closed, err := k.store.recordEvidence(k.settling, l.name, b.Unwritten, b.Events)
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
