package relay

import (
	"context"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// A refusal is a time in which a receiver takes nothing, in the middle of a steady load.
type refusal struct {
	status     int
	lasts      time.Duration
	retryAfter func(left time.Duration) int // seconds; nil: it does not say
}

// A refuser is a receiver that refuses for a while and counts what that costs.
type refuser struct {
	refusal

	mu       sync.Mutex
	begins   time.Time // of the refusal; zero: it has not begun
	first    time.Time // request that was refused
	refused  int
	late     int             // requests that were refused when those on their way at the first were long answered
	waiting  map[string]bool // keys that were refused, and not accepted since: they wait for their schedule
	accepted map[string]bool
	resumed  time.Time // the first request that was accepted afterwards
}

// onTheirWay is for how long after the first refusal requests may arrive that were sent before it was known.
const onTheirWay = 100 * time.Millisecond

func (rc *refuser) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	key := r.Header.Get(webhook.IdempotencyKey)
	now := time.Now()
	rc.mu.Lock()
	defer rc.mu.Unlock()
	left := rc.lasts - now.Sub(rc.begins)
	if rc.begins.IsZero() || left <= 0 {
		if !rc.begins.IsZero() && rc.resumed.IsZero() {
			rc.resumed = now
		}
		rc.accepted[key] = true
		delete(rc.waiting, key)
		w.WriteHeader(http.StatusNoContent)
		return
	}
	if rc.refused++; rc.refused == 1 {
		rc.first = now
	}
	if now.Sub(rc.first) > onTheirWay {
		rc.late++
	}
	rc.waiting[key] = true
	if rc.retryAfter != nil {
		w.Header().Set("Retry-After", strconv.Itoa(rc.retryAfter(left)))
	}
	w.WriteHeader(rc.status)
}

// behind returns how many of the inserted events have neither arrived nor were refused and wait for their schedule.
func (rc *refuser) behind(inserted int64) int {
	rc.mu.Lock()
	defer rc.mu.Unlock()
	return int(inserted) - len(rc.accepted) - len(rc.waiting)
}

// BenchmarkRefusal sends 1,000 events a second through two relays to a receiver that takes nothing for a while: 429 for ten
// seconds, or 500 for twenty. It reports how many requests that met, how long after its end the first was accepted, and
// how long after it nothing waited any more but what was refused itself.
func BenchmarkRefusal(b *testing.B) {
	for _, c := range []struct {
		name string
		refusal
	}{
		{"429-until-the-end", refusal{http.StatusTooManyRequests, 10 * time.Second, func(left time.Duration) int { return int(math.Ceil(left.Seconds())) }}},
		{"429-a-second", refusal{http.StatusTooManyRequests, 10 * time.Second, func(time.Duration) int { return 1 }}},
		{"500", refusal{http.StatusInternalServerError, 20 * time.Second, nil}},
	} {
		b.Run(c.name, func(b *testing.B) {
			if testing.Short() {
				c.lasts = 2 * time.Second
			}
			for b.Loop() {
				runRefusal(b, c.refusal)
			}
		})
	}
}

func runRefusal(b *testing.B, fault refusal) {
	const perSecond, batch, little = 1000, 10, 200
	db := newDatabase(b)
	rc := &refuser{refusal: fault, waiting: map[string]bool{}, accepted: map[string]bool{}}
	server := httptest.NewServer(rc)
	defer server.Close()
	ctx, cancel := context.WithCancel(b.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	for range 2 {
		r, err := New(Config{Pool: settings(b, db.dsn), Destinations: []post.Destination{{Name: "default", URL: server.URL}}})
		must(b, err)
		running.Go(func() {
			if err := r.Run(ctx); err != nil {
				b.Error(err)
			}
		})
	}
	var inserted atomic.Int64
	loaded, stop := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(loaded)
		ticker := time.NewTicker(time.Second * batch / perSecond)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 't', '{}', $1::bigint + i FROM generate_series(1, $2::bigint) i`, inserted.Load(), batch)
				inserted.Add(batch)
			case <-stop:
				return
			}
		}
	}()
	<-time.After(3 * time.Second)
	eventually(b, "a steady state", func() bool { return rc.behind(inserted.Load()) < little })
	rc.mu.Lock()
	rc.begins = time.Now()
	ends := rc.begins.Add(fault.lasts)
	rc.mu.Unlock()
	<-time.After(time.Until(ends))
	backlog := rc.behind(inserted.Load())
	eventually(b, "the end of the backlog", func() bool { return rc.behind(inserted.Load()) < little })
	gone := time.Since(ends)
	close(stop)
	<-loaded
	db.exec(`UPDATE outbox_delivery SET next_attempt_at = now() WHERE status = 'pending' AND next_attempt_at > now()`)
	becomes(db, int(inserted.Load()), `SELECT count(*)::int FROM outbox_delivery WHERE status = 'delivered'`)
	rc.mu.Lock()
	defer rc.mu.Unlock()
	b.ReportMetric(float64(rc.refused), "refused")
	b.ReportMetric(float64(rc.late), "refused-late")
	b.ReportMetric(float64(backlog), "backlog")
	b.ReportMetric(rc.resumed.Sub(ends).Seconds(), "s-to-first")
	b.ReportMetric(gone.Seconds(), "s-to-none")
	b.ReportMetric(row[float64](db, `SELECT max(attempts)::float8 FROM outbox_delivery`), "max-attempts")
	b.ReportMetric(0, "ns/op")
}
