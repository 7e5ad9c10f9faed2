package relay

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
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

// A low load is settled in few statements, and what something waits for is settled soon.
func TestBatchesWaitForMoreUnlessSomethingWaitsForThem(t *testing.T) {
	t.Parallel()
	key, delivered := "k", policy.Decision{Outcome: policy.Delivered}
	for name, c := range map[string]struct {
		second settlement    // comes 6 ms after the first, and another one each 6 ms after that
		taken  int           // held by the lane
		rest   time.Duration // since the last batch
		want   int           // settlements in the first batch
	}{
		"nothing waits":            {settlement{Decision: delivered}, 16, 6 * time.Millisecond, 4},
		"an ordering key waits":    {settlement{Decision: delivered, delivery: delivery{event: post.Event{OrderingKey: &key}}}, 1, 6 * time.Millisecond, 2},
		"a retry waits":            {settlement{Decision: policy.Decision{Outcome: policy.Retry}}, 1, 6 * time.Millisecond, 2},
		"the lane waits for room":  {settlement{Decision: delivered}, 17, 6 * time.Millisecond, 1},
		"nothing came for a while": {settlement{Decision: delivered}, 1, 30 * time.Millisecond, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := &settler{core: &core{}, settlements: make(chan settlement, settleBatch), collectedAt: time.Now().Add(-c.rest)}
				l := newLane(&post.Endpoint{Destination: post.Destination{Name: "d", MaxInFlight: 64}})
				l.countTaken(live, c.taken)
				w.lanes.add(l)
				timer := time.NewTimer(time.Hour)
				defer timer.Stop()
				var sending sync.WaitGroup
				sending.Go(func() {
					for i := range 5 {
						<-time.After(6 * time.Millisecond) // of the bubble's clock
						s := settlement{Decision: delivered}
						if i == 0 {
							s = c.second
						}
						s.destination = "d"
						w.settlements <- s
					}
				})
				batch := w.collect(settlement{Decision: delivered, delivery: delivery{destination: "d"}}, timer)
				if len(batch) != c.want {
					t.Errorf("%d settlements in a batch, want %d", len(batch), c.want)
				}
				sending.Wait()
			})
		})
	}
}
