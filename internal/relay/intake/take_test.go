package intake

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

func (r *room) wantTaken(relay int32, want string) Range {
	r.Helper()
	got := r.take(relay, usual)
	if keys(got.Events) != want {
		r.Fatalf("took %q, want %q", keys(got.Events), want)
	}
	return got
}

// Nothing new writes nothing, and each event comes once, with what the producer wrote.
func TestTake(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	r.find(1, Nothing)
	testkit.Equal(t, "ranges while there was nothing", relaytest.Row[int](r.Database, `SELECT count(*)::int FROM outbox_range`), 1)
	r.Exec(`INSERT INTO outbox (event_type, event_version, payload, idempotency_key, ordering_key, related_reference, headers, available_at)
		VALUES ('invoice.paid', 3, '{"b": 1,"a":1}', 'one', 'k', 'ref', '{"x": "y"}', now() + interval '1 hour')`)
	got := r.wantTaken(1, "one")
	e := got.Events[0]
	if *e.EventType != "invoice.paid" || *e.Version != 3 || string(e.Payload) != `{"b": 1,"a":1}` || *e.OrderingKey != "k" ||
		*e.RelatedReference != "ref" || string(e.Headers) != `{"x": "y"}` || e.ID != 1 || e.Wait.Hours() < 0.9 || e.Wait.Hours() > 1 ||
		e.CreatedAt.Time.IsZero() || e.AvailableAt.Time.IsZero() || got.Fence == 0 || got.More {
		t.Errorf("%+v of %+v", e, got)
	}
	r.find(1, Nothing)
	r.Exec(insertOne, "two")
	r.Exec(insertOne, "three")
	r.wantTaken(2, "two three")
	r.find(2, Nothing)
}

// Infinite times, which no constraint refuses any more, keep nothing from being taken.
func TestTakeInfiniteTimes(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	r.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, available_at)
		VALUES ('t', '1', 'never', 'infinity'), ('t', '1', 'ever', '-infinity'), ('t', '1', 'far', '294276-12-31'), ('t', '1', 'old', '4713-01-01 BC')`)
	for _, e := range r.wantTaken(1, "never ever far old").Events {
		if rule := BrokenRule(&e); rule != RuleAvailable {
			t.Errorf("%s breaks %q", *e.Key, rule)
		}
	}
}

// A payload is read up to the size that is asked for. Blind reads nothing of one, which may be
// unreadable.
func TestTakeWithoutPayloads(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	r.Exec(insertMany, "e", 5)
	got := r.take(1, Terms{Events: 3, Inline: Blind})
	if e := got.Events[0]; len(got.Events) != 3 || e.Payload != nil || e.PayloadBytes != 0 || !got.More {
		t.Errorf("%+v", got)
	}
	got = r.take(1, Terms{Events: 3, Inline: len(`{"n": 1}`) - 1})
	if e := got.Events[0]; len(got.Events) != 2 || e.Payload != nil || e.PayloadBytes != len(`{"n": 1}`) {
		t.Errorf("%+v", got)
	}
}

// A transaction is taken when it has committed, whatever was taken meanwhile, and holds nothing up.
func TestTakeLateCommits(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	late, aborted, idle := r.Begin(), r.Begin(), r.Begin()
	_, err := idle.Exec(t.Context(), `SELECT pg_current_xact_id()`)
	relaytest.Must(t, err)
	_, err = late.Exec(t.Context(), insertOne, "late")
	relaytest.Must(t, err)
	_, err = aborted.Exec(t.Context(), insertOne, "aborted")
	relaytest.Must(t, err)
	for _, key := range []string{"a", "b", "c"} {
		r.Exec(insertOne, key)
		r.settle(1, r.wantTaken(1, key))
	}
	_, err = late.Exec(t.Context(), insertOne, "later")
	relaytest.Must(t, err)
	relaytest.Must(t, aborted.Rollback(t.Context()))
	r.find(1, Nothing)
	relaytest.Must(t, late.Commit(t.Context()))
	r.Exec(insertOne, "d")
	got := r.wantTaken(1, "late later d")
	r.settle(1, got)
	r.find(1, Nothing)
	_, err = idle.Exec(t.Context(), insertOne, "after hours")
	relaytest.Must(t, err)
	relaytest.Must(t, idle.Commit(t.Context()))
	r.wantTaken(1, "after hours")
}

// What a savepoint rolled back is never taken; what others inserted comes with its transaction.
func TestTakeSubtransactions(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	tx := r.Begin()
	for _, statement := range []string{
		`SAVEPOINT a`, insertLiteral("one"), `SAVEPOINT b`, insertLiteral("undone"), `ROLLBACK TO b`, insertLiteral("two"), `RELEASE a`,
		insertLiteral("three"), `SAVEPOINT c`,
	} {
		_, err := tx.Exec(t.Context(), statement)
		relaytest.Must(t, err)
	}
	for range 70 { // more than a backend keeps in shared memory
		_, err := tx.Exec(t.Context(), `SAVEPOINT many; INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('s', '1', gen_random_uuid())`)
		relaytest.Must(t, err)
	}
	r.Exec(insertOne, "between")
	r.wantTaken(1, "between")
	r.find(1, Nothing)
	relaytest.Must(t, tx.Commit(t.Context()))
	got := r.take(1, usual)
	if len(got.Events) != 73 || keys(got.Events[:3]) != "one two three" {
		t.Errorf("took %d: %q", len(got.Events), keys(got.Events[:3]))
	}
	r.find(1, Nothing)
}

func insertLiteral(key string) string {
	return `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', '` + key + `')`
}

// The rest of one late transaction that does not fit is taken, too.
func TestTakeLargeLateTransaction(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	late := r.Begin()
	_, err := late.Exec(t.Context(), `SELECT pg_current_xact_id()`)
	relaytest.Must(t, err)
	r.Exec(insertOne, "first")
	r.wantTaken(1, "first")
	_, err = late.Exec(t.Context(), insertMany, "e", 9)
	relaytest.Must(t, err)
	relaytest.Must(t, late.Commit(t.Context()))
	r.wantInTurn(Terms{Events: 4, Inline: 1 << 20}, "e1 e2 e3 e4", "e5 e6 e7 e8", "e9")
}

// wantInTurn takes ranges until nothing is left. Those without events do not count.
func (r *room) wantInTurn(terms Terms, want ...string) {
	r.Helper()
	var got []string
	for more := false; ; {
		taken, err := TakeRange(r.Context(), r.pool, 1, terms, more)
		relaytest.Must(r, err)
		if len(taken.Events) > 0 {
			got = append(got, keys(taken.Events))
		}
		if more = taken.More; !more && taken.Found == Nothing {
			break
		}
	}
	if !slices.Equal(got, want) {
		r.Errorf("took %q, want %q", got, want)
	}
}

// On their own server, on which no other transaction ends between theirs.
func TestTakeOnQuietServer(t *testing.T) {
	t.Parallel()
	r := onServer(t, localpg.Options{Settings: map[string]string{"max_prepared_transactions": "4"}})
	for _, name := range []string{"kept", "undone"} {
		tx := r.Begin()
		_, err := tx.Exec(t.Context(), `SET LOCAL outbox.notify = 'off'; `+insertLiteral(name)+`; PREPARE TRANSACTION '`+name+`'`)
		relaytest.Must(t, err)
		_ = tx.Rollback(t.Context()) // it has no transaction any more
	}
	r.Exec(insertOne, "a")
	r.wantTaken(1, "a")
	r.Exec(`ROLLBACK PREPARED 'undone'`)
	r.find(1, Nothing)
	r.Exec(insertOne, "b")
	r.wantTaken(1, "b")
	r.Exec(`COMMIT PREPARED 'kept'`)
	r.wantTaken(1, "kept")

	// A transaction at xmax(base) has an event before 900 that base sees, and one in base's list
	// has one after them. The scan of the primary key comes to the end of its window again and
	// again.
	late, long, young := r.Begin(), r.Begin(), r.Begin()
	in := func(tx pgx.Tx, statement string, args ...any) {
		t.Helper()
		_, err := tx.Exec(t.Context(), statement, args...)
		relaytest.Must(t, err)
	}
	for _, tx := range []pgx.Tx{late, long} {
		in(tx, `SELECT pg_current_xact_id()`)
	}
	in(young, insertOne, "young")
	in(long, insertMany, "long", 900)
	relaytest.Must(t, long.Commit(t.Context()))
	taken := r.take(1, Terms{Events: 1000, Inline: 1 << 20})
	if len(taken.Events) != 900 {
		t.Fatalf("took %d events", len(taken.Events))
	}
	in(young, insertMany, "young", 3)
	relaytest.Must(t, young.Commit(t.Context()))
	in(late, insertOne, "late")
	relaytest.Must(t, late.Commit(t.Context()))
	if atXmax := relaytest.Row[bool](r.Database, `SELECT pg_snapshot_xmax(target) <= (SELECT xid FROM outbox WHERE idempotency_key = 'young')
		FROM outbox_range ORDER BY seq DESC LIMIT 1`); !atXmax {
		t.Fatal("another transaction has ended meanwhile")
	}
	r.wantInTurn(Terms{Events: 2, Inline: 1 << 20}, "young", "young1 young2", "young3 late")
}

// While producers are armed, the DEFAULT wakes relays with the commit.
func TestWake(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	conn, err := r.Pool.Acquire(t.Context())
	relaytest.Must(t, err)
	defer conn.Release()
	_, err = conn.Exec(t.Context(), `LISTEN outbox_wake`)
	relaytest.Must(t, err)
	r.Exec(insertOne, "unarmed")
	r.Exec(`SELECT setval('outbox_armed', (extract(epoch FROM clock_timestamp()) * 1000)::bigint + 600000)`)
	tx := r.Begin()
	_, err = tx.Exec(t.Context(), `SET LOCAL outbox.notify = 'off'; `+insertLiteral("silent"))
	relaytest.Must(t, err)
	relaytest.Must(t, tx.Commit(t.Context()))
	r.Exec(insertMany, "e", 3)
	r.Exec(`NOTIFY outbox_wake, 'end'`)
	for _, want := range []string{"public", "end"} {
		if n, err := conn.Conn().WaitForNotification(t.Context()); err != nil || n.Payload != want {
			t.Fatalf("heard %+v, %v; want %q", n, err, want)
		}
	}
	r.wantTaken(1, "unarmed silent e1 e2 e3")
}

// A transaction larger than a range comes in several, by id, each event once, also when others
// commit and takers die meanwhile.
func TestTakeLargeTransaction(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	n := testsize.Of(200_000, 50_000)
	terms := Terms{Events: 2000, Inline: 1 << 20}
	late := r.Begin()
	_, err := late.Exec(t.Context(), insertOne, "late")
	relaytest.Must(t, err)
	r.Exec(insertOne, "first")
	r.settle(1, r.take(1, terms))
	r.Exec(insertMany, "large", n)
	_, err = late.Exec(t.Context(), insertOne, "later")
	relaytest.Must(t, err)
	relaytest.Must(t, late.Commit(t.Context()))
	seen := map[int64]bool{}
	ranges, before, more := 0, int64(0), false
	for {
		r.Exec(insertOne, fmt.Sprint("meanwhile ", ranges))
		relay := int32(1 + ranges%2)
		got, err := TakeRange(t.Context(), r.pool, relay, terms, more)
		relaytest.Must(t, err)
		for _, e := range got.Events {
			if seen[e.ID] || e.ID < before {
				t.Fatalf("event %d comes again or behind %d", e.ID, before)
			}
			seen[e.ID], before = true, e.ID
		}
		if ranges%5 == 0 { // the range is read again as it was
			r.Exec(`UPDATE outbox_range SET relay_id = 99 WHERE seq = $1`, got.Seq)
			again, found, err := RescueRange(t.Context(), r.pool, relay, nil, 0)
			relaytest.Must(t, err)
			if !found || again.Seq != got.Seq || keys(again.Events) != keys(got.Events) {
				t.Fatalf("range %d has %d events, and was taken with %d", got.Seq, len(again.Events), len(got.Events))
			}
			got.Fence = again.Fence
		}
		s := settlement(relay, got, got.Events)
		done, err := SettleRanges(t.Context(), r.pool, s)
		relaytest.Must(t, err)
		if len(done.Existing)+len(done.Lost) > 0 {
			t.Fatalf("%+v", done)
		}
		ranges++
		if more = got.More; !more {
			break
		}
	}
	// "first", the large one, "late" and "later", and the first that came before its first range.
	if len(seen) != n+3 || ranges != (n+3+1999)/2000 {
		t.Errorf("%d events in %d ranges", len(seen), ranges)
	}
	r.wantTakenCount(ranges - 1)
}

// wantTakenCount takes what is left in one range.
func (r *room) wantTakenCount(n int) {
	r.Helper()
	if got := r.take(1, usual); len(got.Events) != n {
		r.Errorf("took %d events, want %d", len(got.Events), n)
	}
}

// A value of any size takes no more of a relay's memory than its rule allows, and breaks that rule,
// however its event is taken.
func TestTakeReadsNoMoreThanItsRulesAllow(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	values := map[string]string{ // of payload, headers, ordering key and reference, by the rule that they break
		"none":        `to_json(repeat('x', 1048574)), jsonb_build_object('h', repeat('x', 8183)), repeat('x', 255), repeat('x', 255)`,
		RulePayload:   `to_json(repeat('x', 8000000)), '{}', NULL, NULL`,
		RuleHeaders:   `'1', jsonb_build_object('h', repeat('x', 8000000)), NULL, NULL`,
		RuleOrdering:  `'1', '{}', repeat('x', 8000000), NULL`,
		RuleReference: `'1', '{}', NULL, repeat('x', 8000000)`,
	}
	insert := func() {
		for rule, of := range values {
			r.Exec(`INSERT INTO outbox (event_type, idempotency_key, payload, headers, ordering_key, related_reference)
				SELECT 't', gen_random_uuid() || ' ' || $1, `+of, rule)
		}
	}
	check := func(name string, of Range, inline int) {
		t.Helper()
		testkit.Equal(t, name+": events", len(of.Events), len(values))
		for _, e := range of.Events {
			read := len(e.Payload) + len(e.Headers)
			for _, text := range []*string{e.OrderingKey, e.RelatedReference} {
				if text != nil {
					read += len(*text)
				}
			}
			_, rule, _ := strings.Cut(*e.Key, " ")
			if got := cmp.Or(BrokenRule(&e), "none"); got != rule && (inline >= 0 || rule != RulePayload) || read > 10_000+max(inline, 0) {
				t.Errorf("%s: %d bytes were read of an event that breaks %q, and should break %q", name, read, got, rule)
			}
		}
	}
	for _, inline := range []int{1 << 20, 8 << 10, 0, Blind} {
		for _, cut := range []bool{false, true} {
			insert()
			got, err := TakeRange(t.Context(), r.pool, 1, Terms{Events: 100, Inline: inline}, cut)
			relaytest.Must(t, err)
			check(fmt.Sprintf("payloads up to %d, cut: %v", inline, cut), got, inline)
			r.Exec(`UPDATE outbox_range SET relay_id = 99 WHERE seq = $1`, got.Seq)
			rescued, _, err := RescueRange(t.Context(), r.pool, 1, nil, inline)
			relaytest.Must(t, err)
			check(fmt.Sprintf("rescued, payloads up to %d, cut: %v", inline, cut), rescued, inline)
			r.settle(1, rescued)
		}
	}
}

// Of relays that take at once, one takes; a range that is not committed keeps the others for a
// moment alone.
func TestTakeBeaten(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	r.Exec(insertMany, "e", 3)
	tx, err := r.pool.Begin(t.Context())
	relaytest.Must(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	got, err := TakeRange(t.Context(), tx, 1, usual, false)
	relaytest.Must(t, err)
	r.find(2, Beaten)
	relaytest.Must(t, tx.Commit(t.Context()))
	testkit.Equal(t, "took", keys(got.Events), "e1 e2 e3")
	r.find(2, Nothing)
	r.Exec(`DELETE FROM outbox_range`)
	r.find(2, Missing)
}

// A taker whose snapshot is old takes nothing again, though the ranges of then have ended.
func TestTakeOfAnOldSnapshot(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	tx, err := r.pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	relaytest.Must(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = tx.Exec(t.Context(), `SELECT count(*) FROM outbox_range`)
	relaytest.Must(t, err)
	for _, key := range []string{"e1", "e2"} {
		r.Exec(insertOne, key)
		r.settle(1, r.take(1, usual))
	}
	_, err = PruneRanges(t.Context(), r.pool, 0)
	relaytest.Must(t, err)
	if got, err := TakeRange(t.Context(), tx, 2, usual, false); err == nil && got.Found == Taken {
		t.Errorf("took %s again", keys(got.Events))
	}
}

// A snapshot with very many open transactions.
func TestTakeManyOpenTransactions(t *testing.T) {
	t.Parallel()
	const n = 100
	r := newRoom(t)
	var open []*pgx.Conn
	for i := range n {
		conn, err := pgx.Connect(t.Context(), r.DSN)
		relaytest.Must(t, err)
		defer conn.Close(context.WithoutCancel(t.Context()))
		_, err = conn.Exec(t.Context(), `BEGIN; `+insertLiteral(fmt.Sprint("open", i)))
		relaytest.Must(t, err)
		open = append(open, conn)
		if i%10 == 0 {
			r.Exec(insertOne, fmt.Sprint("short", i))
			r.settle(1, r.wantTaken(1, fmt.Sprint("short", i)))
		}
	}
	var want []string
	for i, conn := range open {
		end := "COMMIT"
		if i%3 == 0 {
			end = "ROLLBACK"
		} else {
			want = append(want, fmt.Sprint("open", i))
		}
		_, err := conn.Exec(t.Context(), end)
		relaytest.Must(t, err)
		if i == n/2 {
			r.settle(1, r.wantTaken(1, strings.Join(want, " ")))
			want = nil
		}
	}
	got := r.take(1, Terms{Events: 7, Inline: 1 << 20}) // cut, from many transactions
	rest := got.Events
	for got.More {
		var err error
		got, err = TakeRange(t.Context(), r.pool, 1, Terms{Events: 7, Inline: 1 << 20}, true)
		relaytest.Must(t, err)
		rest = append(rest, got.Events...)
	}
	if keys(rest) != strings.Join(want, " ") {
		t.Errorf("took %q, want %q", keys(rest), want)
	}
}
