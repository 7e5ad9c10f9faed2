package relay

import (
	"context"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/watch"
)

// BenchmarkLook measures one look around a database with a million pending deliveries of ordering keys.
func BenchmarkLook(b *testing.B) {
	n := 1_000_000
	if testing.Short() {
		n = 10_000
	}
	const overdue, future = `now() - interval '1 hour'`, `now() + interval '1 year'`
	for _, c := range []struct{ name, status, key, due string }{
		{"draining/keys=3", "pending", "i % 3", `now() - interval '1 second'`},
		{"draining/keys=10000", "pending", "i % 10000", `now() - interval '1 second'`},
		{"overdue/keys=3", "pending", "i % 3", overdue},
		{"overdue/keys=10000", "pending", "i % 10000", overdue},
		{"waiting/keys=3", "pending", "i % 3", `CASE WHEN i < 3 THEN ` + future + ` ELSE ` + overdue + ` END`},
		{"waiting/keys=10000", "pending", "i % 10000", `CASE WHEN i < 10000 THEN ` + future + ` ELSE ` + overdue + ` END`},
		{"scheduled/keys=10000", "pending", "i % 10000", future},
		{"vacuum blocked/keys=3", "delivered", "i % 3", overdue},
	} {
		b.Run(c.name, func(b *testing.B) {
			db := newDatabase(b)
			db.exec(`ALTER TABLE outbox_delivery SET (autovacuum_enabled = off)`)
			if c.status == "delivered" { // their index entries stay as long as a snapshot may need them
				holder, err := db.pool.Acquire(b.Context())
				must(b, err)
				b.Cleanup(func() { _, _ = holder.Exec(context.Background(), `ROLLBACK`); holder.Release() })
				_, err = holder.Exec(b.Context(), `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outbox_delivery`)
				must(b, err)
			}
			db.exec(`INSERT INTO outbox_delivery (event_id, destination, ordering_key, next_attempt_at)
				SELECT 1 + i, 'default', 'key-' || `+c.key+`, `+c.due+` FROM generate_series(0, $1::int - 1) i`, n)
			if c.status == "delivered" {
				db.exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now() WHERE event_id <= $1`, n-3)
			}
			db.exec(`ANALYZE outbox_delivery`)
			conn := engineConn(b, db)
			var buffers int
			var took float64
			for b.Loop() {
				rows, err := conn.Query(b.Context(), `EXPLAIN (ANALYZE, BUFFERS, TIMING OFF) `+watch.TakeWatch, 0., []string{}, time.Minute.Seconds(), alert.DefaultLagOver.Seconds())
				must(b, err)
				lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
				must(b, err)
				buffers = 0
				for _, found := range regexp.MustCompile(`(?:hit|read)=(\d+)`).FindAllStringSubmatch(lines[1], -1) {
					count, _ := strconv.Atoi(found[1])
					buffers += count
				}
				found := regexp.MustCompile(`Execution Time: ([0-9.]+) ms`).FindStringSubmatch(strings.Join(lines, "\n"))
				took, err = strconv.ParseFloat(found[1], 64)
				must(b, err)
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(buffers), "buffers")
			b.ReportMetric(took, "ms")
			b.ReportMetric(float64(row[int](db, `SELECT (sample -> 'lanes' -> 0 ->> 'waiting')::int FROM outbox_watch`)), "waiting")
		})
	}
}
