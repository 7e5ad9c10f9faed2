package metrics

import (
	"context"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/admin/control"
	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// fillLarge is one statement for each table, without triggers: $1 deliveries are settled, every
// 250th of them failed, and $2 are due.
const (
	fillEvents = `
INSERT INTO outbox (id, event_type, payload, idempotency_key, ordering_key) OVERRIDING SYSTEM VALUE
SELECT i, 'invoice.paid', '{"n": 1}', 'k' || i, CASE WHEN i % 2 = 0 THEN 'a' || i % 10000 END FROM generate_series(1, $1::int + $2::int) i`
	fillDeliveries = `
INSERT INTO outbox_delivery (event_id, destination, status, attempts, claim, next_attempt_at, last_attempt_at, delivered_at, last_http_status, last_reason, last_error, ordering_key)
SELECT i, (ARRAY['shop', 'mail', 'crm'])[1 + i % 3], s.status, (s.status <> 'pending')::int, i, now() - ($1 + $2 - i) * interval '10 ms',
       CASE WHEN s.status <> 'pending' THEN now() END, CASE WHEN s.status = 'delivered' THEN now() END, CASE s.status WHEN 'delivered' THEN 200 WHEN 'failed' THEN 422 END,
       CASE s.status WHEN 'failed' THEN 'rejected' END, CASE s.status WHEN 'failed' THEN '422 Unprocessable Entity' END, CASE WHEN i % 2 = 0 THEN 'a' || i % 10000 END
FROM generate_series(1, $1::int + $2::int) i
CROSS JOIN LATERAL (SELECT CASE WHEN i > $1 THEN 'pending' WHEN i % 250 = 2 THEN 'failed' ELSE 'delivered' END AS status) s`
)

// BenchmarkLargeTables measures what an operator and a scrape ask beside five million settled and
// 300,000 due deliveries: just inserted, analysed, and vacuumed.
func BenchmarkLargeTables(b *testing.B) {
	settled, due := 5_000_000, 300_000
	if testing.Short() {
		settled, due = 20_000, 5_000
	}
	db := relaytest.Covered(b, "shop", "mail", "crm")
	db.Exec(`ALTER TABLE outbox SET (autovacuum_enabled = off); ALTER TABLE outbox_delivery SET (autovacuum_enabled = off);
		INSERT INTO outbox_destination (destination, paused, paused_at) SELECT destination, true, now() FROM outbox_route
		ON CONFLICT (destination) DO UPDATE SET paused = true, paused_at = now()`)
	tx := db.Begin()
	for _, statement := range []string{fillEvents, fillDeliveries} {
		_, err := tx.Exec(b.Context(), `SET LOCAL session_replication_role = replica; SET LOCAL synchronous_commit = off`)
		relaytest.Must(b, err)
		_, err = tx.Exec(b.Context(), statement, settled, due)
		relaytest.Must(b, err)
	}
	relaytest.Must(b, tx.Commit(b.Context()))
	m := start(b, config(b, db, to("shop", "http://127.0.0.1:9/"), to("mail", "http://127.0.0.1:9/"), to("crm", "http://127.0.0.1:9/")))
	relaytest.Eventually(b, "the registration", func() bool { return m.relay.State().Registered })
	outbox := ops.New(db.Pool)
	page := control.New(control.Config{Outbox: outbox, History: history.New()})
	for _, state := range []struct{ name, prepare string }{
		{"neither", `SELECT 1`}, {"analysed", `ANALYZE outbox, outbox_delivery`}, {"vacuumed", `VACUUM outbox, outbox_delivery`},
	} {
		db.Exec(state.prepare)
		for _, c := range []struct {
			name string
			ask  func(context.Context) error
		}{
			{"sample", func(ctx context.Context) error { _, err := m.relay.CountBacklog(ctx, sampleLimit(3)); return err }},
			{"scrape", func(context.Context) error { m.scrape(); return nil }},
			{"status", func(ctx context.Context) error { _, err := outbox.Status(ctx, ""); return err }},
			{"overview", func(ctx context.Context) error {
				page.Forget()
				_, err := page.Overview(ctx, control.List{})
				return err
			}},
			{"failures", func(ctx context.Context) error { _, err := outbox.Failures(ctx, "shop"); return err }},
			{"list by key", func(ctx context.Context) error {
				_, err := outbox.Deliveries(ctx, ops.DeliveryFilter{OrderingKey: "none"})
				return err
			}},
			{"list of failed", func(ctx context.Context) error {
				_, err := outbox.Deliveries(ctx, ops.DeliveryFilter{Status: "failed", Type: "none"})
				return err
			}},
		} {
			b.Run(state.name+"/"+c.name, func(b *testing.B) {
				for b.Loop() {
					relaytest.Must(b, c.ask(b.Context()))
				}
				b.ReportMetric(float64(b.Elapsed().Milliseconds())/float64(b.N), "ms/op")
			})
		}
	}
}
