package relay

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// BenchmarkRestart measures how long after a restart of PostgreSQL, from its first answer on, a relay delivers again.
func BenchmarkRestart(b *testing.B) {
	rounds := 12
	if testing.Short() {
		rounds = 3
	}
	server := pgtest.Start(b, localpg.Options{})
	pgtest.Migrate(b, server.DSN(""), migrations.Outbox)
	db := &database{TB: b, dsn: server.DSN(""), pool: pgtest.Pool(b, server.DSN(""))}
	db.route()
	arrived := make(chan time.Time, rounds)
	rc := newReceiver(b, func(_ http.ResponseWriter, r request) {
		if strings.HasPrefix(r.key, "probe") && r.number == 1 {
			arrived <- time.Now()
		}
	})
	r := start(b, Config{Pool: settings(b, db.dsn), Destinations: []post.Destination{to(rc.URL)}, Name: "test"})
	r.instance()
	var took []time.Duration
	for b.Loop() {
		took = took[:0]
		for range rounds {
			before := rc.total()
			db.insert(100, time.Now().String()) // so that every connection has been used
			eventually(b, "load", func() bool { return rc.total() >= before+100 })
			ready := make(chan time.Time)
			must(b, server.StopImmediate(b.Context()))
			n := sees(r.observer, func(o *observer) int { return o.failures["session"] })
			r.await(b, "an outage that lasts", func(o *observer) bool { return o.failures["session"] >= n+6 })
			go func() { ready <- insertWhenReady(b.Context(), db.dsn) }()
			must(b, server.StartAgain(b.Context()))
			began := <-ready
			took = append(took, (<-arrived).Sub(began))
			db.pool.Reset()
		}
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Milliseconds()), "median-ms")
	b.ReportMetric(float64(took[len(took)-1].Milliseconds()), "worst-ms")
	b.ReportMetric(0, "ns/op")
}

// insertWhenReady adds an event as soon as the server takes it, and returns when it first answered.
func insertWhenReady(ctx context.Context, dsn string) (ready time.Time) {
	for ctx.Err() == nil {
		conn, err := pgx.Connect(ctx, dsn)
		if err != nil {
			continue
		}
		ready = time.Now()
		_, err = conn.Exec(ctx, `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', 'probe-' || gen_random_uuid())`)
		_ = conn.Close(ctx)
		if err == nil {
			break
		}
	}
	return ready
}
