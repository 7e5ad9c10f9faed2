package relay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// settled makes all deliveries what they are after n attempts.
func (db *database) settled(status string, where string) {
	db.Helper()
	db.exec(`UPDATE outbox_delivery SET status = $1, attempts = 8, rescues = 3, claim = 9, last_attempt_at = now(), last_status = 500,
		last_reason = 'server_error', last_error = 'attempt 8 of 8: 500', delivered_at = CASE WHEN $1 = 'delivered' THEN now() END
		WHERE `+where, status)
}

func TestReplay(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.insert(5, "k")
	db.settled("failed", "event_id = 1")
	db.settled("delivered", "event_id = 2")
	db.settled("discarded", "event_id = 3")
	db.exec(`UPDATE outbox_delivery SET claimed_by = 1, claim = 1, lease_expires_at = now() + interval '1 hour' WHERE event_id = 4`)
	ops := NewOps(db.pool)
	ids := []int64{1, 1, 2, 3, 4, 5, 77}

	before := row[string](db, `SELECT string_agg(d::text, ' ' ORDER BY event_id) FROM outbox_delivery d`)
	b, err := ops.PreviewReplay(t.Context(), Selection{EventIDs: ids}, 0)
	must(t, err)
	if row[string](db, `SELECT string_agg(d::text, ' ' ORDER BY event_id) FROM outbox_delivery d`) != before {
		t.Error("a preview changes something")
	}
	if len(b.Sample) != 1 || b.Sample[0].EventID != 1 || b.Sample[0].IdempotencyKey != "k-1" || b.Sample[0].Status != "failed" {
		t.Errorf("the sample is %+v", b.Sample)
	}
	b, err = ops.Replay(t.Context(), Selection{EventIDs: ids}, 0, nil)
	must(t, err)
	// Only what failed, unless something else was said; what is pending, in flight or not, is never touched.
	if b.Matched != 1 || b.Done != 1 || b.Unknown != 1 || !slices.Equal(b.UnknownIDs, []int64{77}) ||
		!maps.Equal(b.OtherStatus, map[string]int64{"delivered": 1, "discarded": 1, "pending": 2}) {
		t.Errorf("%+v", b)
	}
	b, err = ops.Replay(t.Context(), Selection{EventIDs: ids, Statuses: []string{"delivered", "discarded", "failed"}}, 0, nil)
	must(t, err)
	if b.Done != 2 || b.OtherStatus["pending"] != 3 {
		t.Errorf("%+v", b)
	}
	if n := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE event_id <= 3 AND status = 'pending' AND replay AND attempts = 0 AND rescues = 0
		AND next_attempt_at <= clock_timestamp() AND delivered_at IS NULL AND claim = 10 AND last_error = 'attempt 8 of 8: 500'`); n != 3 {
		t.Errorf("%d of 3 are as a replay leaves them: %v", n, rows[string](db, `SELECT d::text FROM outbox_delivery d`))
	}
	if n := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE event_id > 3 AND NOT replay AND claim = 5 - event_id`); n != 2 {
		t.Error("a pending delivery was touched")
	}
	// Once more is nothing more.
	b, err = ops.Replay(t.Context(), Selection{Destination: "default", Statuses: []string{"delivered", "discarded", "failed"}}, 0, nil)
	must(t, err)
	if b.Matched != 0 || b.Done != 0 {
		t.Errorf("%+v", b)
	}
	_, err = ops.Replay(t.Context(), Selection{Statuses: []string{"pending"}}, 0, nil)
	if err == nil || !strings.Contains(err.Error(), `status "pending" cannot be chosen; choose failed, delivered, discarded`) {
		t.Error(err)
	}
}

// A settle whose commit was not acknowledged is sent again. By then an operator may have replayed what it settled.
func TestLateSettleMissesTheReplay(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.insert(1, "k")
	db.settled("delivered", "true")
	b, err := NewOps(db.pool).Replay(t.Context(), Selection{EventIDs: []int64{1}, Statuses: []string{"delivered"}}, 0, nil)
	must(t, err)
	if b.Done != 1 {
		t.Fatalf("%+v", b)
	}
	if n := db.exec(settleDelivered, []int64{1}, []string{"default"}, []int64{9}, []float64{0}, []int16{200}); n != 0 {
		t.Error("a settle of the claim before the replay settles the replay, which is then never sent")
	}
}

func TestSelection(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`INSERT INTO outbox_route VALUES ('a.*', 'other')`)
	db.exec(`DELETE FROM outbox_route WHERE pattern = '*'; INSERT INTO outbox_route VALUES ('a.*', 'default'), ('b_c', 'default')`)
	now := row[time.Time](db, `SELECT now()`)
	for i, e := range []struct{ kind, key, created string }{
		{"a.x", "o1", "2 hours"}, {"a.y", "", "1 hour"}, {"b_c", "o1", "1 hour"}, {"parked", "", "10 minutes"}, {"a.x", "", "1 minute"},
	} {
		db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, created_at)
			VALUES ($1, '{}', $2, nullif($3, ''), $4::timestamptz - $5::interval)`, e.kind, fmt.Sprint(i), e.key, now, e.created)
	}
	for _, status := range []string{"failed", "delivered", "pending"} {
		if status == "pending" {
			db.exec(`UPDATE outbox_delivery SET status = 'pending', delivered_at = NULL`)
		} else {
			db.settled(status, "destination <> ''")
		}
		db.exec(`UPDATE outbox_delivery SET last_reason = CASE WHEN event_id < 3 THEN 'timeout' ELSE 'rejected' END`)
		for name, test := range map[string]struct {
			s    Selection
			want []string
		}{
			"all":                   {Selection{}, []string{"1 default", "1 other", "2 default", "2 other", "3 default", "4 ", "5 default", "5 other"}},
			"destination":           {Selection{Destination: "other"}, []string{"1 other", "2 other", "5 other"}},
			"none of that name":     {Selection{Destination: "othe"}, nil},
			"event":                 {Selection{EventIDs: []int64{5, 1}, Destination: "other"}, []string{"1 other", "5 other"}},
			"type":                  {Selection{Type: "a.x"}, []string{"1 default", "1 other", "5 default", "5 other"}},
			"type pattern":          {Selection{Type: "*.y"}, []string{"2 default", "2 other"}},
			"nothing is special":    {Selection{Type: "b_c"}, []string{"3 default"}},
			"an underscore":         {Selection{Type: "a_x"}, nil},
			"a percent sign":        {Selection{Type: "a%"}, nil},
			"ordering key":          {Selection{OrderingKey: "o1"}, []string{"1 default", "1 other", "3 default"}},
			"reason":                {Selection{Reason: "timeout", Destination: "default"}, []string{"1 default", "2 default"}},
			"since":                 {Selection{Since: now.Add(-time.Hour), Destination: "default"}, []string{"2 default", "3 default", "5 default"}},
			"until":                 {Selection{Until: now.Add(-time.Hour), Destination: "default"}, []string{"1 default"}},
			"everything at once":    {Selection{EventIDs: []int64{1, 2, 3}, Type: "a.*", Destination: "default", Since: now.Add(-90 * time.Minute), Reason: "timeout"}, []string{"2 default"}},
			"parked":                {Selection{Parked: true}, []string{"4 "}},
			"limit":                 {Selection{Destination: "default", Limit: 2}, []string{"1 default", "2 default"}},
			"limit of more than is": {Selection{Destination: "other", Limit: 9}, []string{"1 other", "2 other", "5 other"}},
		} {
			action := replayAction(0)
			if status == "pending" {
				action = discardAction()
			}
			test.s.Statuses = []string{status}
			want := slices.DeleteFunc(slices.Clone(test.want), func(d string) bool { return status != "pending" && d == "4 " })
			var got []string
			var b Bulk
			must(t, NewOps(db.pool).walk(t.Context(), action, test.s, &b, func(found []candidate) (bool, error) {
				for _, c := range found {
					got = append(got, fmt.Sprint(c.EventID, " ", c.Destination))
				}
				return true, nil
			}))
			if test.s.Limit == 2 && len(got) == 2 { // which ones depends on the way
				continue
			}
			if slices.Sort(got); !slices.Equal(got, want) {
				t.Errorf("%s, %s: got %q, want %q", status, name, got, want)
			}
		}
	}
	if !(Selection{Limit: 3}).Empty() || (Selection{Statuses: []string{"failed"}}).Empty() {
		t.Error("Empty is wrong")
	}
}

// Receivers forget: what they may have processed long ago is not sent again by mistake.
func TestReplayOfOldEvents(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, created_at)
		VALUES ('t', '{}', 'old', now() - interval '91 days'), ('t', '{}', 'young', now() - interval '89 days')`)
	db.insert(1, "gone")
	db.settled("failed", "true")
	db.exec(`DELETE FROM outbox WHERE idempotency_key = 'gone-1'`)
	ops := NewOps(db.pool)
	for _, find := range []func() (Bulk, error){
		func() (Bulk, error) {
			return ops.PreviewReplay(t.Context(), Selection{Destination: "default"}, DefaultReceiverMemory)
		},
		func() (Bulk, error) {
			return ops.Replay(t.Context(), Selection{Destination: "default"}, DefaultReceiverMemory, nil)
		},
	} {
		b, err := find()
		must(t, err)
		if b.Matched != 1 || b.TooOld != 1 || b.EventMissing != 1 {
			t.Errorf("%+v", b)
		}
	}
	if got := rows[int64](db, `SELECT event_id FROM outbox_delivery WHERE replay`); !slices.Equal(got, []int64{2}) {
		t.Errorf("replayed %v", got)
	}
	b, err := ops.Replay(t.Context(), Selection{Destination: "default"}, 0, nil)
	must(t, err)
	if b.Done != 1 {
		t.Errorf("%+v", b)
	}
}

func TestDiscard(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.insert(4, "k")
	db.exec(`DELETE FROM outbox_route`)
	db.insert(1, "parked")
	db.settled("failed", "event_id = 1")
	db.exec(`UPDATE outbox_delivery SET claimed_by = 1, lease_expires_at = now() + interval '1 hour' WHERE event_id = 2`)
	db.exec(`UPDATE outbox_delivery SET claimed_by = 1, lease_expires_at = now() - interval '1 second' WHERE event_id = 3`)
	db.exec(`UPDATE outbox_delivery SET next_attempt_at = now() + interval '1 hour' WHERE event_id = 4`)
	ops := NewOps(db.pool)
	b, err := ops.Discard(t.Context(), Selection{Destination: "default"}, nil)
	must(t, err)
	if b.Matched != 3 || b.Done != 3 || b.InFlight != 1 {
		t.Errorf("%+v", b)
	}
	if got := rows[int64](db, `SELECT event_id FROM outbox_delivery WHERE status = 'discarded' AND claimed_by IS NULL ORDER BY event_id`); !slices.Equal(got, []int64{1, 3, 4}) {
		t.Errorf("discarded %v", got)
	}
	b, err = ops.Discard(t.Context(), Selection{EventIDs: []int64{1, 2, 3, 4, 5}}, nil)
	must(t, err)
	if b.Done != 1 || b.InFlight != 1 || b.OtherStatus["discarded"] != 3 {
		t.Errorf("%+v", b)
	}
	if got := row[string](db, `SELECT status FROM outbox_delivery WHERE destination = ''`); got != "discarded" {
		t.Errorf("the parked one is %s", got)
	}
}

// What is locked, or changes between being found and being changed, is left alone and counted.
func TestBulkMeetsOthers(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.insert(3, "k")
	db.settled("failed", "true")
	tx, err := db.pool.Begin(t.Context())
	must(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	_, err = tx.Exec(t.Context(), `SELECT FROM outbox_delivery WHERE event_id = 1 FOR UPDATE`)
	must(t, err)
	ops := NewOps(db.pool)
	var b Bulk
	var found []candidate
	must(t, ops.walk(t.Context(), replayAction(0), Selection{Destination: "default"}, &b, func(list []candidate) (bool, error) {
		found = list
		return true, nil
	}))
	// Meanwhile somebody else replays the second, and a relay fails it again.
	db.exec(`UPDATE outbox_delivery SET claim = claim + 1 WHERE event_id = 2`)
	changed, err := changeDeliveries(t.Context(), db.pool, replayDeliveries, found)
	must(t, err)
	if changed != 1 {
		t.Errorf("%d changed, want 1", changed)
	}
	if got := rows[int64](db, `SELECT event_id FROM outbox_delivery WHERE replay`); !slices.Equal(got, []int64{3}) {
		t.Errorf("replayed %v", got)
	}
}

// An operator who ends a bulk command ends it between two batches: what was begun is whole, and known.
func TestInterruptedBulk(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.insert(2*bulkBatch+5, "k")
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("enough")
	b, err := NewOps(db.pool).Discard(ctx, Selection{Destination: "default"}, func(Bulk) { cancel(enough) })
	if !errors.Is(err, enough) || b.Done != bulkBatch {
		t.Errorf("%+v, %v", b, err)
	}
	if n := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'discarded'`); n != bulkBatch {
		t.Errorf("%d are discarded", n)
	}
	b, err = NewOps(db.pool).Discard(t.Context(), Selection{Destination: "default"}, nil)
	must(t, err)
	if b.Done != bulkBatch+5 {
		t.Errorf("%+v", b)
	}
}

// The whole history of a destination is replayed while a relay sends it: every delivery goes out exactly once more, for
// what a relay has delivered again is not found again behind the walk.
func TestReplayOfManyWhileARelayRuns(t *testing.T) {
	t.Parallel()
	const events = 20 * bulkBatch
	db := newDatabase(t)
	db.insert(events, "k")
	db.settled("delivered", "true")
	db.exec(`VACUUM ANALYZE outbox, outbox_delivery`)
	sent := make([]atomic.Int32, events+1)
	rc := newCounter(t, sent)
	r := start(t, db.config(to(rc)))
	r.instance()

	b, err := NewOps(db.pool).Replay(t.Context(), Selection{Statuses: []string{"delivered"}, Type: "t"}, DefaultReceiverMemory, nil)
	must(t, err)
	if b.Matched != events || b.Done != events || b.Missed != 0 {
		t.Errorf("%+v", b)
	}
	r.settles(t, policy.Delivered, events)
	becomes(db, events, `SELECT count(*)::int FROM outbox_delivery WHERE status = 'delivered' AND replay AND attempts = 1`)
	for id := 1; id <= events; id++ {
		if n := sent[id].Load(); n != 1 {
			t.Fatalf("event %d was sent %d times", id, n)
		}
	}
}

// newCounter returns the URL of a receiver that counts the requests for each event and remembers nothing else.
func newCounter(t testing.TB, sent []atomic.Int32) string {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var id int
		if _, err := fmt.Sscan(r.Header.Get("X-Outbox-Event-Id"), &id); err != nil || id < 1 || id >= len(sent) {
			t.Errorf("event id %q", r.Header.Get("X-Outbox-Event-Id"))
			return
		}
		sent[id].Add(1)
		w.WriteHeader(http.StatusNoContent)
	}))
	t.Cleanup(server.Close)
	return server.URL
}

// However large the table, a batch reads what it needs.
func TestPlansOfBulkCommands(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.fill(100_000, 80)
	db.exec(`UPDATE outbox_delivery SET status = 'failed', delivered_at = NULL WHERE event_id % 50 = 7`)
	db.exec(`VACUUM ANALYZE`)
	conn, err := pgx.Connect(t.Context(), db.dsn)
	must(t, err)
	defer conn.Close(context.WithoutCancel(t.Context()))
	common := `'{failed}', 'default', 'default', '', '', '%', '-infinity', 'infinity', 0, 100000`
	for name, test := range map[string]struct{ types, sql, args, index string }{
		"by id":   {"bigint[]", candidatesByID, `'{1,2,3}'`, "outbox_delivery_pkey"},
		"of all":  {"bigint, text", candidatesOfAll, `50000, 'default'`, "outbox_delivery_pkey"},
		"failed":  {"text, bigint", candidatesFailed, `'default', 0`, "outbox_delivery_aside"},
		"pending": {"text, boolean, timestamptz, bigint", candidatesPending, `'', false, '-infinity', 0`, "outbox_delivery_due"},
	} {
		_, err := conn.Exec(t.Context(), `PREPARE "`+name+`" (text[], text, text, text, text, text, timestamptz, timestamptz, float8, bigint, `+test.types+`) AS `+test.sql, pgx.QueryExecModeSimpleProtocol)
		must(t, err)
		for _, mode := range []string{"force_custom_plan", "force_generic_plan"} {
			_, err = conn.Exec(t.Context(), `SET plan_cache_mode = `+mode)
			must(t, err)
			result, err := conn.Query(t.Context(), `EXPLAIN (COSTS OFF) EXECUTE "`+name+`" (`+common+`, `+test.args+`)`, pgx.QueryExecModeSimpleProtocol)
			must(t, err)
			lines, err := pgx.CollectRows(result, pgx.RowTo[string])
			must(t, err)
			wantPlan(t, name+", "+mode, strings.Join(lines, "\n"), []string{test.index, "Index Cond: (id = c.event_id)"})
		}
	}
}
