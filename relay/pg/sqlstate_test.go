package pg

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

func TestOutcomeUnknown(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		err  error
		want bool
	}{
		"refused":    {&pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "55P03"}, false},
		"terminated": {&pgconn.PgError{SeverityUnlocalized: "FATAL", Code: "57P01"}, true},
		"cut off":    {fmt.Errorf("claim: %w", errors.New("unexpected EOF")), true},
		"timed out":  {context.DeadlineExceeded, true},
	} {
		if got := OutcomeUnknown(c.err); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}
