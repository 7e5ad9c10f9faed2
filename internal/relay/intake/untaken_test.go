package intake

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

func (r *room) wantUntaken(what string, want int) {
	r.Helper()
	got, err := CountUntaken(r.Context(), r.pool, 1000)
	relaytest.Must(r, err)
	if got.Events != want || (got.Oldest > 0) != (want > 0) {
		r.Errorf("%s: %+v, want %d", what, got, want)
	}
}

// Each event counts from its commit until it is taken, wherever its id stands, and also while a
// large difference is taken in parts.
func TestCountUntaken(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	r.wantUntaken("nothing", 0)
	first, second := r.Begin(), r.Begin()
	_, err := first.Exec(t.Context(), insertMany, "first", 7)
	relaytest.Must(t, err)
	_, err = second.Exec(t.Context(), insertMany, "second", 30)
	relaytest.Must(t, err)
	r.Exec(insertMany, "a", 3)
	r.wantUntaken("committed", 3)
	r.settle(1, r.take(1, usual))
	r.wantUntaken("taken", 0)
	_, err = first.Exec(t.Context(), insertOne, "first again")
	relaytest.Must(t, err)
	relaytest.Must(t, first.Commit(t.Context()))
	r.wantUntaken("a late commit", 8)
	r.Exec(insertMany, "b", 50)
	r.wantUntaken("and others", 58)

	more, left := false, 58
	for part := range 6 {
		got, err := TakeRange(t.Context(), r.pool, 1, Terms{Events: 10, Inline: 1 << 20}, more)
		relaytest.Must(t, err)
		more, left = got.More, left-len(got.Events)
		if part == 2 { // while the difference continues, neither belongs to it
			relaytest.Must(t, second.Commit(t.Context()))
			r.Exec(insertMany, "c", 5)
			left += 35
		}
		r.wantUntaken("a part is taken", left)
		r.settle(1, got)
		r.wantUntaken("a part is settled", left)
	}
	if more || left != 35 {
		t.Fatalf("%d are left, more %v", left, more)
	}
	r.take(1, usual)
	r.wantUntaken("all are taken", 0)

	r.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, available_at, created_at)
		VALUES ('t', '1', 'never', 'infinity', now() - interval '1 hour'), ('t', '1', 'ever', '-infinity', now())`)
	got, err := CountUntaken(t.Context(), r.pool, 1)
	relaytest.Must(t, err)
	if got.Events != 1 || got.Oldest < time.Hour {
		t.Errorf("%+v", got)
	}
}

// However long the history is, and while a backlog is taken in parts, counting reads some rows for
// each that it counts.
func TestReadsOfCountUntaken(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	late := r.Begin()
	_, err := late.Exec(t.Context(), insertMany, "late", 50)
	relaytest.Must(t, err)
	r.history(testsize.Of(50_000, 5000))
	count := func(what string, want int) {
		t.Helper()
		tx, err := r.pool.Begin(t.Context())
		relaytest.Must(t, err)
		defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
		_, err = tx.Exec(t.Context(), relaytest.NoteReads)
		relaytest.Must(t, err)
		got, err := CountUntaken(t.Context(), tx, 20)
		relaytest.Must(t, err)
		var read int
		relaytest.Must(t, tx.QueryRow(t.Context(), `SELECT (idx_tup_fetch + seq_scan * 1000000)::int FROM `+relaytest.SinceNoted+` WHERE relname = 'outbox'`).Scan(&read))
		if got.Events != want || read > 16*20 {
			t.Errorf("%s: %d events, want %d; %d rows were read", what, got.Events, want, read)
		}
	}
	count("idle", 0)
	relaytest.Must(t, late.Commit(t.Context()))
	count("a late one before all history", 20)
	r.Exec(insertMany, "many", 5000)
	count("a backlog", 20)
	got, err := TakeRange(t.Context(), r.pool, 1, usual, false)
	relaytest.Must(t, err)
	if !got.More {
		t.Fatalf("%d events were taken at once", len(got.Events))
	}
	count("a backlog that is taken in parts", 20)
}

// Events are stuck that a relay has had in hand for too long and that have no delivery, both of
// whole differences and of parts.
func TestStuck(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	const stuck = `WITH most AS MATERIALIZED (SELECT 100 AS events), ` + Untaken + `, ` + Stuck + ` SELECT idempotency_key::text FROM stuck JOIN outbox USING (id) ORDER BY id`
	want := func(what, want string) {
		t.Helper()
		if got := strings.Join(relaytest.Rows[string](r.Database, stuck), " "); got != want {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	late := r.Begin()
	_, err := late.Exec(t.Context(), insertOne, "late")
	relaytest.Must(t, err)
	r.Exec(insertMany, "a", 2)
	whole := r.take(1, usual)
	relaytest.Must(t, late.Commit(t.Context()))
	r.Exec(insertMany, "b", 3)
	part, err := TakeRange(t.Context(), r.pool, 2, Terms{Events: 3, Inline: 1 << 20}, false)
	relaytest.Must(t, err)
	if !part.More {
		t.Fatalf("%+v", part)
	}
	r.Exec(insertOne, "not taken")
	want("at once", "")
	r.Exec(`UPDATE outbox_range SET taken_at = now() - interval '11 seconds' WHERE ended_at IS NULL`)
	want("in hand for long", "late a1 a2 b1 b2")
	part.Events, whole.Events = part.Events[:2], nil
	s := settlement(2, part, part.Events)
	s.Ended = nil
	_, err = SettleRanges(t.Context(), r.pool, s)
	relaytest.Must(t, err)
	want("some have a delivery", "a1 a2 b2")
	r.settle(1, whole)
	want("a range has ended", "b2")
}

// What relays have in hand counts at once, for each destination that has no row of it yet, and
// until its range has ended.
func TestInHand(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	r.Exec(`INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'other'), ('t*', 'other')`)
	const inHand = `WITH most AS MATERIALIZED (SELECT 100 AS events), ` + InHand + ` SELECT concat_ws(' ', relay_id, destination, deliveries) FROM in_hand ORDER BY 1`
	want := func(what string, want ...string) {
		t.Helper()
		if got := relaytest.Rows[string](r.Database, inHand); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	want("nothing is taken")
	r.Exec(insertMany, "a", 2)
	first := r.take(1, usual)
	r.Exec(insertMany, "b", 3)
	r.take(2, usual)
	want("two relays", "1 default 2", "1 other 2", "2 default 3", "2 other 3")
	r.Exec(`INSERT INTO outbox_delivery (event_id, destination) SELECT id, 'other' FROM outbox WHERE idempotency_key = 'b1'`)
	want("a delivery has a row", "1 default 2", "1 other 2", "2 default 3", "2 other 2")
	r.settle(1, first)
	want("a range has ended", "2 default 3", "2 other 2")
}
