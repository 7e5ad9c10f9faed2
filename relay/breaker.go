package relay

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/breaker"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
)

// lockedAgain is how long a breaker's statement waits that met another session's lock on the
// destination.
const lockedAgain = 2 * time.Second

// A breakerKeeper writes what the breakers of all lanes decide, until the database takes it. It is
// the claimer's.
type breakerKeeper struct {
	breaker.Keeper
	lanes         *lane.Lanes
	store         *store
	agenda        *agenda.Agenda
	settling      context.Context
	databaseError func(operation string, err error)
}

// writeDecisions writes what the breakers of all lanes have decided, and begins trials that are
// due. It registers when to do so again.
func (k *breakerKeeper) writeDecisions(now time.Time, relayID int32) error {
	for _, l := range k.lanes.Visited() {
		k.recordSlowdown(l, now, relayID)
		if now.Before(l.BreakerLockedUntil) {
			k.agenda.At(agenda.CauseBreaker, l.BreakerLockedUntil)
			continue
		}
		next, scan, err := k.Tend(k.settling, l, now, relayID)
		if scan {
			k.agenda.At(agenda.CauseScan, now)
		}
		if pg.HasCode(err, pg.LockNotAvailable) { // the other lanes must not wait for one row
			k.databaseError("breaker", err)
			l.BreakerLockedUntil = time.Now().Add(lockedAgain)
			next, err = l.BreakerLockedUntil, nil
		}
		if err != nil {
			return err
		}
		if !next.IsZero() {
			k.agenda.At(agenda.CauseBreaker, now.Add(max(next.Sub(now), agenda.TurnGap))) // not in this turn again
		}
	}
	return nil
}

// recordSlowdown writes what the lane's receiver asks for, if that is news. What cannot be written
// is only not shown.
func (k *breakerKeeper) recordSlowdown(l *lane.Lane, now time.Time, relayID int32) {
	asked, news, first := l.SlowdownNews(now, relayID)
	if !news {
		return
	}
	if err := k.store.recordSlowdown(k.settling, l.Name, relayID, max(0, asked.Until.Sub(now)), asked.PerSecond, first); err != nil {
		k.databaseError("record slowdown", err)
		return
	}
	l.SlowdownTold(asked, relayID)
}
