package watch

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// explainLook looks around the database once, and returns what it took.
func explainLook(t testing.TB, conn *pgx.Conn) relaytest.Explained {
	t.Helper()
	return relaytest.Explain(t, conn, TakeWatch, 0., []string{}, time.Minute.Seconds(), alert.DefaultLagOver.Seconds(), "{}", true)
}

// A look reads no table as a whole, however much there is, whether it was planned before or after.
func TestLookIsBounded(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := relaytest.Covered(t, "default", "second")
	conn := engineConn(t, db.DSN)
	const arguments = ` (0, '{}', 900, 600, '{}', true)`
	for _, statement := range []string{`PREPARE look (float8, text[], float8, float8, jsonb, boolean) AS ` + TakeWatch, `EXECUTE look` + arguments} {
		_, err := conn.Exec(t.Context(), statement, pgx.QueryExecModeSimpleProtocol)
		relaytest.Must(t, err)
	}
	db.Exec(`ALTER TABLE outbox_delivery SET (autovacuum_enabled = off)`)
	db.Fill(100_000, 80)
	db.Exec(`UPDATE outbox_delivery SET status = 'failed', claimed_by = NULL, lease_expires_at = NULL WHERE event_id % 20 = 19 AND status = 'pending'`)
	result, err := conn.Query(t.Context(), `EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF) EXECUTE look`+arguments, pgx.QueryExecModeSimpleProtocol)
	relaytest.Must(t, err)
	lines, err := pgx.CollectRows(result, pgx.RowTo[string])
	relaytest.Must(t, err)
	relaytest.WantPlan(t, "look", strings.Join(lines, "\n"), []string{
		"using outbox_delivery_heads on outbox_delivery f", "using outbox_delivery_waiting on outbox_delivery d", "using outbox_delivery_pkey on outbox_delivery h", "using outbox_delivery_order on outbox_delivery p",
	})
	testkit.Equal(t, "lanes seen", relaytest.Row[int](db, `SELECT jsonb_array_length(sample -> 'lanes') FROM outbox_watch`), 2)
}

// While vacuum is blocked, the index entries of what was delivered stand before the first that is
// pending. A look goes through them once, whatever it asks about a destination.
func TestLookPassesWhatWasDeliveredOnce(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`ALTER TABLE outbox_delivery SET (autovacuum_enabled = off)`)
	db.Serve("default")
	conn := engineConn(t, db.DSN)
	const first = `SELECT destination, replay, next_attempt_at, event_id FROM outbox_delivery
		WHERE status = 'pending' AND blocked_by IS NULL AND destination >= '' ORDER BY destination, replay, next_attempt_at, event_id LIMIT 1`
	db.Exec(`INSERT INTO outbox_delivery (event_id, destination) SELECT i, 'default' FROM generate_series(1, 20001) i; ANALYZE outbox_delivery`)
	explainLook(t, conn)
	before := explainLook(t, conn)
	db.BlockVacuum()
	db.Exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now() WHERE event_id <= 20000`)
	once, after := relaytest.Explain(t, conn, first), explainLook(t, conn)
	if passed := after.Buffers - before.Buffers; once.Buffers < 500 || passed > once.Buffers*3/2 {
		t.Errorf("%d pages for one pass, %d for a look", once.Buffers, passed)
	}
}

// Beside two million settled deliveries, and with 300,000 due, a sample reads no large table as a
// whole, and no more than its limit of any index.
func TestSampleIsBounded(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const settled, due = 2_000_000, 300_000
	db := relaytest.Covered(t, "a", "b", "c")
	db.Exec(`ALTER TABLE outbox_delivery SET (autovacuum_enabled = off)`)
	db.Exec(`INSERT INTO outbox_delivery (event_id, destination, ordering_key, next_attempt_at, status, delivered_at)
		SELECT i, chr(97 + i % 3), CASE WHEN i % 10 = 0 THEN 'key-' || i % 5000 END, now() - interval '1 day',
		       CASE WHEN i % 100 = 0 THEN 'failed' ELSE 'delivered' END, CASE WHEN i % 100 = 0 THEN NULL ELSE now() END
		FROM generate_series(1, $1::int) i`, settled)
	db.Exec(`INSERT INTO outbox_delivery (event_id, destination, ordering_key, next_attempt_at)
		SELECT $1::int + i, chr(97 + i % 3), CASE WHEN i % 10 = 0 THEN 'key-' || i % 5000 END, now() - interval '1 minute' FROM generate_series(1, $2::int) i`, settled, due)
	db.Exec(`CHECKPOINT`) // VACUUM marks no page as visible to all before its commits are on disk
	// A sample of three destinations counts 30,000 pending and 3,000 failed deliveries. VACUUM lets
	// it read the index alone; until then it reads a page for each that failed.
	for _, c := range []struct {
		prepare string
		most    int // pages
	}{{`SELECT 1`, 25_000}, {`ANALYZE outbox_delivery`, 25_000}, {`VACUUM outbox_delivery`, 5_000}} {
		prepare, mostSampleBuffers := c.prepare, c.most
		db.Exec(prepare)
		conn := engineConn(t, db.DSN)
		sample := relaytest.Explain(t, conn, CountBacklog, []string{"a", "b", "c"}, []string{}, 10_000, alert.DefaultLagOver.Seconds())
		plan := sample.Plan
		if scan := regexp.MustCompile(`Seq Scan on outbox(_delivery|_attempt)?\b[^_].*`).FindString(plan); scan != "" {
			t.Errorf("after %s: %s in\n%s", prepare, scan, plan)
		}
		if want := "Index Only Scan using outbox_delivery_aside on outbox_delivery aside"; !strings.Contains(plan, want) {
			t.Errorf("after %s: missing %q in\n%s", prepare, want, plan)
		}
		t.Logf("after %s: %d buffers, %s", prepare, sample.Buffers, sample.Took)
		if sample.Buffers > mostSampleBuffers {
			t.Errorf("after %s: %d buffers:\n%s", prepare, sample.Buffers, plan)
		}
	}
}
