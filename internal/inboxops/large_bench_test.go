package inboxops_test

import (
	"context"
	"net/url"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// fillLarge adds $1 events of 20 receivers and sources: 94 of 100 succeeded, 2 failed, 1 was
// ignored, 3 are pending. $2 is how many ordering keys the two of five have that are in order.
const fillLarge = `
WITH event AS (
    SELECT i, 'receiver ' || i % 4 AS receiver, 'source ' || i % 5 AS source, CASE WHEN i % 5 < 2 THEN 'o' || i % $2::int END AS ordering_key,
           CASE WHEN i % 97 < 91 THEN 'succeeded' WHEN i % 97 < 93 THEN 'failed' WHEN i % 97 < 94 THEN 'ignored' ELSE 'pending' END AS state
    FROM generate_series(1, $1::int) i
), remembered AS (
    INSERT INTO processed_events (receiver, source, idempotency_key, event_type, processing_state)
    SELECT receiver, source, 'invoice-' || i, 't' || i % 50, 'recorded' FROM event
)
INSERT INTO inbox_events (receiver, source, idempotency_key, event_type, processing_state, inbox_id, next_attempt_at, ordering_key, sequence, attempts, payload, last_error)
SELECT receiver, source, 'invoice-' || i, 't' || i % 50, state, nextval('inbox_id_seq'), CASE WHEN state = 'pending' AND ordering_key IS NULL THEN now() END, ordering_key, i, 1,
       convert_to(repeat('x', 200), 'UTF8'), CASE WHEN state = 'failed' THEN 'no such customer' END
FROM event`

// buffers is how many pages the database has read so far, in memory or from disk. What it flushes
// shows when it is asked again.
const buffers = `
SELECT pg_stat_force_next_flush(), pg_sleep(0.05), blks_hit + blks_read FROM pg_stat_database WHERE datname = current_database()`

// BenchmarkLargeInbox measures the commands on an inbox of a million events, in milliseconds and
// pages; with -short on one of 20,000.
func BenchmarkLargeInbox(b *testing.B) {
	rows := 1_000_000
	if testing.Short() {
		rows = 20_000
	}
	for name, keys := range map[string]int{"few keys": 10, "many keys": rows / 2} {
		b.Run(name, func(b *testing.B) { benchmarkInbox(b, rows, keys) })
	}
}

func benchmarkInbox(b *testing.B, rows, keys int) {
	dsn := pgtest.New(b, migrations.Inbox)
	single, err := url.Parse(dsn) // one session, whose pages are counted as soon as it is asked
	pgtest.Must(b, err)
	query := single.Query()
	query.Set("pool_max_conns", "1")
	single.RawQuery = query.Encode()
	pool := pgtest.Pool(b, single.String())
	ops := inboxops.New(pool)
	pgtest.Exec(b, pool, fillLarge, rows, keys)
	pgtest.Exec(b, pool, "VACUUM ANALYZE")
	type sel = inboxops.Selection
	list := func(s inboxops.Selection) func(context.Context) (int64, error) {
		s.Limit = 50
		return func(ctx context.Context) (int64, error) {
			page, err := ops.List(ctx, s)
			return int64(len(page.Events)), err
		}
	}
	done := func(found inboxops.Bulk, err error) (int64, error) { return found.Matched, err }
	for _, command := range []struct {
		name string
		do   func(context.Context) (int64, error)
	}{
		{"status", func(ctx context.Context) (int64, error) {
			status, err := ops.Status(ctx, "", "")
			return int64(len(status.Senders)), err
		}},
		{"list", list(sel{})},
		{"list failed", list(sel{States: []string{failed}})},
		{"list pending", list(sel{States: []string{pending}})},
		{"list processing, of which there are none", list(sel{States: []string{processing}})},
		{"list a key", list(sel{Key: "invoice-77"})},
		{"list an ordering key, open and failed", list(sel{OrderingKey: "o5", States: []string{pending, processing, failed}})},
		{"list a type that never was", list(sel{Type: "never"})},
		{"list remembered", func(ctx context.Context) (int64, error) {
			page, err := ops.Remembered(ctx, sel{Limit: 50}, inboxops.MemoryKey{})
			return int64(len(page.Remembered)), err
		}},
		{"show a key", func(ctx context.Context) (int64, error) {
			shown, err := ops.Show(ctx, 0, sel{Key: "invoice-77"})
			return int64(len(shown.Events)), err
		}},
		{"preview a replay of what failed", func(ctx context.Context) (int64, error) {
			return done(ops.PreviewReplay(ctx, sel{States: []string{failed}}))
		}},
		{"replay one type of what failed", func(ctx context.Context) (int64, error) {
			return done(ops.Replay(ctx, sel{States: []string{failed}, Type: "t7"}, nil))
		}},
		{"replay what failed", func(ctx context.Context) (int64, error) {
			return done(ops.Replay(ctx, sel{States: []string{failed}}, nil))
		}},
		{"ignore what is pending", func(ctx context.Context) (int64, error) {
			return done(ops.Ignore(ctx, sel{States: []string{pending}}, nil))
		}},
	} {
		b.Run(command.name, func(b *testing.B) {
			pages := func() (n int64) {
				for range 2 {
					pgtest.Must(b, pool.QueryRow(b.Context(), buffers).Scan(nil, nil, &n))
				}
				return n
			}
			events, before := int64(0), pages()
			for b.Loop() {
				n, err := command.do(b.Context())
				pgtest.Must(b, err)
				events += n
			}
			b.ReportMetric(float64(b.Elapsed().Milliseconds())/float64(b.N), "ms")
			b.ReportMetric(float64(pages()-before)/float64(b.N), "pages")
			b.ReportMetric(float64(events)/float64(b.N), "events")
			b.ReportMetric(0, "ns/op")
		})
	}
}
