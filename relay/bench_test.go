package relay

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"strconv"
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
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// benchEvents is how many events a benchmark drains. With -short it shows that it works, and measures nothing.
func benchEvents() int {
	if testing.Short() {
		return 10_000
	}
	return 100_000
}

// BenchmarkDrain measures, against one receiver, how fast the relay drains pre-inserted events of 300 bytes, and how
// fast a bare net/http client with the same concurrency and no database makes the same POSTs, headers and all; ratio is
// the first over the second. One iteration is one round of both.
func BenchmarkDrain(b *testing.B) {
	const concurrency = 64
	events := benchEvents()
	var received atomic.Int64
	url := countingReceiver(b, &received)
	payload := `{"pad":"` + strings.Repeat("x", 290) + `"}`

	var relayed, bare float64
	for b.Loop() {
		dsn := pgtest.New(b, migrations.Outbox)
		insertOrderedEvents(b, dsn, events, 0, payload)
		received.Store(0)
		start := time.Now()
		drain(b, dsn, url, concurrency, events)
		relayed += float64(events) / time.Since(start).Seconds()
		if n := int(received.Load()); n != events {
			b.Fatalf("the receiver saw %d requests, want %d", n, events)
		}

		start = time.Now()
		postAll(b, url, concurrency, events, payload)
		bare += float64(events) / time.Since(start).Seconds()
	}
	b.ReportMetric(relayed/float64(b.N), "relay/s")
	b.ReportMetric(bare/float64(b.N), "bare/s")
	b.ReportMetric(relayed/bare, "ratio")
	b.ReportMetric(0, "ns/op")
}

func drain(tb testing.TB, dsn, url string, concurrency, events int) {
	pool, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		tb.Fatal(err)
	}
	var settled atomic.Int64
	done := make(chan struct{})
	r, err := New(Config{
		Pool:         pool,
		Destinations: []post.Destination{{Name: "default", URL: url, MaxInFlight: concurrency}},
		Hooks: Hooks{Settled: func(_ string, _ policy.Outcome, _ policy.Reason, n int) {
			if settled.Add(int64(n)) == int64(events) {
				close(done)
			}
		}},
	})
	if err != nil {
		tb.Fatal(err)
	}
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

func postAll(tb testing.TB, url string, concurrency, n int, payload string) {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: concurrency}}
	defer client.CloseIdleConnections()
	var next atomic.Int64
	var workers sync.WaitGroup
	for range concurrency {
		workers.Go(func() {
			for i := next.Add(1); i <= int64(n); i = next.Add(1) {
				req, err := http.NewRequest(http.MethodPost, url, bytes.NewReader([]byte(payload)))
				if err != nil {
					tb.Error(err)
					return
				}
				for name, value := range map[string]string{
					"Content-Type": "application/json", "User-Agent": "bare",
					webhook.IdempotencyKey: "key-" + strconv.FormatInt(i, 10), webhook.EventType: "invoice.created",
					webhook.EventVersion: "1", webhook.EventID: strconv.FormatInt(i, 10), webhook.Attempt: "1",
					webhook.CreatedAt:  "2026-01-01T00:00:00.000000Z",
					webhook.NotAfter:   "2026-02-01T00:00:00.000000Z",
					webhook.DeliveryID: strconv.FormatInt(i, 10) + "-default-1",
					webhook.ID:         "evt_00000000000000000000000000000000", webhook.Timestamp: "1767225600",
				} {
					req.Header.Set(name, value)
				}
				resp, err := client.Do(req)
				if err != nil {
					tb.Error(err)
					return
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
			}
		})
	}
	workers.Wait()
}

// BenchmarkOrdered measures, against one receiver, how fast the relay drains as many events as in BenchmarkDrain when
// each has one of 10,000 ordering keys, and when none has any; ratio is the first over the second. deep is the same for
// 200 keys. One iteration is one round of all three.
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
