package relay

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/breaker"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// lockedAgain is how long a breaker's statement waits that met another session's lock on the destination.
const lockedAgain = 2 * time.Second

// A breakerKeeper writes what the breakers of all lanes decide, until the database takes it. It is the claimer's.
type breakerKeeper struct {
	breaker.Keeper
	lanes         *lanes
	settling      context.Context
	databaseError func(operation string, err error)
}

// writeDecisions writes what the breakers of all lanes have decided, and begins trials that are due. It registers when to do so again.
func (k *breakerKeeper) writeDecisions(causes *agenda.Agenda, now time.Time, instance int32) error {
	for _, l := range k.lanes.visited() {
		if now.Before(l.breakerLockedUntil) {
			causes.At(agenda.CauseBreaker, l.breakerLockedUntil)
			continue
		}
		next, scan, err := k.Tend(k.settling, l, now, instance)
		if scan {
			causes.At(agenda.CauseScan, now)
		}
		if pg.HasCode(err, pg.LockNotAvailable) { // the other lanes must not wait for one row
			k.databaseError("breaker", err)
			l.breakerLockedUntil = time.Now().Add(lockedAgain)
			next, err = l.breakerLockedUntil, nil
		}
		if err != nil {
			return err
		}
		if !next.IsZero() {
			causes.At(agenda.CauseBreaker, now.Add(max(next.Sub(now), agenda.TurnGap))) // not in this turn again
		}
	}
	return nil
}

// View returns what the breaker's keeper needs to know of the lane.
func (l *lane) View(now time.Time) breaker.View {
	v := breaker.View{Destination: l.name}
	v.Breaker, v.Hold, v.UntilTurn = l.breakerAt(now)
	if v.Breaker.State == policy.BreakerHalfOpen {
		v.Busy, v.Scanned = l.busy(), l.hasScannedAll(now)
	}
	return v
}

func (l *lane) Change(change func(*policy.Breaker)) { l.changeBreaker(change) }

// Rescan makes claims read what was held.
func (l *lane) Rescan(probe bool) {
	if !probe {
		l.restartScans()
		return
	}
	for i := range l.cursors { // each probe continues behind the one before it, then at the front: another delivery may pass
		w := &l.cursors[i]
		w.due, w.restarts = time.Time{}, w.position != (keyset{})
	}
}
