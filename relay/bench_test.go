package relay

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
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
