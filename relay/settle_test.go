package relay

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

func TestSettlementKeepsNoPayload(t *testing.T) {
	t.Parallel()
	s := newSettlement(delivery{eventID: 1, event: post.Event{Payload: []byte("{}")}}, policy.Decision{}, time.Now(), time.Second)
	if s.event.Payload != nil {
		t.Error("the settlement keeps the payload in memory")
	}
}

func TestSettlementsAreSortedByTheStatementThatWritesThem(t *testing.T) {
	t.Parallel()
	b := batch{settlements: []settlement{
		{Decision: policy.Decision{Outcome: policy.Delivered}},
		{Decision: policy.Decision{Outcome: policy.Retry, Logged: true}},
		{Decision: policy.Decision{Outcome: policy.Fail, Logged: true}},
		{Decision: policy.Decision{Outcome: policy.Fail}},
		{Decision: policy.Decision{Outcome: policy.Hold}},
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
