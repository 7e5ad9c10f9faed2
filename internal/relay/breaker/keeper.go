package breaker

import (
	"context"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// A Lane is the deliveries of one destination in this relay.
type Lane interface {
	// View returns what the lane is at the given time.
	View(now time.Time) View
	// Change calls change with the lane's breaker, which nothing else changes meanwhile.
	Change(change func(*policy.Breaker))
	// Rescan makes claims read all that was held: from the front or, for a probe, behind the one
	// before it and then from the front, since another delivery may pass.
	Rescan(probe bool)
}

// A View is what a lane is at one time.
type View struct {
	Destination string
	Breaker     policy.Breaker // a copy
	Hold        time.Duration  // how long a trial of the lane holds it
	UntilTurn   time.Duration  // how long the lane's rate, or Asked, makes the next request wait; 0: not at all
	Asked       time.Duration  // for how much longer the destination has asked to wait; 0: it has not

	// Of a lane whose breaker is half-open.

	Busy    bool // something of it is queued or in flight
	Scanned bool // all that is due was read
}

// A Keeper writes what the breakers of one relay decide into outbox_destination. Its methods are
// for one goroutine.
type Keeper struct {
	DB   pg.DB
	Log  zerolog.Logger
	Poll time.Duration // when to try again to begin a trial that could not begin
	Due  func()        // is called when there are alerts to send
}

// yield is how long a relay whose trial was refused leaves the next one to other relays: until they
// have read when it is due.
const yield = 2 * time.Second

// Tend writes what the breaker of a lane has decided, for the relay that is registered as relayID,
// or begins its trial when that is due. It returns when to tend it again; zero: when a result
// changes the breaker. scan says that claims must read what was held now. What an error has kept
// from being written is due again at once.
func (k *Keeper) Tend(ctx context.Context, l Lane, now time.Time, relayID int32) (next time.Time, scan bool, err error) {
	v := l.View(now)
	b, hold, untilTurn := &v.Breaker, v.Hold, v.UntilTurn
	switch {
	case b.Write == policy.WriteOpen:
		next, err = k.writeOpen(ctx, l, v, relayID)
		return next, false, err
	case b.Write == policy.WriteClosed:
		scan, err = k.writeClosed(ctx, l, v, relayID)
		return time.Time{}, scan, err
	case b.State == policy.BreakerOpen && now.Before(b.TryAt):
		return b.TryAt, false, nil
	case b.State == policy.BreakerOpen && untilTurn > 0:
		return now.Add(untilTurn), false, nil // the lane's rate allows no request yet; another relay may try meanwhile
	case b.Alone:
		return time.Time{}, k.tryAlone(l, b.State), nil
	case b.State == policy.BreakerOpen:
		return k.beginTrial(ctx, l, v, now, relayID)
	case b.State == policy.BreakerHalfOpen && v.Asked > yield:
		return now.Add(v.Asked), false, k.leaveTrial(ctx, l, v, now, relayID)
	case b.State == policy.BreakerHalfOpen && b.Until.Sub(now) < hold/2:
		scan, err = k.renewTrial(ctx, l, v, now, relayID)
		return time.Time{}, scan, err
	case b.State == policy.BreakerHalfOpen && untilTurn == 0 && !v.Busy && !v.Scanned:
		return now, false, nil
	case b.State == policy.BreakerHalfOpen:
		return b.Until.Add(-hold / 2), false, nil
	case b.Unwritten != 0 && now.Before(b.WriteAt):
		return b.WriteAt, false, nil
	case b.Unwritten != 0:
		return time.Time{}, false, k.recordEvidence(ctx, l, v)
	}
	return time.Time{}, false, nil
}

// writeOpen writes that a breaker has opened, and returns when its first or next trial is due.
func (k *Keeper) writeOpen(ctx context.Context, l Lane, v View, relayID int32) (next time.Time, err error) {
	var others bool // that may be accepted
	if v.Breaker.MayBeAlone() {
		var held bool
		if others, held, err = (store{k.DB}).recordRefusal(ctx, v.Destination, relayID, v.Breaker.Cause); err != nil {
			return time.Time{}, err
		}
		if others && !held {
			l.Change(func(b *policy.Breaker) { next = b.HoldAlone(time.Now()) })
			k.Log.WithLevel(newsOnce(v.Breaker.Alone)).Str("destination", v.Destination).Str("error", v.Breaker.Cause).
				Msg("this relay is refused, and leaves the destination to relays that may be accepted; it tries again")
			return next, nil
		}
	}
	wait, probes, err := store{k.DB}.openBreaker(ctx, v.Destination, relayID, v.Breaker)
	if err != nil {
		return time.Time{}, err
	}
	if others {
		wait += yield
	}
	l.Change(func(b *policy.Breaker) { b.Opened(time.Now(), wait) })
	k.Log.WithLevel(newsOnce(probes > 0)).Str("destination", v.Destination).Str("error", v.Breaker.Cause).Int("failed_probes", probes).
		Int64("next_probe_in_ms", wait.Milliseconds()).Msg("breaker open: deliveries are held, and spend no attempts")
	k.Due()
	return time.Now().Add(wait), nil
}

// newsOnce returns the level of a line that is news once: each probe has its attempt's line.
func newsOnce(known bool) zerolog.Level {
	if known {
		return zerolog.DebugLevel
	}
	return zerolog.WarnLevel
}

// tryAlone begins the trial of a lane that this relay alone holds, unless it has begun.
func (k *Keeper) tryAlone(l Lane, state policy.BreakerState) (scan bool) {
	if state != policy.BreakerOpen {
		return false
	}
	l.Change(func(b *policy.Breaker) { b.TryAlone(time.Now()) })
	l.Rescan(true)
	return true
}

// writeClosed writes that a breaker has closed, and makes the next claims read all that was held.
func (k *Keeper) writeClosed(ctx context.Context, l Lane, v View, relayID int32) (scan bool, err error) {
	if v.Breaker.Alone {
		if err := (store{k.DB}).clearRefusal(ctx, v.Destination, relayID); err != nil {
			return false, err
		}
		l.Change(func(b *policy.Breaker) { b.ClosedAlone(time.Now()) })
		l.Rescan(false)
		return true, nil
	}
	if err := CloseBreaker(ctx, k.DB, v.Destination, relayID); err != nil {
		return false, err
	}
	l.Change(func(b *policy.Breaker) {
		if b.Write == policy.WriteClosed {
			b.Write, b.Since = policy.WriteNothing, time.Now()
		}
	})
	k.Log.Info().Str("destination", v.Destination).Msg("breaker closed: nothing is held any more")
	l.Rescan(false)
	k.Due()
	return true, nil
}

// beginTrial begins a trial of a lane if no other relay does, and returns when to try that again if
// it has not.
func (k *Keeper) beginTrial(ctx context.Context, l Lane, v View, now time.Time, relayID int32) (next time.Time, scan bool, err error) {
	taken, events, err := store{k.DB}.tryBreaker(ctx, v.Destination, relayID, v.Hold, v.Breaker.Implausible(v.Hold))
	if err != nil {
		return time.Time{}, false, err
	}
	if !taken { // nothing that waits is due, or another relay was first, as the next beat will show
		untilDue, err := store{k.DB}.untilDue(ctx, v.Destination)
		if err != nil {
			return time.Time{}, false, err
		}
		if next = now.Add(k.Poll); untilDue > 0 {
			next = now.Add(min(untilDue, k.Poll))
		}
		l.Change(func(b *policy.Breaker) { b.TryAt = next })
		return next, false, nil
	}
	l.Change(func(b *policy.Breaker) {
		b.Events = events
		b.Try(time.Now(), v.Hold)
	})
	l.Rescan(true)
	return time.Time{}, true, nil
}

// renewTrial prolongs this relay's trial of a lane, or closes the breaker when there was nothing to
// send: all that waited is gone, or waits behind another delivery.
func (k *Keeper) renewTrial(ctx context.Context, l Lane, v View, now time.Time, relayID int32) (scan bool, err error) {
	vain := !v.Busy && v.UntilTurn == 0
	l.Change(func(b *policy.Breaker) {
		if vain = vain && b.State == policy.BreakerHalfOpen && !b.Accepted; vain {
			b.Close(now)
		}
	})
	if vain {
		return k.writeClosed(ctx, l, v, relayID)
	}
	held, err := store{k.DB}.renewTrial(ctx, v.Destination, relayID, v.Hold)
	if err != nil {
		return false, err
	}
	l.Change(func(b *policy.Breaker) {
		if b.State != policy.BreakerHalfOpen {
			return
		}
		b.Until = now.Add(v.Hold)
		if !held {
			b.Enter(now, policy.BreakerOpen)
			b.TryAt = now.Add(v.Hold)
		}
	})
	return false, nil
}

// leaveTrial leaves this relay's trial of a lane to other relays: the destination has asked this
// one to wait, perhaps no other.
func (k *Keeper) leaveTrial(ctx context.Context, l Lane, v View, now time.Time, relayID int32) error {
	if err := (store{k.DB}).leaveTrial(ctx, v.Destination, relayID); err != nil {
		return err
	}
	l.Change(func(b *policy.Breaker) {
		if b.State == policy.BreakerHalfOpen {
			b.Enter(now, policy.BreakerOpen)
			b.TryAt = now.Add(v.Asked)
		}
	})
	return nil
}

// recordEvidence writes what this relay adds to the evidence against a destination, and learns what
// all relays hold.
func (k *Keeper) recordEvidence(ctx context.Context, l Lane, v View) error {
	failures, events, closed, err := store{k.DB}.recordEvidence(ctx, v.Destination, v.Breaker.Unwritten, v.Breaker.Events)
	if err != nil {
		return err
	}
	if !closed {
		failures, events = 0, nil // another relay has opened the breaker, as the next beat will show
	}
	written := v.Breaker.Unwritten
	l.Change(func(b *policy.Breaker) { b.EvidenceRecorded(time.Now(), written, failures, events) })
	return nil
}
