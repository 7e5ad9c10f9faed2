package waiting

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// keyed returns an outbox with n deliveries of key k, the events 1 to n.
func keyed(t testing.TB, n int) *relaytest.Database {
	t.Helper()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', i, 'k' FROM generate_series(1, $1) i`, n)
	return db
}

// waits returns the events that wait, each as event<head.
func waits(db *relaytest.Database) string {
	db.Helper()
	return strings.Join(relaytest.Rows[string](db, `SELECT event_id || '<' || blocked_by FROM outbox_delivery WHERE status = 'pending' AND blocked_by IS NOT NULL ORDER BY event_id`), " ")
}

const headFailed = `UPDATE outbox_delivery SET status = 'failed' WHERE event_id = 1`

func TestMark(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		prepare string
		first   int64
		want    string
	}{
		"a failed head":              {headFailed, 2, "2<1 3<1 4<1"},
		"from what was found on":     {headFailed, 3, "3<1 4<1"},
		"a head that is retried":     {`UPDATE outbox_delivery SET next_attempt_at = now() + interval '1 hour' WHERE event_id = 1`, 2, "2<1 3<1 4<1"},
		"a head that is due":         {``, 2, ""},
		"a head that is delivered":   {`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now() WHERE event_id = 1`, 2, ""},
		"a head that is discarded":   {`UPDATE outbox_delivery SET status = 'discarded' WHERE event_id = 1`, 2, ""},
		"a head that is gone":        {`DELETE FROM outbox_delivery WHERE event_id = 1`, 2, ""},
		"a head of another receiver": {`UPDATE outbox_delivery SET status = 'failed', destination = 'other' WHERE event_id = 1`, 2, ""},
		"a parked head":              {`UPDATE outbox_delivery SET destination = '' WHERE event_id = 1`, 2, "2<1 3<1 4<1"},
		"a head in flight": {`UPDATE outbox_delivery SET next_attempt_at = now() + interval '1 hour', claimed_by = 1,
			lease_expires_at = now() + interval '1 hour' WHERE event_id = 1`, 2, ""},
		"a follower in flight, one that is delivered, one of another key": {headFailed + `;
			UPDATE outbox_delivery SET claimed_by = 1, lease_expires_at = now() + interval '1 hour' WHERE event_id = 2;
			UPDATE outbox_delivery SET status = 'delivered', delivered_at = now() WHERE event_id = 3;
			INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('t', '{}', 'x', 'other')`, 2, "4<1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := keyed(t, 4)
			db.Exec(test.prepare)
			left, marked, err := store{db.Pool}.mark(t.Context(), []Behind{{"default", "k", 1, ordering.Place{Event: test.first}}}, 100)
			relaytest.Must(t, err)
			if got := waits(db); got != test.want || len(left) > 0 || marked != strings.Count(got, "<") {
				t.Errorf("%q wait, want %q; %d marked, left: %v", got, test.want, marked, left)
			}
		})
	}
}

// A chunk ends in the middle of a key, and a row that is locked is left to the next claim that
// finds it.
func TestMarkInChunks(t *testing.T) {
	t.Parallel()
	db := keyed(t, 6)
	db.Exec(headFailed)
	tx := db.Begin()
	_, err := tx.Exec(t.Context(), `SELECT FROM outbox_delivery WHERE event_id = 3 FOR UPDATE`)
	relaytest.Must(t, err)
	left, _, err := store{db.Pool}.mark(t.Context(), []Behind{{"default", "k", 1, ordering.Place{Event: 2}}}, 2)
	relaytest.Must(t, err)
	if want := []Behind{{"default", "k", 1, ordering.Place{Event: 4}}}; waits(db) != "2<1" || !slices.Equal(left, want) {
		t.Errorf("%q wait, left: %v", waits(db), left)
	}
}

// The delivery behind a head that is retried is marked again at each retry. Nothing is read of all
// that waits behind it already.
func TestMarkInFrontOfMany(t *testing.T) {
	t.Parallel()
	db := keyed(t, 200)
	db.Exec(headFailed)
	db.Exec(`UPDATE outbox_delivery SET blocked_by = 1 WHERE event_id > 2 AND event_id < 200`)
	left := []Behind{{"default", "k", 1, ordering.Place{Event: 2}}}
	for rounds := 0; len(left) > 0; rounds++ {
		if rounds == 2 {
			t.Fatalf("continues: %v", left)
		}
		var err error
		left, _, err = store{db.Pool}.mark(t.Context(), left, 10)
		relaytest.Must(t, err)
	}
	testkit.Equal(t, "wait for nothing", relaytest.Rows[int64](db, `SELECT event_id FROM outbox_delivery WHERE blocked_by IS NULL ORDER BY event_id`), []int64{1, 200})
}

// What a sweep releases: the first pending delivery of each key whose head holds no longer.
func TestSweep(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change  string
		lenient []string
		want    string
	}{
		"a failed head":               {headFailed, nil, "2<1 3<1 4<1"},
		"a head that is retried":      {``, nil, "2<1 3<1 4<1"},
		"a head in flight":            {`UPDATE outbox_delivery SET claimed_by = 1, lease_expires_at = now() + interval '1 hour' WHERE event_id = 1`, nil, "2<1 3<1 4<1"},
		"a failed head is skipped":    {headFailed, []string{"default"}, "3<1 4<1"},
		"another skips":               {headFailed, []string{"other"}, "2<1 3<1 4<1"},
		"a head that is delivered":    {`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now() WHERE event_id = 1`, nil, "3<1 4<1"},
		"a head that is discarded":    {`UPDATE outbox_delivery SET status = 'discarded' WHERE event_id = 1`, nil, "3<1 4<1"},
		"a head that is gone":         {`DELETE FROM outbox_delivery WHERE event_id = 1`, nil, "3<1 4<1"},
		"the second is delivered too": {`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now() WHERE event_id < 3`, nil, "4<1"},
		"a parked head that is looked at": {`UPDATE outbox_delivery SET destination = '' WHERE event_id = 1;
			INSERT INTO outbox_destination (destination, parked_after) VALUES ('default', 0)`, nil, "2<1 3<1 4<1"},
		"a parked head that was looked at": {`UPDATE outbox_delivery SET destination = '' WHERE event_id = 1;
			INSERT INTO outbox_destination (destination) VALUES ('default')`, nil, "3<1 4<1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := keyed(t, 4)
			db.Exec(`UPDATE outbox_delivery SET blocked_by = 1 WHERE event_id > 1`)
			db.Exec(test.change)
			k := NewKeeper()
			k.DB, k.Released = db.Pool, func() {}
			k.Lenient = func() []string { return test.lenient }
			relaytest.Must(t, k.release(t.Context()))
			testkit.Equal(t, "wait", waits(db), test.want)
		})
	}
}

// What a keeper releases may be of a destination that other relays serve: they sweep, too.
func TestReleaseAsksOtherRelaysToSweep(t *testing.T) {
	t.Parallel()
	db := keyed(t, 2)
	db.Exec(`UPDATE outbox_delivery SET blocked_by = 1 WHERE event_id > 1`)
	db.Exec(`DELETE FROM outbox_delivery WHERE event_id = 1`)
	other, err := pgx.Connect(t.Context(), db.DSN)
	relaytest.Must(t, err)
	defer func() { _ = other.Close(context.WithoutCancel(t.Context())) }()
	_, err = other.Exec(t.Context(), `LISTEN outbox_wake`)
	relaytest.Must(t, err)
	k := NewKeeper()
	k.DB, k.Lenient, k.Released = db.Pool, func() []string { return nil }, func() {}
	relaytest.Must(t, k.release(t.Context()))
	ctx, cancel := context.WithTimeout(t.Context(), relaytest.Patience)
	defer cancel()
	got, err := other.WaitForNotification(ctx)
	relaytest.Must(t, err)
	testkit.Equal(t, "the notification", got.Payload, "sweep "+relaytest.Row[string](db, `SELECT current_schema()`))
}

// A sweep writes nothing, and wakes nobody, while the first delivery of a key is due: what waits
// behind a head that has ended comes in its turn.
func TestSweepLeavesAloneWhatIsDue(t *testing.T) {
	t.Parallel()
	db := keyed(t, 4)
	db.Exec(`UPDATE outbox_delivery SET blocked_by = 1 WHERE event_id > 2`)
	db.Exec(`UPDATE outbox_delivery SET status = 'discarded' WHERE event_id = 1`)
	before := relaytest.Row[string](db, `SELECT xmin::text FROM outbox_delivery WHERE event_id = 2`)
	k := NewKeeper()
	k.DB, k.Lenient, k.Released = db.Pool, func() []string { return nil }, func() { t.Error("relays are woken") }
	relaytest.Must(t, k.release(t.Context()))
	testkit.Equal(t, "the first delivery was written", relaytest.Row[string](db, `SELECT xmin::text FROM outbox_delivery WHERE event_id = 2`), before)
}

// A sweep that did not come to its end is made again at the next tick.
func TestSweepThatFailed(t *testing.T) {
	t.Parallel()
	db := keyed(t, 1)
	k := NewKeeper()
	k.DB, k.Lenient, k.Released = db.Pool, func() []string { return nil }, func() {}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := k.release(ctx); err == nil {
		t.Fatal("no error")
	}
	k.took = 0
	k.Tick()
	if _, sweep, _ := k.take(); !sweep {
		t.Error("the next tick does not sweep")
	}
}

// Sweeps through very many heads take a small part of the time, by themselves and when they are
// asked for again and again.
func TestSweepsRest(t *testing.T) {
	t.Parallel()
	k := NewKeeper()
	k.any, k.swept, k.took = true, time.Now(), time.Hour
	k.Tick()
	if _, sweep, wait := k.take(); sweep || wait > 0 {
		t.Error("a tick sweeps at once")
	}
	k.Sweep()
	if _, sweep, wait := k.take(); sweep || wait < 9*time.Hour || wait > 10*time.Hour {
		t.Errorf("sweep: %v; waits for %v", sweep, wait)
	}
	k.swept = k.swept.Add(-10 * time.Hour)
	if _, sweep, _ := k.take(); !sweep {
		t.Error("what was asked for was forgotten")
	}
}

// However many keys wait, a keeper remembers a bounded number: claims find the others again.
func TestFoundIsBounded(t *testing.T) {
	t.Parallel()
	k := NewKeeper()
	for i := range 3 * maxFound {
		k.Found(Behind{"default", fmt.Sprint(i), 1, ordering.Place{Event: 9}})
	}
	k.Found(Behind{"default", "0", 1, ordering.Place{Event: 5}})
	if b := k.found[key{"default", "0"}]; len(k.found) != maxFound || b.First.Event != 5 {
		t.Errorf("%d keys are remembered; the first from event %d", len(k.found), b.First.Event)
	}
}

// Whoever ends a delivery releases the next one of its key alone.
func TestRelease(t *testing.T) {
	t.Parallel()
	db := keyed(t, 4)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', 'unkeyed')`)
	db.Exec(`UPDATE outbox_delivery SET blocked_by = 1 WHERE event_id IN (2, 3, 4)`)
	db.Exec(`UPDATE outbox_delivery SET status = 'discarded' WHERE event_id IN (1, 5)`)
	relaytest.Must(t, Release(t.Context(), db.Pool, []int64{1, 5, 99}, []string{"default", "default", "default"}))
	testkit.Equal(t, "wait", waits(db), "3<1 4<1")
}

// A keeper marks all that waits, chunk by chunk, and releases it when the head has ended.
func TestKeeper(t *testing.T) {
	t.Parallel()
	n := testsize.Of(3*markChunk, markChunk+10)
	db := keyed(t, n)
	db.Exec(headFailed)
	var released atomic.Bool
	k := NewKeeper()
	k.DB, k.Lenient = db.Pool, func() []string { return nil }
	k.Released = func() { released.Store(true) }
	k.Failed = func(operation string, err error) { t.Errorf("%s: %v", operation, err) }
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { k.Run(ctx) })
	k.Found(Behind{"default", "k", 1, ordering.Place{Event: 3}})
	k.Found(Behind{"default", "k", 1, ordering.Place{Event: 2}})
	relaytest.Becomes(db, n-1, `SELECT count(*)::int FROM outbox_delivery WHERE blocked_by = 1`)
	k.Tick() // it has marked something, so the next tick sweeps
	db.Exec(`UPDATE outbox_delivery SET status = 'discarded' WHERE event_id = 1`)
	k.Sweep()
	relaytest.Eventually(t, "the release", released.Load)
	if first := relaytest.Row[int](db, `SELECT min(event_id)::int FROM outbox_delivery WHERE status = 'pending' AND blocked_by IS NULL`); first != 2 {
		t.Errorf("event %d was released first", first)
	}
}

// While nothing waits, a keeper asks the database once in many ticks.
func TestTicksOfAnIdleKeeper(t *testing.T) {
	t.Parallel()
	k := NewKeeper()
	var sweeps []int
	for i := range 2 * idleTicks {
		k.Tick()
		if _, sweep, _ := k.take(); sweep {
			sweeps = append(sweeps, i+1)
			k.ticks = 0
		}
	}
	testkit.Equal(t, "sweeps at the ticks", sweeps, []int{idleTicks, 2 * idleTicks})
	for range 3 {
		k.any = true
		k.Tick()
		if _, sweep, _ := k.take(); !sweep {
			t.Error("something waits, and a tick does not sweep")
		}
	}
}

// Each statement finds its rows by the index meant for it, on a table with much behind few heads,
// analysed or not.
func TestPlans(t *testing.T) {
	t.Parallel()
	db := keyed(t, testsize.Of(100_000, 5000))
	db.Exec(`UPDATE outbox_delivery SET blocked_by = 1 WHERE event_id > 1 AND event_id % 10 > 0`)
	for _, analyse := range []string{``, `VACUUM ANALYZE`} {
		if analyse != "" {
			db.Exec(analyse)
		}
		for name, test := range map[string]struct{ types, sql, args, index string }{
			"mark":    {"text[], text[], bigint[], bigint[], int, bigint[]", markWaiting, `'{default}', '{k}', '{1}', '{2}', 10, '{0}'`, "outbox_delivery_order"},
			"heads":   {"text, bigint, int, text[]", selectHeads, `'', 0, 10, '{}'`, "outbox_delivery_waiting"},
			"release": {"text[], text[]", releaseFirst, `'{default}', '{k}'`, "outbox_delivery_order"},
			"behind":  {"bigint[], text[]", releaseBehind, `'{1}', '{default}'`, "outbox_delivery_order"},
		} {
			plan := explain(t, db, test.types, test.sql, test.args)
			relaytest.WantPlan(t, fmt.Sprintf("%s, %q", name, analyse), plan, []string{test.index})
		}
	}
}

func explain(t *testing.T, db *relaytest.Database, types, sql, args string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), db.DSN)
	relaytest.Must(t, err)
	defer conn.Close(context.WithoutCancel(t.Context()))
	for _, statement := range []string{
		`SET enable_seqscan = off`, `SET enable_hashjoin = off`, `SET enable_mergejoin = off`, `SET enable_bitmapscan = off`,
		`SET plan_cache_mode = force_generic_plan`, `PREPARE tried (` + types + `) AS ` + sql,
	} {
		_, err := conn.Exec(t.Context(), statement, pgx.QueryExecModeSimpleProtocol)
		relaytest.Must(t, err)
	}
	result, err := conn.Query(t.Context(), `EXPLAIN (COSTS OFF) EXECUTE tried (`+args+`)`, pgx.QueryExecModeSimpleProtocol)
	relaytest.Must(t, err)
	lines, err := pgx.CollectRows(result, pgx.RowTo[string])
	relaytest.Must(t, err)
	return strings.Join(lines, "\n")
}
