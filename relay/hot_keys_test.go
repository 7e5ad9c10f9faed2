package relay

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// BenchmarkHotKeys drains events over two ordering keys beside a lane without keys that gets a steady trickle: while vacuum is
// blocked, and behind failed deliveries that the destination skips. It reports the throughput of the last tenth as a share of
// that of the first, and the 99th percentile of the trickle's latency, alone and beside the drain. 100,000 events with -full.
func BenchmarkHotKeys(b *testing.B) {
	events, failed := 20_000, 2_000
	switch {
	case *full:
		events, failed = 100_000, 10_000
	case testing.Short():
		events, failed = 2_000, 200
	}
	for _, c := range []struct {
		name    string
		failed  int
		blocked bool
	}{{"VacuumBlocked", 0, true}, {"FailedAndSkipped", failed, false}, {"Neither", 0, false}} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				drainHotKeys(b, events, c.failed, c.blocked)
			}
		})
	}
}

func drainHotKeys(b *testing.B, events, failed int, blocked bool) {
	db := newDatabase(b, "hot")
	db.exec(`DELETE FROM outbox_route; INSERT INTO outbox_route (pattern, destination) VALUES ('t', 'hot'), ('to.1', 'beside')`)
	if blocked {
		blocker, err := pgx.Connect(b.Context(), db.dsn)
		must(b, err)
		defer func() { _ = blocker.Close(context.WithoutCancel(b.Context())) }()
		_, err = blocker.Exec(b.Context(), `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outbox`)
		must(b, err)
	}
	insert := func(n int, prefix string) {
		db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', $2 || i, 'key-' || i % 2 FROM generate_series(1, $1) i`, n, prefix)
	}
	insert(failed, "failed-")
	db.exec(`UPDATE outbox_delivery SET status = 'failed'`)

	var mu sync.Mutex
	var latencies []time.Duration
	received, tenths, done := 0, []time.Time{}, make(chan struct{})
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.WriteHeader(http.StatusNoContent)
		created, err := time.Parse(time.RFC3339Nano, r.Header.Get(webhook.CreatedAt))
		must(b, err)
		mu.Lock()
		defer mu.Unlock()
		if r.Header.Get(webhook.EventType) != "t" {
			latencies = append(latencies, time.Since(created))
			return
		}
		if received++; received == 1 || received*10%events == 0 {
			tenths = append(tenths, time.Now())
		}
		if received == events {
			close(done)
		}
	}))
	defer receiver.Close()
	cfg := db.config(post.Destination{Name: "hot", URL: receiver.URL, OnFailure: policy.SkipFailed}, post.Destination{Name: "beside", URL: receiver.URL})
	cfg.Routes = []Route{{Event: "t", To: []string{"hot"}}, {Event: "to.1", To: []string{"beside"}}}
	r := start(b, cfg)
	r.instance()
	trickle := func(lasts time.Duration) time.Duration {
		mu.Lock()
		latencies = nil
		mu.Unlock()
		return percentile(db.trickle(stage{destinations: 1, every: 10 * time.Millisecond, lasts: lasts}, func() []time.Duration {
			mu.Lock()
			defer mu.Unlock()
			return slices.Clone(latencies)
		}), 0.99)
	}
	window := 5 * time.Second
	if testing.Short() {
		window = time.Second
	}
	trickle(time.Second) // connections are made
	alone := trickle(window)
	insert(events, "due-")
	beside := trickle(window)
	<-done
	first, last := tenths[1].Sub(tenths[0]), tenths[10].Sub(tenths[9])
	b.ReportMetric(float64(events)/tenths[10].Sub(tenths[0]).Seconds(), "events/s")
	b.ReportMetric(first.Seconds()/last.Seconds(), "last/first")
	b.ReportMetric(float64(alone.Microseconds())/1000, "p99-ms-alone")
	b.ReportMetric(float64(beside.Microseconds())/1000, "p99-ms-beside")
	b.ReportMetric(0, "ns/op")
}
