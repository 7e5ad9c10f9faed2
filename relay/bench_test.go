package relay

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// benchEvents is how many events a benchmark drains. With -short it shows that it works, and
// measures nothing.
func benchEvents() int {
	if testing.Short() {
		return 10_000
	}
	return 100_000
}

func drain(tb testing.TB, dsn, url string, concurrency, events int) {
	pool, err := pgxpool.ParseConfig(dsn)
	relaytest.Must(tb, err)
	var settled atomic.Int64
	done := make(chan struct{})
	r, err := New(Config{
		Pool: pool, AllowSuperuser: true,
		Destinations: []post.Destination{{Name: "default", URL: url, MaxInFlight: concurrency}},
		Hooks: Hooks{Settled: func(_ string, _ policy.Outcome, _ policy.Reason, n int) {
			if settled.Add(int64(n)) == int64(events) {
				close(done)
			}
		}},
	})
	relaytest.Must(tb, err)
	ctx, cancel := context.WithCancel(tb.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := r.Run(ctx); err != nil {
			tb.Error(err)
		}
	})
	<-done
	cancel()
	running.Wait()
}

// BenchmarkOrdered measures, against one receiver, how fast the relay drains pre-inserted events of
// 300 bytes when each has one of 10,000 ordering keys, and when none has any; ratio is the first
// over the second. deep is the same for 200 keys. One iteration is one round of all three.
func BenchmarkOrdered(b *testing.B) {
	const concurrency, many, few = 64, 10_000, 200
	events := benchEvents()
	var received atomic.Int64
	url := countingReceiver(b, &received)
	payload := `{"pad":"` + strings.Repeat("x", 290) + `"}`

	rate := func(keys int) float64 {
		dsn := pgtest.New(b, migrations.Outbox)
		insertOrderedEvents(b, dsn, events, keys, payload)
		received.Store(0)
		start := time.Now()
		drain(b, dsn, url, concurrency, events)
		took := time.Since(start)
		if n := int(received.Load()); n != events {
			b.Fatalf("the receiver saw %d requests, want %d", n, events)
		}
		return float64(events) / took.Seconds()
	}
	var ordered, unordered, deep float64
	for b.Loop() {
		unordered += rate(0)
		ordered += rate(many)
		deep += rate(few)
	}
	b.ReportMetric(unordered/float64(b.N), "unordered/s")
	b.ReportMetric(ordered/float64(b.N), "ordered/s")
	b.ReportMetric(deep/float64(b.N), "deep/s")
	b.ReportMetric(ordered/unordered, "ratio")
	b.ReportMetric(deep/unordered, "deep-ratio")
	b.ReportMetric(0, "ns/op")
}

// countingReceiver returns the URL of a receiver that takes everything and counts it.
func countingReceiver(tb testing.TB, received *atomic.Int64) (url string) {
	tb.Helper()
	receiver := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		received.Add(1)
		w.WriteHeader(http.StatusNoContent)
	})}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	relaytest.Must(tb, err)
	go func() { _ = receiver.Serve(listener) }()
	tb.Cleanup(func() { _ = receiver.Close() })
	return "http://" + listener.Addr().String() + "/"
}

// insertOrderedEvents inserts n events whose ordering keys take turns; with no keys they have none.
func insertOrderedEvents(tb testing.TB, dsn string, n, keys int, payload string) {
	tb.Helper()
	pool := pgtest.Pool(tb, dsn)
	for _, statement := range []struct {
		sql  string
		args []any
	}{
		{`INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'default')`, nil},
		{`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key)
			SELECT 'invoice.created', $1::json, 'key-' || i, 'customer-' || i % nullif($3, 0) FROM generate_series(1, $2) i`, []any{payload, n, keys}},
		{`VACUUM ANALYZE`, nil},
	} {
		_, err := pool.Exec(tb.Context(), statement.sql, statement.args...)
		relaytest.Must(tb, err)
	}
}
