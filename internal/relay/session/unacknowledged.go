package session

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

// Unacknowledged finds the claims that the database made without this relay having learned of them:
// one goroutine claims, so they are those whose lease ends after that of the last claim that was
// acknowledged. It is not safe for concurrent use.
type Unacknowledged struct {
	relayID  int32     // that the rest is about
	after    time.Time // when the leases of the last acknowledged claim end, by the database; zero: none was
	possible bool
}

// Acknowledged records that a claim made at the given time of the database has arrived.
func (u *Unacknowledged) Acknowledged(relayID int32, at time.Time, lease time.Duration) {
	// The margin is for rounding. It is shorter than any round trip, so the next claim's leases end
	// after it.
	*u = Unacknowledged{relayID: relayID, after: at.Add(lease + 10*time.Microsecond)}
}

// Failed records that a claim has failed with err.
func (u *Unacknowledged) Failed(relayID int32, err error) {
	if u.relayID != relayID {
		*u = Unacknowledged{relayID: relayID}
	}
	u.possible = u.possible || pg.OutcomeUnknown(err)
}

// GiveBack gives back what a failed claim may have taken. It must succeed before the next claim,
// whose leases would end later still. Claims of an earlier number ended with it.
func (u *Unacknowledged) GiveBack(ctx context.Context, db pg.DB, relayID int32) error {
	if !u.possible || u.relayID != relayID {
		return nil
	}
	if err := GiveBackUnacknowledged(ctx, db, relayID, u.after); err != nil {
		return err
	}
	u.possible = false
	return nil
}
