package relay

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// unacknowledged finds the claims that the database made without this relay having learned of them: one goroutine claims,
// so they are those whose lease ends after that of the last claim that was acknowledged. It belongs to the claimer.
type unacknowledged struct {
	instance int32     // that the rest is about
	after    time.Time // when the leases of the last acknowledged claim end, by the database; zero: none was
	possible bool
}

// acknowledged records that a claim made at the given time of the database has arrived.
func (u *unacknowledged) acknowledged(instance int32, at time.Time, lease time.Duration) {
	// The margin is for rounding. It is shorter than any round trip, so the next claim's leases end after it.
	*u = unacknowledged{instance: instance, after: at.Add(lease + 10*time.Microsecond)}
}

// failed records that a claim has failed with err.
func (u *unacknowledged) failed(instance int32, err error) {
	if u.instance != instance {
		*u = unacknowledged{instance: instance}
	}
	u.possible = u.possible || outcomeUnknown(err)
}

// giveBack gives back what a failed claim may have taken. It must succeed before the next claim, whose leases would end
// later still. Claims of an earlier instance ended with it.
func (u *unacknowledged) giveBack(ctx context.Context, s *store, instance int32) error {
	if !u.possible || u.instance != instance {
		return nil
	}
	if err := s.giveBackUnacknowledged(ctx, instance, u.after); err != nil {
		return err
	}
	u.possible = false
	return nil
}

// outcomeUnknown reports whether a statement that failed may have been executed. An error that the server reports and
// survives has undone it; so has one that kept it from being sent.
func outcomeUnknown(err error) bool {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.SeverityUnlocalized != "ERROR"
	}
	return !pgconn.SafeToRetry(err)
}
