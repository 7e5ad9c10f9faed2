package ops

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

func TestSelection(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox_route VALUES ('a.*', 'other')`)
	db.Exec(`DELETE FROM outbox_route WHERE pattern = '*'; INSERT INTO outbox_route VALUES ('a.*', 'default'), ('b_c', 'default')`)
	now := relaytest.Row[time.Time](db, `SELECT now()`)
	for i, e := range []struct{ kind, key, created string }{
		{"a.x", "o1", "2 hours"}, {"a.y", "", "1 hour"}, {"b_c", "o1", "1 hour"}, {"parked", "", "10 minutes"}, {"a.x", "", "1 minute"},
	} {
		db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, created_at)
			VALUES ($1, '{}', $2, nullif($3, ''), $4::timestamptz - $5::interval)`, e.kind, fmt.Sprint(i), e.key, now, e.created)
	}
	for _, status := range []string{"failed", "delivered", "pending"} {
		if status == "pending" {
			db.Exec(`UPDATE outbox_delivery SET status = 'pending', delivered_at = NULL`)
		} else {
			db.Settled(status, "destination <> ''")
		}
		db.Exec(`UPDATE outbox_delivery SET last_reason = CASE WHEN event_id < 3 THEN 'timeout' ELSE 'rejected' END`)
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
			relaytest.Must(t, New(db.Pool).walk(t.Context(), action, test.s, 1000, &b, func(found []candidate) (bool, error) {
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

// What is locked, or changes between being found and being changed, is left alone and counted.
func TestBulkMeetsOthers(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(3, "k")
	db.Settled("failed", "true")
	tx, err := db.Pool.Begin(t.Context())
	relaytest.Must(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	_, err = tx.Exec(t.Context(), `SELECT FROM outbox_delivery WHERE event_id = 1 FOR UPDATE`)
	relaytest.Must(t, err)
	outbox := New(db.Pool)
	var b Bulk
	var found []candidate
	relaytest.Must(t, outbox.walk(t.Context(), replayAction(0), Selection{Destination: "default"}, 1000, &b, func(list []candidate) (bool, error) {
		found = list
		return true, nil
	}))
	// Meanwhile another operator replays the second, and a relay fails it again.
	db.Exec(`UPDATE outbox_delivery SET claim = claim + 1 WHERE event_id = 2`)
	changed, err := outbox.changeDeliveries(t.Context(), replayAction(0), found, 0, 0)
	relaytest.Must(t, err)
	testkit.Equal(t, "changed", changed, 1)
	testkit.Equal(t, "replayed", relaytest.Rows[int64](db, `SELECT event_id FROM outbox_delivery WHERE replay`), []int64{3})
}

// However large the table, a batch reads what it needs.
func TestPlansOfBulkCommands(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := relaytest.Covered(t)
	db.Fill(100_000, 80)
	db.Exec(`UPDATE outbox_delivery SET status = 'failed', delivered_at = NULL WHERE event_id % 50 = 7`)
	db.Exec(`VACUUM ANALYZE`)
	conn, err := pgx.Connect(t.Context(), db.DSN)
	relaytest.Must(t, err)
	defer conn.Close(context.WithoutCancel(t.Context()))
	common := `'{failed}', 'default', 'default', '', '', '%', '-infinity', 'infinity', 0, 100000`
	for name, test := range map[string]struct{ types, sql, args, index string }{
		"by id":   {"bigint[]", candidatesByID, `'{1,2,3}'`, "outbox_delivery_pkey"},
		"of all":  {"bigint, text, bigint", candidatesOfAll, `50000, 'default', 1000`, "outbox_delivery_pkey"},
		"failed":  {"text, bigint, bigint", candidatesFailed, `'default', 0, 1000`, "outbox_delivery_aside"},
		"due":     {"text, boolean, timestamptz, bigint, bigint", candidatesDue, `'', false, '-infinity', 0, 1000`, "outbox_delivery_due"},
		"waiting": {"text, bigint, bigint, bigint", candidatesWaiting, `'', 0, 0, 1000`, "outbox_delivery_waiting"},
	} {
		_, err := conn.Exec(t.Context(), `PREPARE "`+name+`" (text[], text, text, text, text, text, timestamptz, timestamptz, float8, bigint, `+test.types+`) AS `+test.sql, pgx.QueryExecModeSimpleProtocol)
		relaytest.Must(t, err)
		for _, mode := range []string{"force_custom_plan", "force_generic_plan"} {
			_, err = conn.Exec(t.Context(), `SET plan_cache_mode = `+mode)
			relaytest.Must(t, err)
			plan := relaytest.PlanOf(t, conn, `EXECUTE "`+name+`" (`+common+`, `+test.args+`)`, pgx.QueryExecModeSimpleProtocol)
			relaytest.WantPlan(t, name+", "+mode, plan, []string{test.index, "Index Cond: (id = c.event_id)"})
		}
	}
}

// A pause may not take longer the more waits.
func TestPlanOfDestinations(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := relaytest.Covered(t)
	db.Fill(100_000, 10)
	db.Exec(`VACUUM ANALYZE`)
	plan := strings.Join(relaytest.Rows[string](db, `EXPLAIN (COSTS OFF) `+selectDestinationNames), "\n")
	if strings.Contains(plan, "Seq Scan on outbox_delivery") || !strings.Contains(plan, "using outbox_delivery_due") {
		t.Error(plan)
	}
}

// What is created is what a relay routes: by the routes, parked without one, at its time, in its
// key. What relays have yet to route is left to them.
func TestCreateDeliveries(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	db.Exec(`INSERT INTO outbox_route (pattern, destination) VALUES ('t', 'default'), ('t*', 'second')`)
	db.Exec(`DELETE FROM outbox_route WHERE pattern = '*'`)
	const insert = `INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, available_at, xid) SELECT v.*, x.xid
		FROM (VALUES ('t', '{"a": 1}'::json, $1 || '-1', 'key', date_trunc('day', now()) + interval '300 days'), ('u', '{}', $1 || '-2', NULL, now()), ('tt', '[]', $1 || '-3', NULL, now())) v,
			(SELECT coalesce(nullif($2, '')::xid8, pg_current_xact_id())) x (xid)`
	db.Exec(insert, "loaded", "2")
	db.Exec(insert, "new", "")
	outbox := New(db.Pool)
	found, err := outbox.Undelivered(t.Context())
	relaytest.Must(t, err)
	recent, err := outbox.recentUndelivered(t.Context())
	relaytest.Must(t, err)
	if found.Events != 3 || found.FirstEventID != 1 || recent != found {
		t.Errorf("without deliveries: %+v, of the newest %+v", found, recent)
	}
	created, err := outbox.createDeliveries(t.Context(), 2, 0)
	relaytest.Must(t, err)
	got := relaytest.Rows[string](db, `SELECT concat_ws(' ', e.idempotency_key, d.destination, d.status, coalesce(d.ordering_key, '-'), d.payload_bytes,
			d.next_attempt_at >= now() + interval '1 day') FROM outbox_delivery d JOIN outbox e ON e.id = d.event_id ORDER BY 1`)
	want := []string{"loaded-1 default pending key 8 t", "loaded-1 second pending key 8 t", "loaded-2  pending - 2 f", "loaded-3 second pending - 2 f"}
	if !slices.Equal(got, want) || created.Deliveries != 4 || created.Events != 3 {
		t.Errorf("%+v created: %q, want %q", created, got, want)
	}
}
