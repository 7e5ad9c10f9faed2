package relay

import (
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
				db.blockVacuum()
			}
			db.exec(`INSERT INTO outbox_delivery (event_id, destination, ordering_key, next_attempt_at)
				SELECT 1 + i, 'default', 'key-' || `+c.key+`, `+c.due+` FROM generate_series(0, $1::int - 1) i`, n)
			if c.status == "delivered" {
				db.exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now() WHERE event_id <= $1`, n-3)
			}
			db.exec(`ANALYZE outbox_delivery`)
			conn := engineConn(b, db)
			var e explained
			for b.Loop() {
				e = look(b, conn)
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(e.buffers), "buffers")
			b.ReportMetric(float64(e.took.Microseconds())/1000, "ms")
			b.ReportMetric(float64(row[int](db, `SELECT (sample -> 'lanes' -> 0 ->> 'waiting')::int FROM outbox_watch`)), "waiting")
		})
	}
}

// look looks around the database once.
func look(tb testing.TB, conn *pgx.Conn) explained {
	tb.Helper()
	return explain(tb, conn, watch.TakeWatch, 0., []string{}, time.Minute.Seconds(), alert.DefaultLagOver.Seconds())
}
