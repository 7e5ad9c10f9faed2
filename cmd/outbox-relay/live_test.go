package main

import (
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/measure"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// live is a receiver of events that are committed at a constant rate, beside what a benchmark
// measures. It notes how long each took from its transaction to the receiver's answer.
type live struct {
	http.HandlerFunc // answers

	mu       sync.Mutex // guards the fields below
	took     []float64  // milliseconds, since the last call of during
	requests map[string]int
}

const insertLive = `INSERT INTO outbox (event_type, payload, idempotency_key)
	SELECT 'invoice.issued', json_build_object('invoice', i, 'pad', repeat('x', 250)), 'live-' || i FROM generate_series($1::int, $2::int) i`

func (l *live) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	created, _ := time.Parse(time.RFC3339Nano, r.Header.Get("X-Outbox-Created-At"))
	l.HandlerFunc(w, r)
	took := time.Since(created)
	key := r.Header.Get("X-Idempotency-Key")
	if !strings.HasPrefix(key, "live-") {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.requests == nil {
		l.requests = map[string]int{}
	}
	l.requests[key]++
	l.took = append(l.took, float64(took.Microseconds())/1000)
}

// commit inserts that many events every 10 ms, and makes up for those it is late with. The returned
// function ends it, and returns how many were committed.
func (l *live) commit(b *testing.B, db *relaytest.Database, each int) (end func() (committed int)) {
	b.Helper()
	ended := make(chan struct{})
	var committing sync.WaitGroup
	sent := 0
	committing.Go(func() {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for began := time.Now(); ; {
			select {
			case <-ended:
				return
			case <-tick.C:
			}
			for sent < each*int(time.Since(began)/(10*time.Millisecond)) {
				if _, err := db.Pool.Exec(b.Context(), insertLive, sent, sent+each-1); err != nil {
					b.Error(err)
					return
				}
				sent += each
			}
		}
	})
	return func() int {
		close(ended)
		committing.Wait()
		return sent
	}
}

// during returns how many milliseconds the events took that came while f ran, sorted.
func (l *live) during(f func()) (took []float64) {
	l.flush()
	f()
	return l.flush()
}

func (l *live) flush() (took []float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	took, l.took = l.took, nil
	slices.Sort(took)
	return took
}

func p99(sorted []float64) float64 { return measure.Quantile(sorted, 0.99) }

// reportLive reports the p99 of live events before, during and after what is measured, and during
// it as a multiple of the mean of both others.
func reportLive(b *testing.B, before, during, after []float64) {
	b.Helper()
	b.ReportMetric(p99(before), "ms-p99-before")
	b.ReportMetric(p99(during), "ms-p99-during")
	b.ReportMetric(p99(after), "ms-p99-after")
	b.ReportMetric(2*p99(during)/(p99(before)+p99(after)), "x-p99")
	b.ReportMetric(0, "ns/op")
}
