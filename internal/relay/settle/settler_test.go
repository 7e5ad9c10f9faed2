package settle

import (
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A low load is settled in few statements, and what something waits for is settled soon.
func TestBatchesWaitForMoreUnlessSomethingWaitsForThem(t *testing.T) {
	t.Parallel()
	key, delivered := "k", policy.Decision{Outcome: policy.Delivered}
	for name, c := range map[string]struct {
		second Settlement    // comes 6 ms after the first, and another one each 6 ms after that
		full   bool          // the lane needs room
		rest   time.Duration // since the last batch
		want   int           // settlements in the first batch
	}{
		"nothing waits":            {Settlement{Decision: delivered}, false, 6 * time.Millisecond, 4},
		"an ordering key waits":    {Settlement{Decision: delivered, OrderingKey: &key}, false, 6 * time.Millisecond, 2},
		"a retry waits":            {Settlement{Decision: policy.Decision{Outcome: policy.Retry}}, false, 6 * time.Millisecond, 2},
		"the lane waits for room":  {Settlement{Decision: delivered}, true, 6 * time.Millisecond, 1},
		"nothing came for a while": {Settlement{Decision: delivered}, false, 30 * time.Millisecond, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := New()
				w.NeedsRoom, w.collectedAt = func(string) bool { return c.full }, time.Now().Add(-c.rest)
				timer := time.NewTimer(time.Hour)
				defer timer.Stop()
				var sending sync.WaitGroup
				sending.Go(func() {
					for i := range 5 {
						<-time.After(6 * time.Millisecond) // of the bubble's clock
						s := Settlement{Decision: delivered}
						if i == 0 {
							s = c.second
						}
						w.Settle(s)
					}
				})
				batch := w.collect(Settlement{Decision: delivered}, timer)
				testkit.Equal(t, "settlements in a batch", len(batch), c.want)
				sending.Wait()
			})
		})
	}
}

// Each outcome of a claimed delivery has its row, and what else belongs to it.
func TestOutcomesOfRows(t *testing.T) {
	t.Parallel()
	r := newRoom(t, false).begin()
	of := r.claim(6, "key")
	gone, logged, refused := with(of[4], policy.Fail), of[0], with(of[5], policy.Fail)
	gone.Reason, gone.StatusCode, gone.PausesDestination = policy.ReasonGone, 410, true
	logged.Logged, logged.Took = true, 7*time.Millisecond
	refused.Posted, refused.StatusCode, refused.Reason, refused.Logged = false, 0, policy.ReasonInvalidEvent, false
	r.settle(logged, with(of[1], policy.Retry), with(of[2], policy.Hold), with(of[3], policy.Fail), gone, refused)
	r.end()
	r.wantRows("1 delivered 1 204 dated", "2 pending 1 500 server_error no later", "3 pending 0",
		"4 failed 1 500 server_error no", "5 failed 1 410 gone no", "6 failed 0 invalid_event no")
	for query, want := range map[string]string{
		`SELECT string_agg(concat_ws(' ', event_id, attempt, outcome, http_status, relay_id), ', ' ORDER BY event_id) FROM outbox_attempt`: "1 1 delivered 204 1, 2 1 retry 500 1, 4 1 fail 500 1, 5 1 fail 410 1",
		`SELECT concat_ws(' ', duration_ms, claim) FROM outbox_attempt WHERE event_id = 1`:                                                 "7 1000",
		`SELECT concat_ws(' ', rule, subject, count, first_event_id) FROM outbox_alert`:                                                    "failed default 3 4",
		`SELECT concat_ws(' ', paused, paused_reason) FROM outbox_destination WHERE destination = 'default'`:                               "t the receiver answered 410 Gone",
	} {
		if got := relaytest.Row[string](r.Database, query); got != want {
			t.Errorf("%s: %q, want %q", query, got, want)
		}
	}
	if len(r.written) != 6 || r.stale != 0 || len(r.failed) != 0 {
		t.Errorf("%d written, %d stale, %v", len(r.written), r.stale, r.failed)
	}
}

// A settlement whose delivery another relay has claimed changes nothing, and is counted.
func TestStaleSettlementsChangeNothing(t *testing.T) {
	t.Parallel()
	r := newRoom(t, false).begin()
	of := r.claim(5, "key")
	for i, outcome := range []policy.Outcome{policy.Delivered, policy.Retry, policy.Hold, policy.Fail, policy.Fail} {
		of[i] = with(of[i], outcome)
	}
	of[4].Reason, of[4].PausesDestination = policy.ReasonGone, true
	r.Exec(`UPDATE outbox_delivery SET claim = $1, claimed_by = 2`, fence+1)
	before := relaytest.Rows[string](r.Database, `SELECT d::text FROM outbox_delivery d ORDER BY event_id`)
	r.settle(of...)
	r.end()
	if after := relaytest.Rows[string](r.Database, `SELECT d::text FROM outbox_delivery d ORDER BY event_id`); !slices.Equal(before, after) {
		t.Errorf("late settlements turned\n%q into\n%q", before, after)
	}
	if n := relaytest.Row[int](r.Database, `SELECT (SELECT count(*) FROM outbox_alert) + (SELECT count(*) FROM outbox_destination WHERE paused)`); n != 0 {
		t.Error("they raised an alert, or paused the destination")
	}
	// These attempts were made all the same; the log has those that did not deliver.
	testkit.Equal(t, "logged", relaytest.Rows[int64](r.Database, `SELECT event_id FROM outbox_attempt ORDER BY event_id`), []int64{2, 4, 5})
	if r.stale != len(of) || len(r.written) != len(of) || !strings.Contains(r.logged.String(), "settled too late") {
		t.Errorf("%d stale, %d written: %s", r.stale, len(r.written), r.logged.String())
	}
}

// A table is locked for a while, as by a migration. All is written once, when that has ended.
func TestLockedTableIsWaitedFor(t *testing.T) {
	t.Parallel()
	r := newRoom(t, false).begin()
	of := r.claim(20, "key")
	migration := r.Begin()
	_, err := migration.Exec(t.Context(), `LOCK TABLE outbox_delivery IN ACCESS EXCLUSIVE MODE`)
	relaytest.Must(t, err)
	r.settle(of...)
	r.awaits("two failures", func() bool { return len(r.failed) >= 2 })
	relaytest.Must(t, migration.Commit(t.Context()))
	r.end()
	if n := relaytest.Row[int](r.Database, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND attempts = 1`); n != len(of) || r.stale != 0 {
		t.Errorf("%d of %d delivered, %d stale", n, len(of), r.stale)
	}
}

// While the database is away the settler tries again, until it has to give up.
func TestSettlerGivesUp(t *testing.T) {
	t.Parallel()
	r := newRoom(t, false)
	of := r.claim(3, "key")
	away, err := pgxpool.New(t.Context(), "host="+t.TempDir()) // where no server listens
	relaytest.Must(t, err)
	t.Cleanup(away.Close)
	r.settler.DB = away
	r.begin().settle(of...)
	r.awaits("two failures", func() bool { return len(r.failed) >= 2 })
	r.giveUp()
	r.end()
	if len(r.written) != 0 || !strings.Contains(r.logged.String(), `"deliveries":3,"message":"stopping without having settled`) {
		t.Errorf("%d are written: %s", len(r.written), r.logged.String())
	}
}

// A relay that gives back what other relays deliver tells them.
func TestDeliveriesForOthersAskForASweep(t *testing.T) {
	t.Parallel()
	r := newRoom(t, false)
	of := with(r.claim(1, "key")[0], policy.Hold)
	conn, err := r.Pool.Acquire(t.Context())
	relaytest.Must(t, err)
	defer conn.Release()
	_, err = conn.Exec(t.Context(), `LISTEN outbox_wake`)
	relaytest.Must(t, err)
	r.forOthers = of.Destination
	r.begin().settle(of)
	r.end()
	got, err := conn.Conn().WaitForNotification(t.Context())
	relaytest.Must(t, err)
	if !strings.HasPrefix(got.Payload, "sweep ") {
		t.Errorf("notified %q", got.Payload)
	}
	r.wantRows("1 pending 0")
}
