package relay

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/relay/pg"
)

func TestNewSettlement(t *testing.T) {
	t.Parallel()
	p := policy(0.1, time.Second, time.Minute)
	retry := result{reason: ReasonServerError, statusCode: 500, message: "500 Internal Server Error", posted: true}
	for _, c := range []struct {
		name     string
		attempts int
		give     result
		fraction float64
		outcome  Outcome
		delay    time.Duration
		message  string
	}{
		{"first attempt", 0, retry, 0, Retry, time.Second, retry.message},
		{"jitter", 0, retry, 0.5, Retry, 1050 * time.Millisecond, retry.message},
		{"second attempt", 1, retry, 0, Retry, time.Minute, retry.message},
		{"seventh attempt", 6, retry, 0, Retry, time.Minute, retry.message},
		{"eighth attempt", 7, retry, 0, Fail, 0, "attempt 8 of 8: 500 Internal Server Error"},
		{"far beyond", 1_000_000, retry, 0, Fail, 0, "attempt 1000001 of 8: 500 Internal Server Error"},
		{"asked to wait", 0, result{reason: ReasonUnavailable, retryAfter: time.Hour, posted: true}, 0, Retry, time.Hour, ""},
		{"asked to wait beyond the cap", 0, result{reason: ReasonUnavailable, retryAfter: 240 * time.Hour, posted: true}, 0, Retry, 24 * time.Hour, ""},
		{"delivered at the eighth", 7, result{reason: ReasonOK, posted: true}, 0, Delivered, 0, ""},
		{"failed at once", 0, result{reason: ReasonRejected, message: "422", posted: true}, 0, Fail, 0, "422"},
		{"held at the eighth", 7, result{reason: ReasonShutdown}, 0, Hold, 0, ""},
	} {
		d := delivery{eventID: 1, attempts: c.attempts, event: event{payload: []byte("{}")}}
		s := newSettlement(d, Decide(c.give, circumstances{attempt: c.attempts + 1, retry: p, fraction: c.fraction}), time.Now(), time.Second)
		if s.outcome != c.outcome || s.delay != c.delay || s.message != c.message || s.reason != c.give.reason {
			t.Errorf("%s: %s after %s, %q; want %s after %s, %q", c.name, s.outcome, s.delay, s.message, c.outcome, c.delay, c.message)
		}
		if s.event.payload != nil {
			t.Errorf("%s: the settlement keeps the payload in memory", c.name)
		}
	}
}

func TestLastMessageStaysWithinItsBounds(t *testing.T) {
	t.Parallel()
	v := result{reason: ReasonServerError, message: strings.Repeat("x", plain.MaxBytes), posted: true}
	s := Decide(v, circumstances{attempt: 8, retry: policy(0, time.Second)})
	if len(s.message) > plain.MaxBytes || !strings.HasPrefix(s.message, "attempt 8 of 8: ") {
		t.Errorf("%d bytes: %.40q", len(s.message), s.message)
	}
}

func TestSettlementsAreSortedByTheStatementThatWritesThem(t *testing.T) {
	t.Parallel()
	b := batch{settlements: []settlement{
		{decision: decision{outcome: Delivered}},
		{decision: decision{outcome: Retry, logged: true}},
		{decision: decision{outcome: Fail, logged: true}},
		{decision: decision{outcome: Fail}},
		{decision: decision{outcome: Hold}},
	}}
	o := b.byOutcome()
	if len(o.delivered) != 1 || len(o.retried) != 1 || len(o.failed) != 2 || len(o.held) != 1 || len(o.logged) != 2 {
		t.Errorf("%d delivered, %d retried, %d failed, %d held, %d logged", len(o.delivered), len(o.retried), len(o.failed), len(o.held), len(o.logged))
	}
}

// What passes is waited for, for ever; all else must not keep the other rows of a batch.
func TestErrorsOfTheDatabaseAreClassified(t *testing.T) {
	t.Parallel()
	for code, want := range map[string]pg.ErrorClass{
		"40001": pg.ErrorPassing, "40P01": pg.ErrorPassing, "53100": pg.ErrorPassing, "53300": pg.ErrorPassing, "57P01": pg.ErrorPassing,
		"57P03": pg.ErrorPassing, "57014": pg.ErrorPassing, "25006": pg.ErrorPassing, "42501": pg.ErrorPassing, "42P01": pg.ErrorPassing, "08006": pg.ErrorPassing,
		"XX000": pg.ErrorDamaged, "XX001": pg.ErrorDamaged, "XX002": pg.ErrorDamaged, "58030": pg.ErrorDamaged, "54000": pg.ErrorDamaged,
		"22003": pg.ErrorRefused, "23514": pg.ErrorRefused, "38000": pg.ErrorRefused, "44000": pg.ErrorRefused, "P0001": pg.ErrorRefused, "55P03": pg.ErrorRefused,
	} {
		if got := pg.ClassifyError(fmt.Errorf("settle: %w", &pgconn.PgError{Code: code})); got != want {
			t.Errorf("%s is of class %d, want %d", code, got, want)
		}
	}
	for _, err := range []error{nil, context.DeadlineExceeded, &pgconn.PgError{Code: "bad"}} {
		if got := pg.ClassifyError(err); got != pg.ErrorPassing {
			t.Errorf("%v is of class %d", err, got)
		}
	}
}
