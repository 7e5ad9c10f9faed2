package intake

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// history adds n events that were taken and delivered, and some that wait, are in hand, or are
// open.
func (r *room) history(n int) {
	r.Helper()
	r.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', 'old' || i, i % 1000 FROM generate_series(1, $1::int) i`, n)
	r.Exec(`INSERT INTO outbox_range (seq, relay_id, fence, base, target, low, upto, more, oldest_open_seq, ended_at)
		SELECT 2, 1, 1, target, pg_current_snapshot(), 0, $1, false, 2, now() FROM outbox_range WHERE seq = 1`, n)
	r.Exec(`INSERT INTO outbox_delivery (event_id, destination, status, ordering_key, delivered_at)
		SELECT id, 'default', CASE WHEN id % 100 > 1 THEN 'delivered' WHEN id % 100 = 1 THEN 'failed' ELSE 'pending' END, ordering_key,
			CASE WHEN id % 100 > 1 THEN now() END FROM outbox`)
}

// Each statement finds its rows by the index meant for it, whatever the tables were like when it
// was prepared.
func TestPlans(t *testing.T) {
	t.Parallel()
	for _, n := range []int{0, testsize.Of(200_000, 5000)} {
		for _, analysed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d, analysed %v", n, analysed), func(t *testing.T) {
				t.Parallel()
				r := newRoom(t)
				if n > 0 {
					r.history(n)
				}
				if analysed {
					r.Exec(`VACUUM ANALYZE`)
				}
				conn, err := pgx.Connect(t.Context(), r.DSN)
				relaytest.Must(t, err)
				defer conn.Close(context.WithoutCancel(t.Context()))
				for name, value := range r.pool.Config().ConnConfig.RuntimeParams {
					_, err := conn.Exec(t.Context(), `SELECT set_config($1, $2, false)`, name, value)
					relaytest.Must(t, err)
				}
				for name, test := range map[string]struct {
					types, sql, args string
					want             []string
				}{
					"whole":     {"int, int, int, float8", takeWhole, "1, 100, 100000, 0", []string{"using outbox_by_xid on outbox o", "Index Cond: ((xid >= late.xid) AND (xid <= late.xid))", "Backward using outbox_range_pkey"}},
					"cut":       {"int, int, int, float8", takeCut, "1, 100, 100000, 0", []string{"using outbox_by_xid on outbox o", "using outbox_pkey on outbox o", "Index Cond: ((ROW(xid, id) > ROW(late.xid, l", "Index Cond: (id > GREATEST(l"}},
					"settle":    {"int, bigint[], bigint[], bool[], int[], bigint[], text[], text[], int[], float8[], float8[], smallint[], text[], text[], text[], int[], timestamptz[], bigint[], float8[], smallint[], timestamptz[], int[], bigint[], text[]", settleRanges, "1, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}'", []string{"Index Scan using outbox_range_pkey on outbox_range o", "outbox_delivery_order", "outbox_delivery_heads", "using outbox_delivery_pkey on outbox_delivery d"}},
					"join":      {"text[], text[], int, bigint, timestamptz[], timestamptz", joinKeys, "'{default}', '{k}', 10, 0, '{NULL}', '-infinity'", []string{"outbox_delivery_scheduled", "Scan Backward using outbox_delivery_order", "Scan Backward using outbox_delivery_heads", "Tid Scan on outbox_delivery", "Index Scan Backward using outbox_range_pkey on outbox_range r"}},
					"take over": {"int, bigint[]", takeOverRange, "1, '{}'", []string{"Index Scan using outbox_range_pkey on outbox_range o"}},
					"read":      {"bigint, bigint, int", selectRange, "2, 1, 100", []string{"Index Cond: ((ROW(xid, id) > ROW(x.xid, r", "using outbox_by_xid on outbox o", "using outbox_pkey on outbox o", "using outbox_delivery_pkey on outbox_delivery d"}},
					"keys":      {"int, bigint, bigint, bigint[], text[], text[], bool[], timestamptz[]", selectBlockedKeys, "1, 3, 1, '{2}', '{k}', '{default}', '{f}', '{now}'", []string{"using outbox_range_pkey on outbox_range r", "outbox_delivery_order", "outbox_delivery_heads", "outbox_delivery_scheduled", "hashed SubPlan"}},
					"untaken":   {"int", countUntaken, "100", []string{"Index Cond: ((xid >= late.xid) AND (xid <= late.xid))", "Index Cond: ((ROW(xid, id) > ROW(late_1.xid, l", "Index Cond: (id > GREATEST(l", "Backward using outbox_range_pkey"}},
					"stuck":     {"int", `WITH most AS MATERIALIZED (SELECT $1::int AS events), ` + Untaken + `, ` + Stuck + ` SELECT * FROM untaken UNION ALL SELECT * FROM stuck`, "100", []string{"Index Cond: ((ROW(xid, id) > ROW(late_2.xid, h", "Index Cond: ((xid >= pg_snapshot_xmax(h.base)) AND (xid < pg_snapshot_xmax(h", "Index Cond: ((id > GREATEST(h", "using outbox_delivery_pkey on outbox_delivery d"}},
					"prune":     {"bigint", pruneRanges, "0", []string{"using outbox_range_pkey on outbox_range o"}},
				} {
					_, err := conn.Exec(t.Context(), `PREPARE tried (`+test.types+`) AS `+test.sql, pgx.QueryExecModeSimpleProtocol)
					relaytest.Must(t, err)
					plan := relaytest.PlanOf(t, conn, `EXECUTE tried (`+test.args+`)`, pgx.QueryExecModeSimpleProtocol)
					relaytest.WantPlan(t, name, plan, test.want)
					if strings.Contains(plan, "Seq Scan on outbox_range") {
						t.Errorf("%s reads all ranges:\n%s", name, plan)
					}
					_, err = conn.Exec(t.Context(), `DEALLOCATE tried`)
					relaytest.Must(t, err)
				}
			})
		}
	}
}

// What a take reads is bounded by what it returns: neither history, nor gaps between ids, nor open
// transactions count.
func TestReadsOfATake(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	late := r.Begin()
	_, err := late.Exec(t.Context(), insertOne, "late")
	relaytest.Must(t, err)
	n := testsize.Of(50_000, 5000)
	r.history(n)
	open := r.Begin() // its entries stand among those of others, and it does not end
	_, err = open.Exec(t.Context(), insertOne, "open")
	relaytest.Must(t, err)
	more := false
	take := func(name string, want int) {
		t.Helper()
		tx, err := r.pool.Begin(t.Context())
		relaytest.Must(t, err)
		defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
		_, err = tx.Exec(t.Context(), relaytest.NoteReads)
		relaytest.Must(t, err)
		got, err := TakeRange(t.Context(), tx, 1, usual, more)
		relaytest.Must(t, err)
		more = got.More
		var read int
		relaytest.Must(t, tx.QueryRow(t.Context(), `SELECT (idx_tup_fetch + seq_scan * 1000000)::int FROM `+relaytest.SinceNoted+` WHERE relname = 'outbox'`).Scan(&read))
		relaytest.Must(t, tx.Commit(t.Context()))
		if len(got.Events) != want || read > 16*want {
			t.Errorf("%s: %d events, want %d; %d rows were read", name, len(got.Events), want, read)
		}
	}
	take("idle", 0)
	r.Exec(insertMany, "few", 10)
	take("few", 10)
	relaytest.Must(t, late.Commit(t.Context()))
	r.Exec(insertMany, "many", 250)
	take("a late one before all history, and many", 100)
	take("continued", 100)
	take("the rest", 51)
	take("idle again", 0)
}

// While vacuum is blocked, dead versions gather. A take reads as many pages after 3,000 ranges as
// after 100, give or take a level of an index.
func TestVacuumBlocked(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	r.BlockVacuum()
	pages := map[int]int{}
	pruned := int64(0)
	measured := []int{100, testsize.Of(3000, 400)}
	for i := 1; i <= measured[1]; i++ {
		r.Exec(insertOne, fmt.Sprint("e", i))
		if i == measured[0] || i == measured[1] {
			tx, err := r.pool.Begin(t.Context())
			relaytest.Must(t, err)
			pages[i] = relaytest.Explain(t, tx, takeWhole, 2, 100, 1<<20, 0.0).Buffers
			relaytest.Must(t, tx.Rollback(t.Context()))
		}
		r.settle(1, r.take(1, usual))
		if i%50 == 0 {
			r.Exec(`UPDATE outbox_range SET ended_at = ended_at - interval '1 hour' WHERE ended_at > now() - interval '1 hour'`)
			next, err := PruneRanges(t.Context(), r.pool, pruned)
			relaytest.Must(t, err)
			if next <= pruned {
				t.Errorf("nothing was pruned from %d on", pruned)
			}
			pruned = next
		}
	}
	if pages[measured[1]] > pages[measured[0]]+20 {
		t.Errorf("pages by takes: %v", pages)
	}
}
