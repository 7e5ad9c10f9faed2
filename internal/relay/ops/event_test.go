package ops_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/archive"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// An event is found by what people know of it: id, key, reference; also when it is archived.
func TestFindEvents(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.InsertOld(1, "old")
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, related_reference) SELECT 't', '{"a":1}', 'k' || i, 'ref' || i % 2 FROM generate_series(1, 5) i`)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', '3'), ('t', '{}', '4711')`)
	outbox := ops.New(db.Pool)
	_, err := archive.Job{DB: db.Pool, Keep: archive.Retention{ArchiveAfter: 30 * 24 * time.Hour, DeleteAfter: 400 * 24 * time.Hour, Attempts: 90 * 24 * time.Hour}}.Run(t.Context())
	relaytest.Must(t, err)
	if n := relaytest.Row[int](db, `SELECT count(*)::int FROM outbox_archive`); n != 1 {
		t.Fatalf("%d events are archived", n)
	}
	for text, want := range map[string][]int64{
		"2": {2}, "k4": {5}, "ref1": {6, 4, 2}, "3": {3}, "4711": {8}, "old-1": {1}, "1": {1},
	} {
		ids, err := outbox.FindEvents(t.Context(), text)
		relaytest.Must(t, err)
		if !slices.Equal(ids, want) {
			t.Errorf("%s: %d, want %d", text, ids, want)
		}
	}
	for _, text := range []string{"", "0", "-1", "99", "k", "ref"} {
		if _, err := outbox.FindEvents(t.Context(), text); !errors.As(err, new(ops.UnknownEvent)) {
			t.Errorf("%q: %v", text, err)
		}
	}
	old, err := outbox.Reveal(t.Context(), 1)
	relaytest.Must(t, err)
	if old.Event.ArchivedAt == nil || old.Event.Payload == nil || len(old.Deliveries) != 1 || old.Deliveries[0].Status != "delivered" || old.Deliveries[0].DeliveredAt == nil || *old.Deliveries[0].LatencySeconds < 4*86400 {
		t.Errorf("%+v", old)
	}
	recent, err := outbox.Event(t.Context(), 2)
	relaytest.Must(t, err)
	if recent.Event.Payload != nil || recent.Event.PayloadBytes != 7 || *recent.Event.RelatedReference != "ref1" {
		t.Errorf("%+v", recent.Event)
	}
	if history := old.Explain().History; len(history) != 3 || history[1].What != "delivered" || history[2].What != "archived" {
		t.Errorf("%+v", history)
	}
}

// A delivery took as long as its event was due. The time until an operator replayed it says
// nothing.
func TestLatencyBeginsWhenTheEventIsDue(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, created_at, available_at)
		SELECT 't', '{}', n, now() - interval '1 hour', now() - interval '1 hour' + make_interval(mins => (n = 2)::int * 20) FROM generate_series(1, 3) n`)
	db.Settled("delivered", "true")
	db.Exec(`UPDATE outbox_delivery d SET attempts = 1, delivered_at = greatest(e.created_at::timestamptz, e.available_at) + interval '41 ms', replay = d.event_id = 3
		FROM outbox e WHERE e.id = d.event_id`)
	for id, want := range map[int64]string{1: "with the 1st attempt, 41ms after it was due", 2: "with the 1st attempt, 41ms after it was due", 3: "by the replay, with its 1st attempt"} {
		report, err := ops.New(db.Pool).Event(t.Context(), id)
		relaytest.Must(t, err)
		if got := report.Deliveries[0].Arrival(); got != want {
			t.Errorf("event %d: %q, want %q", id, got, want)
		}
	}
}

// Attempts count again after a replay: the history names who replayed the event, and does not say
// that its first attempt delivered.
func TestExplainReplays(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(3, "k")
	db.Exec(`INSERT INTO outbox_attempt (event_id, destination, claim, attempt, relay_id, outcome, reason, duration_ms, started_at)
		SELECT 1, 'default', n, n, 1, 'retry', 'server_error', 5, now() + make_interval(secs => n * 0.001) FROM generate_series(1, 3) n`)
	db.Settled("delivered", "true")
	outbox := ops.New(db.Pool)
	replay := func(actor string, s ops.Selection) {
		s.Statuses = []string{"delivered"}
		b, err := outbox.As(ops.Actor{Name: actor}).Replay(t.Context(), s, 0, nil)
		relaytest.Must(t, err)
		if b.Done == 0 {
			t.Fatalf("%s replayed nothing", actor)
		}
		db.Settled("delivered", "status = 'pending'")
		db.Exec(`UPDATE outbox_delivery SET delivered_at = clock_timestamp(), attempts = 1 WHERE replay`)
	}
	replay("root@vm", ops.Selection{EventIDs: []int64{1}})
	want := func(id int64, want ...string) {
		t.Helper()
		report, err := outbox.Event(t.Context(), id)
		relaytest.Must(t, err)
		var got []string
		for _, m := range report.Explain().History[1:] {
			if m.What != "attempt" {
				text, _, _ := strings.Cut(m.Text, ", 0") // without how long it took
				got = append(got, strings.Split(text, " attempt")[0])
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("event %d: %q, want %q", id, got, want)
		}
	}
	const arrived = "delivered by the replay, with its 1st"
	named := "replayed by root@vm (cli), after it had been delivered"
	want(1, named, arrived)
	replay("ann", ops.Selection{EventIDs: []int64{2}})
	replay("bob", ops.Selection{Destination: "default"})
	want(1, named, "perhaps replayed by bob (cli): the order includes it", arrived)
	want(3, "replayed by bob (cli), after it had been delivered", arrived)
	replay("cem", ops.Selection{Type: "*"})
	want(3, "perhaps replayed by bob (cli): the order includes it", "perhaps replayed by cem (cli): the order includes it", arrived)

	// An order for a reason that no logged attempt of the event had cannot have touched it. One
	// with a limit may have ended before it.
	db.Exec(`UPDATE outbox_delivery SET last_reason = 'timeout' WHERE event_id = 2`)
	replay("dora", ops.Selection{Reason: "timeout"})
	replay("eva", ops.Selection{Type: "*", Limit: 1})
	bob, cem, eva := "perhaps replayed by bob (cli): the order includes it", "perhaps replayed by cem (cli): the order includes it", "perhaps replayed by eva (cli): the order includes it, if the limit left room"
	want(1, named, bob, cem, eva, arrived)
	want(3, bob, cem, "perhaps replayed by dora (cli): the order includes it, if its last reason was timeout", eva, arrived)
}

// An order for what failed has not replayed what was pending then.
func TestExplainNamesNoReplayOfWhatWasPending(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(3, "k")
	db.Settled("delivered", "event_id = 1")
	db.Settled("failed", "event_id > 1")
	outbox := ops.New(db.Pool)
	attempt := func(outcome string, ids ...int64) {
		db.Exec(`INSERT INTO outbox_attempt (event_id, destination, claim, attempt, relay_id, outcome, reason, duration_ms, started_at)
			SELECT id, 'default', (SELECT count(*) FROM outbox_attempt), 1, 1, $1, 'server_error', 5, clock_timestamp() FROM unnest($2::bigint[]) id`, outcome, ids)
	}
	replay := func(actor string, s ops.Selection) {
		_, err := outbox.As(ops.Actor{Name: actor}).Replay(t.Context(), s, 0, nil)
		relaytest.Must(t, err)
	}
	attempt("fail", 2, 3)
	replay("ann", ops.Selection{EventIDs: []int64{1}, Statuses: []string{"delivered"}})
	replay("bob", ops.Selection{Destination: "default"}) // events 2 and 3
	attempt("retry", 2)
	attempt("fail", 3)
	db.Settled("failed", "event_id = 3")
	replay("cem", ops.Selection{Destination: "default"}) // event 3
	for id, want := range map[int64][]string{1: {"ann"}, 2: {"bob"}, 3: {"bob", "cem"}} {
		report, err := outbox.Event(t.Context(), id)
		relaytest.Must(t, err)
		var got []string
		for _, r := range report.Replays {
			got = append(got, r.Actor)
		}
		if !slices.Equal(got, want) {
			t.Errorf("event %d was replayed by %q, want %q", id, got, want)
		}
	}
}

// The history says when an operator gave a delivery up, and not when it was attempted last.
func TestExplainDiscards(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(2, "k")
	db.Exec(`UPDATE outbox_delivery SET attempts = 1, last_attempt_at = now() - interval '1 hour', status = 'failed', last_reason = 'rejected'`)
	outbox := ops.New(db.Pool)
	discard := func(selection ops.Selection) {
		_, err := outbox.Discard(t.Context(), selection, nil)
		relaytest.Must(t, err)
	}
	discard(ops.Selection{EventIDs: []int64{1}})
	// Later orders that gave up others: for another reason, and for fewer than there were.
	db.Insert(2, "other")
	db.Exec(`UPDATE outbox_delivery SET status = 'failed', last_reason = 'timeout' WHERE event_id IN (3, 4)`)
	discard(ops.Selection{Reason: "timeout", EventIDs: []int64{3}})
	discard(ops.Selection{Reason: "timeout"})
	order, err := outbox.AuditEntry(t.Context(), 1)
	relaytest.Must(t, err)
	db.Exec(`UPDATE outbox_delivery SET status = 'discarded' WHERE event_id = 2`)
	for id, known := range map[int64]bool{1: true, 2: false} {
		report, err := outbox.Event(t.Context(), id)
		relaytest.Must(t, err)
		history := report.Explain().History
		for _, m := range history {
			if m.What == "discarded" && (m.At.Equal(order.At) != known || strings.Contains(m.Text, "audit") == known) {
				t.Errorf("event %d: %+v", id, m)
			}
		}
		if !slices.ContainsFunc(history, func(m ops.Moment) bool { return m.What == "discarded" }) {
			t.Errorf("event %d: %+v", id, history)
		}
	}
}

// What happened before a replay stays in the history, and each replay that must have happened is
// said to have: after two failures, a discard, and a replay of each.
func TestExplainKeepsWhatWasBeforeReplays(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "k")
	outbox := ops.New(db.Pool).As(ops.Actor{Name: "ann"})
	fail := func(claim int) {
		db.Settled("failed", "true")
		db.Exec(`INSERT INTO outbox_attempt (event_id, destination, claim, attempt, relay_id, outcome, reason, error, duration_ms, started_at)
			VALUES (1, 'default', $1, 1, 1, 'fail', 'rejected', '422 no', 0, clock_timestamp())`, claim)
		db.Exec(`UPDATE outbox_delivery SET attempts = 1, last_reason = 'rejected', last_error = '422 no', last_attempt_at = (SELECT max(started_at) FROM outbox_attempt)`)
	}
	replay := func(s ops.Selection) {
		b, err := outbox.Replay(t.Context(), s, 0, nil)
		relaytest.Must(t, err)
		if b.Done != 1 {
			t.Fatalf("%+v", b)
		}
	}
	fail(1)
	replay(ops.Selection{Destination: "default"})
	fail(2)
	replay(ops.Selection{Destination: "default"})
	fail(3)
	_, err := outbox.Discard(t.Context(), ops.Selection{Destination: "default"}, nil)
	relaytest.Must(t, err)
	replay(ops.Selection{Destination: "default", Statuses: []string{"discarded"}, EventIDs: []int64{1}})
	report, err := outbox.Event(t.Context(), 1)
	relaytest.Must(t, err)
	var got []string
	for _, m := range report.Explain().History[1:] {
		if m.What != "attempt" {
			got = append(got, m.Text)
		}
	}
	again, failed := "replayed by ann (cli), after it had failed", "failed for good: 422 no"
	want := []string{failed, again, failed, again, failed, "an operator has given it up", "replayed by ann (cli), after it had been given up"}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// The history of a failed event ends with what comes next, and says how many wait behind it.
func TestExplainSaysWhatIsNextForAFailedEvent(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', i, CASE WHEN i < 4 THEN 'o' END FROM generate_series(1, 4) i`)
	db.Settled("failed", "event_id IN (1, 4)")
	db.Exec(`UPDATE outbox_delivery SET last_error = '422 no.'`)
	outbox := ops.New(db.Pool)
	says := func(id int64, want string) {
		t.Helper()
		report, err := outbox.Event(t.Context(), id)
		relaytest.Must(t, err)
		history := report.Explain().History
		testkit.Equal(t, "the last moment", history[len(history)-1].Text, want)
	}
	says(1, "failed for good: 422 no. 2 deliveries wait behind it; to skip it: outbox-relay discard 1 --destination default. Once the cause is fixed: outbox-relay replay 1 --destination default")
	says(4, "failed for good: 422 no. Once the cause is fixed: outbox-relay replay 4 --destination default")
	db.Exec(`UPDATE outbox_watch SET sample = sample || '{"lenient": ["default"]}'`) // on_failure: skip
	db.Exec(`UPDATE outbox_delivery SET last_reason = 'invalid_event'`)
	says(1, "failed for good: 422 no. No replay sends it: its producer must insert a corrected event under a new key")
}
