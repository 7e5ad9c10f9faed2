package relaytest

import (
	"context"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// Fill adds n deliveries, of which the given share of a hundred is delivered; the rest is pending,
// some of it in order, some of it claimed.
func (db *Database) Fill(n, delivered int) {
	db.Helper()
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 't', '{}', gen_random_uuid() FROM generate_series(1, $1)`, n)
	db.Exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now() WHERE event_id % 100 < $1 AND status = 'pending'`, delivered)
	db.Exec(`UPDATE outbox_delivery SET claimed_by = 1, lease_expires_at = now() + interval '1 hour' WHERE event_id % 100 = 98 AND status = 'pending'`)
	db.Exec(`UPDATE outbox_delivery SET ordering_key = event_id % 1000 WHERE event_id % 10 = 9 AND status = 'pending'`)
}

var big = regexp.MustCompile(`(Scan|using \w+) on (outbox|outbox_delivery|outbox_attempt)( \w+)?$`)

// WantPlan checks that a plan has the given parts, and reads no big table as a whole: neither in a
// sequential scan, nor through an index without a condition.
func WantPlan(t testing.TB, what, plan string, want []string) {
	t.Helper()
	lines := strings.Split(plan, "\n")
	var wrong []string
	for i, line := range lines {
		whole := strings.Contains(line, " using ") && (i+1 == len(lines) || !strings.Contains(lines[i+1], "Index Cond"))
		if big.MatchString(line) && (whole || strings.Contains(line, "Seq Scan")) {
			wrong = append(wrong, line)
		}
	}
	for _, part := range want {
		if !strings.Contains(plan, part) {
			wrong = append(wrong, "missing: "+part)
		}
	}
	if wrong != nil {
		t.Errorf("%s:\n%s\nin\n%s", what, strings.Join(wrong, "\n"), plan)
	}
}

// PlanOf returns the plan of a statement, which is not executed.
func PlanOf(t testing.TB, conn interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}, statement string, arguments ...any,
) string {
	t.Helper()
	rows, err := conn.Query(t.Context(), `EXPLAIN (COSTS OFF) `+statement, arguments...)
	Must(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	Must(t, err)
	return strings.Join(lines, "\n")
}

// Explained is what the server did for a statement.
type Explained struct {
	Plan    string
	Buffers int // pages that were read, wherever they were
	Took    time.Duration
}

// Explain executes a statement, and returns what it took.
func Explain(t testing.TB, conn interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}, statement string, arguments ...any,
) (e Explained) {
	t.Helper()
	rows, err := conn.Query(t.Context(), `EXPLAIN (ANALYZE, BUFFERS, TIMING OFF) `+statement, arguments...)
	Must(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	Must(t, err)
	e.Plan = strings.Join(lines, "\n")
	for _, found := range regexp.MustCompile(`(?:hit|read)=(\d+)`).FindAllStringSubmatch(lines[1], -1) {
		pages, err := strconv.Atoi(found[1])
		Must(t, err)
		e.Buffers += pages
	}
	e.Took, err = time.ParseDuration(regexp.MustCompile(`Execution Time: ([0-9.]+) ms`).FindStringSubmatch(e.Plan)[1] + "ms")
	Must(t, err)
	return e
}

// BlockVacuum opens a snapshot for as long as the test lasts.
func (db *Database) BlockVacuum() {
	db.Helper()
	_, err := db.Begin().Exec(db.Context(), `SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outbox_delivery`)
	Must(db, err)
}

// Serve registers a relay that delivers to the given destinations.
func (db *Database) Serve(destinations ...string) {
	db.Helper()
	db.Exec(`WITH r AS (INSERT INTO outbox_relay (name, version) VALUES ('test', '') RETURNING id)
		INSERT INTO outbox_relay_destination SELECT r.id, unnest($1::text[]) FROM r`, destinations)
}
