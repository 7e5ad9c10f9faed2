package relay

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

func TestSettlementKeepsNoPayload(t *testing.T) {
	t.Parallel()
	s := newSettlement(delivery{eventID: 1, event: event{payload: []byte("{}")}}, policy.Decision{}, time.Now(), time.Second)
	if s.event.payload != nil {
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
	for code, want := range map[string]errorClass{
		"40001": errorPassing, "40P01": errorPassing, "53100": errorPassing, "53300": errorPassing, "57P01": errorPassing,
		"57P03": errorPassing, "57014": errorPassing, "25006": errorPassing, "42501": errorPassing, "42P01": errorPassing, "08006": errorPassing,
		"XX000": errorDamaged, "XX001": errorDamaged, "XX002": errorDamaged, "58030": errorDamaged, "54000": errorDamaged,
		"22003": errorRefused, "23514": errorRefused, "38000": errorRefused, "44000": errorRefused, "P0001": errorRefused, "55P03": errorRefused,
	} {
		if got := classifyError(fmt.Errorf("settle: %w", &pgconn.PgError{Code: code})); got != want {
			t.Errorf("%s is of class %d, want %d", code, got, want)
		}
	}
	for _, err := range []error{nil, context.DeadlineExceeded, &pgconn.PgError{Code: "bad"}} {
		if got := classifyError(err); got != errorPassing {
			t.Errorf("%v is of class %d", err, got)
		}
	}
}
