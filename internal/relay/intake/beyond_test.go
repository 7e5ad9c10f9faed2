package intake

import (
	"slices"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// While a large difference is taken in pieces, what came after it and has no key gets rows, which
// the takes that follow leave out.
func TestEventsBeyondACut(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	beyond := func(want string) Beyond {
		t.Helper()
		found, err := FindBeyond(t.Context(), r.pool)
		relaytest.Must(t, err)
		if keys(found.Events) != want {
			t.Fatalf("found %q beyond the cut, want %q", keys(found.Events), want)
		}
		return found
	}
	write := func(seq int64, want bool, list ...BeyondRow) {
		t.Helper()
		if _, written, err := WriteBeyond(t.Context(), r.pool, 2, seq, list); err != nil || written != want {
			t.Fatalf("written: %v, %v; want %v", written, err, want)
		}
	}
	late, err := r.Pool.Begin(t.Context())
	relaytest.Must(t, err)
	_, err = late.Exec(t.Context(), insertOne, "late")
	relaytest.Must(t, err)
	r.Exec(insertMany, "bulk-", 4)
	r.wantTaken(1, "bulk-1 bulk-2 bulk-3 bulk-4")
	r.Exec(insertMany, "piece-", 4)
	beyond("") // nothing was cut
	first := r.take(1, Terms{Events: 2, Inline: 1 << 20})
	r.Exec(insertOne, "new")
	r.Exec(insertKeyed, "keyed", "k")
	r.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, available_at) VALUES ('t', '{}', 'next year', now() + interval '1 year')`)
	relaytest.Must(t, late.Commit(t.Context()))
	found := beyond("late new")
	if found.Seq != first.Seq || found.Events[1].PayloadBytes != len(`{"n": 1}`) {
		t.Errorf("found %+v", found)
	}
	row := func(i int) BeyondRow {
		return BeyondRow{EventID: found.Events[i].ID, Destination: "default", Bytes: found.Events[i].PayloadBytes}
	}
	write(first.Seq-1, false, row(0)) // a range was taken since
	if n := relaytest.Row[int](r.Database, `SELECT count(*) FROM outbox_delivery`); n > 0 {
		t.Fatalf("%d rows", n)
	}
	write(first.Seq, true, row(0), row(1))
	beyond("")
	testkit.Equal(t, "deliveries due", relaytest.Row[int](r.Database, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending' AND claimed_by IS NULL AND next_attempt_at <= now()`), 2)
	more, err := TakeRange(t.Context(), r.pool, 1, usual, true)
	relaytest.Must(t, err)
	if keys(more.Events) != "piece-3 piece-4" || more.More {
		t.Errorf("the rest is %q", keys(more.Events))
	}
	settled := map[string][]string{}
	rest := r.take(1, usual)
	for _, e := range rest.Events {
		settled[*e.Key] = e.Settled
	}
	if len(settled) != 4 || !slices.Equal(settled["late"], []string{"default"}) || !slices.Equal(settled["new"], []string{"default"}) ||
		settled["keyed"] != nil || settled["next year"] != nil {
		t.Errorf("taken after it: %v", settled)
	}
	r.Exec(insertOne, "last")
	for _, e := range r.wantTaken(1, "last").Events {
		if e.Settled != nil {
			t.Errorf("%s has rows: %v", *e.Key, e.Settled)
		}
	}
}
