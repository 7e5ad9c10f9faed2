package inboxops_test

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

const (
	fill = `
INSERT INTO inbox_events (receiver, source, idempotency_key, event_type, processing_state, inbox_id, attempts, last_error, payload)
SELECT 'shipping', 'finance', 'k' || i, 'paid', 'failed', i, 8, 'no such customer', 'the payload' FROM generate_series(1, $1::int) i`
	rememberAll = `
INSERT INTO processed_events (receiver, source, idempotency_key, event_type, processing_state, payload_hash)
SELECT receiver, source, idempotency_key, event_type, 'recorded', sha256(payload) FROM inbox_events
UNION ALL SELECT 'billing', 'finance', 'direct', 'paid', 'ignored', NULL`
)

// The pages of a list have every event once, in order.
func TestPages(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	d.exec(fill, 120)
	d.exec(rememberAll)
	var ids []int64
	for s := (inboxops.Selection{Limit: 50}); ; {
		page, err := d.ops.List(t.Context(), s)
		if err != nil || len(page.Events) > 50 {
			t.Fatalf("%d events, %v", len(page.Events), err)
		}
		for _, e := range page.Events {
			ids = append(ids, e.InboxID)
		}
		if page.Next == 0 {
			break
		}
		s.ToID = page.Next - 1
	}
	if len(ids) != 120 || ids[0] != 120 || ids[119] != 1 || !slices.IsSortedFunc(ids, func(a, b int64) int { return int(b - a) }) {
		t.Errorf("listed %v", ids)
	}
	places := map[string]int{}
	for after, more := (inboxops.MemoryKey{}), true; more; {
		page, err := d.ops.Remembered(t.Context(), inboxops.Selection{Limit: 50}, after)
		if err != nil || len(page.Remembered) > 50 {
			t.Fatalf("%d remembered, %v", len(page.Remembered), err)
		}
		for _, m := range page.Remembered {
			places[m.Receiver+"/"+m.IdempotencyKey]++
		}
		if more = page.Next != nil; more {
			after = *page.Next
		}
	}
	if len(places) != 121 || places["billing/direct"] != 1 {
		t.Errorf("%d places are remembered: %v", len(places), places)
	}
	for want, s := range map[string]inboxops.Selection{
		"billing/direct ignored": {States: []string{ignored}, Limit: 5},
		"shipping/k7 recorded":   {Key: "k7", Limit: 5},
		"":                       {Receiver: "shipping", Source: "elsewhere", Limit: 5},
	} {
		page, err := d.ops.Remembered(t.Context(), s, inboxops.MemoryKey{})
		got := ""
		for _, m := range page.Remembered {
			got += m.Receiver + "/" + m.IdempotencyKey + " " + m.State
		}
		if err != nil || got != want {
			t.Errorf("%+v: %q, %v, want %q", s, got, err, want)
		}
	}
	if _, err := d.ops.Remembered(t.Context(), inboxops.Selection{States: []string{failed}, Limit: 5}, inboxops.MemoryKey{}); err == nil || !strings.Contains(err.Error(), "cannot be chosen") {
		t.Error(err)
	}
}

// Show says of each event why it waits, or what waits for it.
func TestShow(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	d.event(1, failed, "ordering_key", "'o'", "sequence", "1")
	d.event(2, pending, "ordering_key", "'o'", "sequence", "2", "next_attempt_at", "NULL")
	d.event(3, pending, "next_attempt_at", "now() + interval '1 hour'")
	d.event(4, pending)
	d.event(5, pending, "ordering_key", "'free'", "sequence", "5", "next_attempt_at", "NULL")
	d.event(6, processing, "claimed_by", "'w1'", "claimed_at", "now()")
	d.event(7, succeeded)
	d.exec(`INSERT INTO processed_events (receiver, source, idempotency_key, event_type, processing_state) VALUES ('billing', 'finance', 'direct', 'paid', 'ignored')`)
	for id, want := range map[int64][]string{
		1: {"failed: failed: no worker tries it again; to try it: outbox-relay inbox replay 1", "blocks: it may block its ordering key: events wait behind it (1); to continue without it: outbox-relay inbox ignore 1"},
		2: {"behind: behind inbox id 1 of its ordering key, which is failed; to continue: outbox-relay inbox replay 1, or outbox-relay inbox ignore 1"},
		3: {"not_due: attempt 8 is due in "},
		4: {"due: due: the next free worker of its receiver takes it"},
		5: {"unreleased: nothing keeps it waiting: a running worker releases it within half a minute"},
		6: {"processing: worker w1 has it since "},
		7: nil,
	} {
		shown, err := d.ops.Show(t.Context(), id, inboxops.Selection{})
		if err != nil || len(shown.Events) != 1 || shown.Events[0].InboxID != id || len(shown.Remembered) != 1 || shown.Remembered[0].State != inboxops.Recorded || len(shown.Waits) != len(want) {
			t.Errorf("%d: %+v, %v", id, shown, err)
			continue
		}
		for i, w := range shown.Waits {
			if got := w.Cause + ": " + w.Text; w.InboxID != id || !strings.HasPrefix(got, want[i]) {
				t.Errorf("%d: %q, want %q", id, got, want[i])
			}
		}
	}
	for key, want := range map[string]string{"k1": "1 1", "direct": "0 1", "none": "0 0"} {
		shown, err := d.ops.Show(t.Context(), 0, inboxops.Selection{Key: key})
		if got := fmt.Sprint(len(shown.Events), len(shown.Remembered)); err != nil || got != want {
			t.Errorf("%s: %+v, %v", key, shown, err)
		}
	}
	if shown, err := d.ops.Show(t.Context(), 77, inboxops.Selection{}); err != nil || len(shown.Events) != 0 {
		t.Errorf("%+v, %v", shown, err)
	}
}

// The status counts what a sender's events wait for, by receiver, and estimates the rest.
func TestStatus(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	if s, err := d.ops.Status(t.Context(), "", ""); err != nil || len(s.Senders) != 0 || s.InboxRows != -1 || s.MemoryRows != -1 {
		t.Errorf("an empty database: %+v, %v", s, err)
	}
	d.event(1, pending, "next_attempt_at", "now() - interval '1 hour'")
	d.event(2, failed, "ordering_key", "'o'", "sequence", "2")
	d.event(3, pending, "next_attempt_at", "now() + interval '1 hour'")
	d.event(4, failed)
	d.event(5, ignored)
	d.event(6, succeeded)
	d.event(7, processing, "claimed_at", "now() - interval '1 hour'")
	d.event(8, pending, "ordering_key", "'o'", "sequence", "8", "next_attempt_at", "NULL")
	d.exec(`INSERT INTO processed_events (receiver, source, idempotency_key, event_type, processing_state) VALUES ('billing', 'finance', 'direct', 'paid', 'ignored')`)
	d.exec("ANALYZE")
	s, err := d.ops.Status(t.Context(), "", "")
	if err != nil || len(s.Senders) != 2 || s.InboxRows != 8 || s.MemoryRows != 9 {
		t.Fatalf("%+v, %v", s, err)
	}
	if got, want := s.Senders[0], (inboxops.SenderStatus{Sender: inboxops.Sender{Receiver: "billing", Source: "finance"}}); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v", got)
	}
	got := s.Senders[1]
	if got.LagSeconds < 3600 || got.ProcessingSeconds < 3600 {
		t.Errorf("the oldest are %v and %v seconds old", got.LagSeconds, got.ProcessingSeconds)
	}
	got.LagSeconds, got.ProcessingSeconds = 0, 0
	want := inboxops.SenderStatus{
		Sender:  inboxops.Sender{Receiver: "shipping", Source: "finance"},
		Pending: 3, Due: 1, Scheduled: 1, Waiting: 1, Processing: 1, Failed: 2, Ignored: 1, BlockedKeys: 1,
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	if s, err := d.ops.Status(t.Context(), "shipping", "elsewhere"); err != nil || len(s.Senders) != 0 {
		t.Errorf("another sender: %+v, %v", s, err)
	}
}

// An operator learns what is missing, and what to run.
func TestSchema(t *testing.T) {
	t.Parallel()
	latest := migrations.Inbox.Latest()
	check := func(d *desk, want string) {
		t.Helper()
		if err := d.ops.CheckSchema(t.Context()); fmt.Sprint(err) != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
	outbox := pgtest.Pool(t, pgtest.New(t, migrations.Outbox))
	check(&desk{T: t, pool: outbox, ops: inboxops.New(outbox)}, "schema mismatch: this is a producer's database, with an outbox and no inbox; name the receiver's instead (inbox: OUTBOX_DATABASE_URL; reconcile: RECEIVER_DATABASE_URL), or if both share it, run: outbox-relay migrate up --set inbox")
	if _, err := outbox.Exec(t.Context(), "DROP TABLE outbox_schema_version"); err != nil {
		t.Fatal(err)
	}
	check(&desk{T: t, pool: outbox, ops: inboxops.New(outbox)}, fmt.Sprintf("schema mismatch: there is no inbox schema here (version %d is needed); run: outbox-relay migrate up --set inbox", latest))
	d := newDesk(t)
	check(d, "<nil>")
	d.exec("DELETE FROM inbox_schema_version WHERE version_id = $1", latest)
	check(d, fmt.Sprintf("schema mismatch: the database has inbox version %d, this build needs %d; run: outbox-relay migrate up --set inbox", latest-1, latest))
	d.exec("INSERT INTO inbox_schema_version (version_id, is_applied) VALUES ($1, true)", latest+1)
	check(d, "<nil>") // it works with this build, too
	d.exec(fmt.Sprintf(`CREATE OR REPLACE FUNCTION inbox_compatible_since() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT %d'`, latest+1))
	check(d, fmt.Sprintf("schema mismatch: the database has inbox version %d, this build knows %d; run a newer outbox-relay", latest+1, latest))
	if now, err := d.ops.Now(t.Context()); err != nil || now.IsZero() {
		t.Errorf("%v, %v", now, err)
	}
}
