package ops_test

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/batch"
	"github.com/outbox-relay/outbox-relay/internal/relay/identity"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestReplay(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(5, "k")
	db.Settled("failed", "event_id = 1")
	db.Settled("delivered", "event_id = 2")
	db.Settled("discarded", "event_id = 3")
	db.Exec(`UPDATE outbox_delivery SET claimed_by = 1, claim = 1, lease_expires_at = now() + interval '1 hour' WHERE event_id = 4`)
	outbox := ops.New(db.Pool)
	ids := []int64{1, 1, 2, 3, 4, 5, 77}

	before := relaytest.Row[string](db, `SELECT string_agg(d::text, ' ' ORDER BY event_id) FROM outbox_delivery d`)
	db.Exec(`INSERT INTO outbox_destination (destination, paused, paused_at) VALUES ('default', true, now())`)
	_, b, err := outbox.Preview(t.Context(), ops.Order{Action: "replay", Selection: ops.Selection{EventIDs: ids}})
	relaytest.Must(t, err)
	if len(b.Obstacles) != 1 || !strings.Contains(b.Obstacles[0], `"default" is paused: nothing is sent there before outbox-relay resume default`) {
		t.Errorf("what is replayed waits for the end of a pause: %q", b.Obstacles)
	}
	testkit.Equal(t, "a preview changes something", relaytest.Row[string](db, `SELECT string_agg(d::text, ' ' ORDER BY event_id) FROM outbox_delivery d`), before)
	if len(b.Sample) != 1 || b.Sample[0].EventID != 1 || b.Sample[0].IdempotencyKey != "k-1" || b.Sample[0].Status != "failed" {
		t.Errorf("the sample is %+v", b.Sample)
	}
	b, err = outbox.Replay(t.Context(), ops.Selection{EventIDs: ids}, 0, nil)
	relaytest.Must(t, err)
	// Only what failed, unless something else was said; what is pending, in flight or not, is never
	// touched.
	if b.Matched != 1 || b.Done != 1 || b.Unknown != 1 || !slices.Equal(b.UnknownIDs, []int64{77}) ||
		!maps.Equal(b.OtherStatus, map[string]int64{"delivered": 1, "discarded": 1, "pending": 2}) {
		t.Errorf("%+v", b)
	}
	b, err = outbox.Replay(t.Context(), ops.Selection{EventIDs: ids, Statuses: []string{"delivered", "discarded", "failed"}}, 0, nil)
	relaytest.Must(t, err)
	if b.Done != 2 || b.OtherStatus["pending"] != 3 {
		t.Errorf("%+v", b)
	}
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE event_id <= 3 AND status = 'pending' AND replay AND attempts = 0 AND rescues = 0
		AND next_attempt_at <= clock_timestamp() AND delivered_at IS NULL AND claim = 10 AND last_error = 'attempt 8 of 8: 500'`); n != 3 {
		t.Errorf("%d of 3 are as a replay leaves them: %v", n, relaytest.Rows[string](db, `SELECT d::text FROM outbox_delivery d`))
	}
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE event_id > 3 AND NOT replay AND claim = 5 - event_id`); n != 2 {
		t.Error("a pending delivery was touched")
	}
	// Once more is nothing more.
	b, err = outbox.Replay(t.Context(), ops.Selection{Destination: "default", Statuses: []string{"delivered", "discarded", "failed"}}, 0, nil)
	relaytest.Must(t, err)
	if b.Matched != 0 || b.Done != 0 {
		t.Errorf("%+v", b)
	}
	_, err = outbox.Replay(t.Context(), ops.Selection{Statuses: []string{"pending"}}, 0, nil)
	testkit.ErrorContains(t, "error", err, `status "pending" cannot be chosen; choose failed, delivered, discarded`)
}

// The alert about failed deliveries ends with the replay of the last one.
func TestReplayEndsTheAlert(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "shop", "mail")
	db.Insert(2, "k")
	db.Settled("failed", "destination = 'shop' OR event_id = 1")
	db.Exec(`INSERT INTO outbox_alert (rule, subject) VALUES ('failed', 'shop'), ('failed', 'mail'), ('lag', 'shop')`)
	open := func() string {
		return relaytest.Row[string](db, `SELECT string_agg(rule || ' ' || subject, ', ' ORDER BY rule, subject) FROM outbox_alert WHERE resolved_at IS NULL`)
	}
	outbox := ops.New(db.Pool)
	for _, step := range []struct {
		event int64
		open  string
	}{{1, "failed shop, lag shop"}, {2, "lag shop"}} {
		_, err := outbox.Replay(t.Context(), ops.Selection{EventIDs: []int64{step.event}}, 0, nil)
		relaytest.Must(t, err)
		testkit.Equal(t, "open alerts", open(), step.open)
	}
}

// Receivers forget: what they may have processed long ago is not sent again by mistake.
func TestReplayOfOldEvents(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, created_at)
		VALUES ('t', '{}', 'old', now() - interval '91 days'), ('t', '{}', 'young', now() - interval '89 days')`)
	db.Insert(1, "gone")
	db.Settled("failed", "true")
	db.Exec(`DELETE FROM outbox WHERE idempotency_key = 'gone-1'`)
	outbox, memory := ops.New(db.Pool), 90*24*time.Hour
	for _, find := range []func() (ops.Bulk, error){
		func() (ops.Bulk, error) {
			_, b, err := outbox.Preview(t.Context(), ops.Order{Action: "replay", Selection: ops.Selection{Destination: "default"}, Memory: memory})
			return b, err
		},
		func() (ops.Bulk, error) {
			return outbox.Replay(t.Context(), ops.Selection{Destination: "default"}, memory, nil)
		},
	} {
		b, err := find()
		relaytest.Must(t, err)
		if b.Matched != 1 || b.TooOld != 1 || b.EventMissing != 1 {
			t.Errorf("%+v", b)
		}
	}
	testkit.Equal(t, "replayed", relaytest.Rows[int64](db, `SELECT event_id FROM outbox_delivery WHERE replay`), []int64{2})
	b, err := outbox.Replay(t.Context(), ops.Selection{Destination: "default"}, 0, nil)
	relaytest.Must(t, err)
	if b.Done != 1 {
		t.Errorf("%+v", b)
	}
}

// No replay sends an event that breaks a rule, whatever its status was, nor one before its time.
func TestReplayKeepsToTheTable(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(3, "k")
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, available_at) VALUES ('t', '{}', 'later', now() + interval '1 day')`)
	db.Exec(`UPDATE outbox_delivery SET status = (ARRAY['failed', 'discarded', 'failed', 'discarded'])[event_id],
		last_reason = CASE WHEN event_id < 4 THEN 'invalid_event' END,
		last_error = CASE WHEN event_id < 3 THEN 'the event breaks the rule outbox_payload_is_at_most_1_mib' WHEN event_id = 3 THEN 'no topic has this name' END`)
	selection := ops.Selection{Destination: "default", Statuses: []string{"failed", "discarded"}}
	for _, s := range []ops.Selection{{EventIDs: batch.IDs{1, 2}, Statuses: selection.Statuses}, selection} {
		b, err := ops.New(db.Pool).Replay(t.Context(), s, 0, nil)
		relaytest.Must(t, err)
		if b.BreaksRule != 2 || len(s.EventIDs) > 0 == (b.Done > 0) {
			t.Errorf("%+v", b)
		}
	}
	testkit.Equal(t, "what is sent now, and later", relaytest.Rows[string](db, `SELECT d.event_id || CASE WHEN d.next_attempt_at = e.available_at THEN ' in time' ELSE ' now' END
		FROM outbox_delivery d JOIN outbox e ON e.id = d.event_id WHERE d.status = 'pending' ORDER BY 1`), []string{"3 now", "4 in time"})
}

func TestDiscard(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(4, "k")
	db.Exec(`DELETE FROM outbox_route`)
	db.Insert(1, "parked")
	db.Settled("failed", "event_id = 1")
	db.Exec(`UPDATE outbox_delivery SET claimed_by = 1, lease_expires_at = now() + interval '1 hour' WHERE event_id = 2`)
	db.Exec(`UPDATE outbox_delivery SET claimed_by = 1, lease_expires_at = now() - interval '1 second' WHERE event_id = 3`)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() + interval '1 hour' WHERE event_id = 4`)
	outbox := ops.New(db.Pool)
	b, err := outbox.Discard(t.Context(), ops.Selection{Destination: "default"}, nil)
	relaytest.Must(t, err)
	if b.Matched != 3 || b.Done != 3 || b.InFlight != 1 {
		t.Errorf("%+v", b)
	}
	testkit.Equal(t, "discarded", relaytest.Rows[int64](db, `SELECT event_id FROM outbox_delivery WHERE status = 'discarded' AND claimed_by IS NULL ORDER BY event_id`), []int64{1, 3, 4})
	b, err = outbox.Discard(t.Context(), ops.Selection{EventIDs: []int64{1, 2, 3, 4, 5}}, nil)
	relaytest.Must(t, err)
	if b.Done != 1 || b.InFlight != 1 || b.OtherStatus["discarded"] != 3 {
		t.Errorf("%+v", b)
	}
	testkit.Equal(t, "the parked one", relaytest.Row[string](db, `SELECT status FROM outbox_delivery WHERE destination = ''`), "discarded")
}

// An operator who ends a bulk command ends it between two batches: what was begun is whole, and
// known. While a discard goes through what is due, a relay makes deliveries wait behind a head, and
// releases one that waits.
func TestDiscardWhileDeliveriesMove(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', i, 'k' FROM generate_series(1, 3500) i`)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('t', '{}', 'other', 'other')`)
	moved := false
	b, err := ops.New(db.Pool).Discard(t.Context(), ops.Selection{OrderingKey: "k"}, func(ops.Bulk) {
		if !moved {
			db.Exec(`UPDATE outbox_delivery SET blocked_by = 1 WHERE status = 'pending' AND event_id > 1200 AND ordering_key = 'k'`)
			moved = true
		}
	})
	relaytest.Must(t, err)
	left := relaytest.Rows[int64](db, `SELECT event_id FROM outbox_delivery WHERE status = 'pending' ORDER BY event_id`)
	if b.Matched != 3500 || b.Done != 3500 || !slices.Equal(left, []int64{3501}) {
		t.Errorf("%d deliveries are left; %+v", len(left), b)
	}
}

// On a copy, everything that was pending when the command began is given up: also what is parked,
// what is not due, and what was in flight when the copy was made. What the producer adds meanwhile
// is not from the original.
func TestDiscardQuarantined(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "a", "b")
	outbox := ops.New(db.Pool)
	if _, err := outbox.DiscardQuarantined(t.Context(), "", nil); !errors.Is(err, identity.ErrNotQuarantined) {
		t.Errorf("where no relay has worked: %v", err)
	}
	db.Insert(600, "original")
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() + event_id * interval '1 hour', replay = event_id % 2 = 0`)
	db.Settled("failed", "event_id = 3")
	db.Exec(`UPDATE outbox_delivery SET claimed_by = 1, lease_expires_at = now() + interval '1 hour' WHERE event_id = 4`)
	db.Exec(`DELETE FROM outbox_route`)
	db.Insert(1, "parked")
	_, err := outbox.AcceptIdentity(t.Context(), "")
	relaytest.Must(t, err)
	db.Exec(`UPDATE outbox_identity SET database_oid = 1`)

	tx := db.Begin()
	_, err = tx.Exec(t.Context(), `SELECT FROM outbox_delivery WHERE event_id = 5 AND destination = 'a' FOR UPDATE`)
	relaytest.Must(t, err)
	var steps []int64
	b, err := outbox.DiscardQuarantined(t.Context(), "", func(b ops.Bulk) {
		if steps = append(steps, b.Done); len(steps) == 1 {
			db.Exec(`INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'b')`)
			db.Insert(2, "newer")
			db.Exec(`UPDATE outbox_delivery SET replay = true, next_attempt_at = now() + interval '1 year' WHERE event_id > 601`) // ahead of the walk
		}
	})
	if err == nil || err.Error() != "discard: 1 delivery was locked or changed by another session" || b.Done != 1198 || b.Missed != 1 || !slices.Equal(steps, []int64{999, 1198}) {
		t.Errorf("%+v, %v, in steps %v", b, err, steps)
	}
	relaytest.Must(t, tx.Rollback(t.Context()))
	db.Exec(`DELETE FROM outbox_delivery WHERE event_id > 601; DELETE FROM outbox WHERE id > 601`)
	b, err = outbox.DiscardQuarantined(t.Context(), "", nil)
	if err != nil || b.Done != 1 {
		t.Errorf("again: %+v, %v", b, err)
	}
	want := []string{"discarded quarantined 1199", "failed server_error 2"}
	if got := relaytest.Rows[string](db, `SELECT concat_ws(' ', status, last_reason, count(*)) FROM outbox_delivery GROUP BY status, last_reason ORDER BY 1`); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A retry makes due what was attempted and waits, nothing else, and says what keeps it from being
// sent.
func TestRetry(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(7, "k")
	db.Settled("failed", "event_id = 2")
	db.Settled("delivered", "event_id = 3")
	const waits = `UPDATE outbox_delivery SET attempts = 2, last_attempt_at = now(), last_reason = 'unauthorized', claim = 3, not_after = now() + interval '1 day',
		next_attempt_at = now() + interval '4 hours' WHERE event_id IN (1, 7)`
	db.Exec(waits)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() + interval '1 hour' WHERE event_id = 5;
		SET LOCAL session_replication_role = replica; UPDATE outbox SET available_at = now() + interval '1 hour' WHERE id = 5`) // its producer said so
	db.Exec(`UPDATE outbox_delivery SET claimed_by = 1, lease_expires_at = now() + interval '1 hour' WHERE event_id = 6`)
	outbox := ops.New(db.Pool)
	ids := []int64{1, 2, 3, 4, 5, 6, 7, 77}
	before := relaytest.Row[string](db, `SELECT string_agg(d::text, ' ' ORDER BY event_id) FROM outbox_delivery d`)
	_, b, err := outbox.Preview(t.Context(), ops.Order{Action: "retry", Selection: ops.Selection{EventIDs: ids}})
	relaytest.Must(t, err)
	if b.Matched != 2 || b.NotWaiting != 2 || b.InFlight != 1 || b.Unknown != 1 || !maps.Equal(b.OtherStatus, map[string]int64{"failed": 1, "delivered": 1}) {
		t.Errorf("%+v", b)
	}
	testkit.Equal(t, "a preview changes something", relaytest.Row[string](db, `SELECT string_agg(d::text, ' ' ORDER BY event_id) FROM outbox_delivery d`), before)
	db.Exec(`INSERT INTO outbox_destination (destination, paused, paused_at) VALUES ('default', true, now())`)
	for _, s := range []ops.Selection{{EventIDs: []int64{1}}, {Destination: "default", Reason: "unauthorized"}} {
		b, err = outbox.Retry(t.Context(), s, nil)
		relaytest.Must(t, err)
		if b.Done != 1 || len(b.Obstacles) != 1 || !strings.Contains(b.Obstacles[0], `"default" is paused: nothing is sent there before outbox-relay resume default`) {
			t.Errorf("%+v", b)
		}
	}
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE event_id IN (1, 7) AND next_attempt_at <= clock_timestamp() AND status = 'pending'
		AND attempts = 2 AND claim = 3 AND NOT replay AND not_after > now()`); n != 2 {
		t.Errorf("%d of 2 are due as they were: %v", n, relaytest.Rows[string](db, `SELECT d::text FROM outbox_delivery d`))
	}
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_audit WHERE action = 'retry' AND state = 'done' AND done = 1`); n != 2 {
		t.Errorf("the audit has %d of 2", n)
	}
	if b, err = outbox.Retry(t.Context(), ops.Selection{Destination: "default"}, nil); err != nil || b.Matched != 0 {
		t.Errorf("a second time: %+v, %v", b, err)
	}
	// A named event says which one of its ordering key comes before it.
	db.Exec(`UPDATE outbox_delivery SET ordering_key = 'o' WHERE event_id IN (1, 4)`)
	if _, b, err = outbox.Preview(t.Context(), ops.Order{Action: "retry", Selection: ops.Selection{EventIDs: []int64{4}}}); err != nil || b.NotWaiting != 1 ||
		len(b.Obstacles) != 2 || !strings.HasPrefix(b.Obstacles[1], `event 4 waits at "default" behind event 1 of its ordering key, which is pending`) {
		t.Errorf("%+v, %v", b, err)
	}
	// One that was attempted after an operation began, and failed again, waits for its next attempt
	// also when the operation continues.
	db.Exec(waits)
	db.RewriteAudit(`state = 'interrupted' WHERE id = 2`)
	order, err := outbox.TakeUp(t.Context(), 2)
	relaytest.Must(t, err)
	if b, err = outbox.Work(t.Context(), 2, order, nil); err != nil || b.Done != 0 {
		t.Errorf("%+v, %v", b, err)
	}
}

// What was written before the clock was put back waits until that time comes: retries, and events
// that became due at once by that clock.
func TestRetryAfterTheClockWasPutBack(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(2, "k")
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() + interval '1 year'`)
	db.Exec(`UPDATE outbox_delivery SET attempts = 1, last_attempt_at = now() + interval '1 year' WHERE event_id = 1`)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, created_at, available_at)
		VALUES ('t', '{}', 'future', now() + interval '1 year', now() + interval '1 year'), ('t', '{}', 'scheduled', now(), now() + interval '1 year'),
			('t', '{}', 'scheduled by that clock', now() + interval '1 year', now() + interval '2 years')`)
	db.Exec(`UPDATE outbox_delivery d SET next_attempt_at = o.available_at FROM outbox o WHERE o.id = d.event_id AND d.event_id > 2`)
	b, err := ops.New(db.Pool).Retry(t.Context(), ops.Selection{Destination: "default"}, nil)
	if due := relaytest.Rows[int64](db, `SELECT event_id FROM outbox_delivery WHERE next_attempt_at <= clock_timestamp() ORDER BY 1`); err != nil || !slices.Equal(due, []int64{1, 2, 3}) {
		t.Errorf("due are %v: %+v, %v", due, b, err)
	}
}

// On a copy, events are given up too that no relay has taken, or that the original's relay had in
// hand. What comes after is taken.
func TestDiscardQuarantinedUnrouted(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	outbox := ops.New(db.Pool)
	_, err := outbox.AcceptIdentity(t.Context(), "")
	relaytest.Must(t, err)
	take := func() intake.Range {
		t.Helper()
		r, err := intake.TakeRange(t.Context(), db.Pool, 1, intake.Terms{Events: 100}, false)
		relaytest.Must(t, err)
		return r
	}
	db.Insert(3, "in hand")
	take()
	db.Insert(4, "not taken")
	db.Exec(`UPDATE outbox_identity SET database_oid = 1`)
	b, err := outbox.DiscardQuarantined(t.Context(), "", nil)
	if err != nil || b.Done != 7 {
		t.Errorf("%+v, %v", b, err)
	}
	if r := take(); r.Found != intake.Nothing {
		t.Errorf("took %+v", r)
	}
	testkit.Equal(t, "ranges are open", relaytest.Row[int](db, `SELECT count(*)::int FROM outbox_range WHERE ended_at IS NULL`), 0)
	db.Insert(2, "new")
	if r := take(); len(r.Events) != 2 {
		t.Errorf("took %+v", r)
	}
}
