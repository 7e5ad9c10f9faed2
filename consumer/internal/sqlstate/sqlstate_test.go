package sqlstate_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/consumer/internal/sqlstate"
)

// other is an error of another driver.
type other string

func (other) Error() string      { return "failed" }
func (o other) SQLState() string { return string(o) }

func TestOf(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err      error
		want     string
		conflict bool
	}{
		{nil, "", false},
		{errors.New("EOF"), "", false},
		{&pgconn.PgError{Code: "23505"}, "23505", false},
		{fmt.Errorf("commit: %w", &pgconn.PgError{Code: sqlstate.DeadlockDetected}), "40P01", true},
		{fmt.Errorf("commit: %w", other(sqlstate.SerializationFailure)), "40001", true},
	} {
		if got := sqlstate.Of(c.err); got != c.want || sqlstate.IsConflict(c.err) != c.conflict {
			t.Errorf("%v: %q, a conflict: %v", c.err, got, sqlstate.IsConflict(c.err))
		}
	}
}
