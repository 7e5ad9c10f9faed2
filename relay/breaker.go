package relay

import (
	"time"

	"github.com/outbox-relay/outbox-relay/relay/breaker"
	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// lockedAgain is how long a breaker's statement waits that met another session's lock on the destination.
const lockedAgain = 2 * time.Second

// A breakerKeeper writes what the breakers of all lanes decide, until the database takes it. It is the claimer's.
type breakerKeeper struct {
	*core
	breaker.Keeper
	looks bool // the claimer must look for what was held
}

// writeDecisions writes what the breakers of all lanes have decided, begins trials that are due, and returns when to do so again; zero:
// when a result changes something.
func (k *breakerKeeper) writeDecisions(now time.Time, instance int32) (next time.Time, err error) {
	plan := func(at time.Time) {
		if !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	for _, l := range k.lanes.list() {
		if now.Before(l.breakerLockedUntil) {
			plan(l.breakerLockedUntil)
			continue
		}
		at, look, err := k.Tend(k.settling, l, now, instance)
		k.looks = k.looks || look
		if pg.HasCode(err, pg.LockNotAvailable) { // the other lanes must not wait for one row
			k.databaseError("breaker", err)
			l.breakerLockedUntil = time.Now().Add(lockedAgain)
			at, err = l.breakerLockedUntil, nil
		}
		if err != nil {
			return next, err
		}
		plan(at)
	}
	return next, nil
}

// View returns what the breaker's keeper needs to know of the lane.
func (l *lane) View(now time.Time) breaker.View {
	v := breaker.View{Destination: l.name}
	v.Breaker, v.Hold, v.UntilTurn = l.breakerAt(now)
	if v.Breaker.State == policy.BreakerHalfOpen {
		v.Busy, v.Walked = l.busy(), l.hasWalkedAll(now)
	}
	return v
}

func (l *lane) Change(change func(*policy.Breaker)) { l.changeBreaker(change) }

// Walk makes claims look at what was held.
func (l *lane) Walk(probe bool) {
	if !probe {
		l.walkNow()
		return
	}
	for i := range l.walks { // each probe goes on behind the one before it, then at the front: another delivery may pass
		w := &l.walks[i]
		w.due, w.again = time.Time{}, w.position != (keyset{})
	}
}
