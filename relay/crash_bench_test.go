package relay

import (
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// BenchmarkDatabaseCrashes delivers 1,000 events a second of 500 ordering keys by two relays, stops PostgreSQL immediately
// five times, five seconds apart (once with -short), and reports the longest wait from an event's commit to its first
// request, how many events waited for more than ten seconds, how many requests were duplicates, for each crash and 1,000
// events, and the mean time from the server's readiness to the next first request.
func BenchmarkDatabaseCrashes(b *testing.B) {
	crashes, apart := 5, 5*time.Second
	if testing.Short() {
		crashes, apart = 1, time.Second
	}
	var total crashFigures
	for b.Loop() {
		f := crashUnderLoad(b, crashes, apart)
		total.longest = max(total.longest, f.longest)
		total.late += f.late
		total.duplicates += f.duplicates
		total.events += f.events
		total.resumed += f.resumed
	}
	b.ReportMetric(total.longest.Seconds(), "longest-s")
	b.ReportMetric(float64(total.late)/float64(b.N), "late")
	b.ReportMetric(float64(total.duplicates)/float64(crashes)/float64(total.events)*1000, "duplicates")
	b.ReportMetric(total.resumed.Seconds()/float64(b.N*crashes), "resumed-s")
	b.ReportMetric(0, "ns/op")
}

type crashFigures struct {
	events, late, duplicates int
	longest, resumed         time.Duration
}

// arrivals are the times at which events were committed and first requested, by key.
type arrivals struct {
	mu         sync.Mutex
	committed  map[string]time.Time
	first      map[string]time.Time
	newest     time.Time
	duplicates int
}

func (a *arrivals) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	key := r.Header.Get(webhook.IdempotencyKey)
	if _, seen := a.first[key]; seen {
		a.duplicates++
	} else {
		a.newest = time.Now()
		a.first[key] = a.newest
	}
	w.WriteHeader(http.StatusNoContent)
}

func (a *arrivals) since(at time.Time) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.newest.After(at)
}

func crashUnderLoad(b *testing.B, crashes int, apart time.Duration) (f crashFigures) {
	server := pgtest.Start(b, localpg.Options{Durable: true})
	pgtest.Migrate(b, server.DSN(""), migrations.Outbox)
	db := &database{TB: b, dsn: server.DSN(""), pool: pgtest.Pool(b, server.DSN(""))}
	db.route()
	seen := &arrivals{committed: map[string]time.Time{}, first: map[string]time.Time{}}
	receiver := httptest.NewServer(seen)
	defer receiver.Close()
	relays := []*running{start(b, db.config(to(receiver.URL))), start(b, db.config(to(receiver.URL)))}
	stop := make(chan struct{})
	var producing sync.WaitGroup
	producing.Go(func() { seen.produce(b, db, stop) })

	for range crashes {
		<-time.After(apart)
		must(b, server.StopImmediate(b.Context()))
		must(b, server.StartAgain(b.Context()))
		ready := time.Now()
		eventually(b, "a delivery", func() bool { return seen.since(ready) })
		f.resumed += time.Since(ready)
	}
	<-time.After(apart)
	close(stop)
	producing.Wait()
	pending := 1
	for wait := time.After(2 * time.Minute); pending > 0; { // a lease is a minute
		select {
		case <-wait:
			b.Fatalf("%d deliveries are pending", pending)
		case <-time.After(100 * time.Millisecond):
			pending = row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending'`)
		}
	}
	for _, r := range relays {
		r.stop()
	}
	for key, at := range seen.committed {
		first, sent := seen.first[key]
		if !sent {
			b.Fatalf("%s was never sent", key)
		}
		f.longest = max(f.longest, first.Sub(at))
		if first.Sub(at) > 10*time.Second {
			f.late++
		}
	}
	f.events, f.duplicates = len(seen.committed), seen.duplicates
	return f
}

// produce inserts 1,000 events a second until stop is closed; while the server is away it tries again.
func (a *arrivals) produce(b *testing.B, db *database, stop <-chan struct{}) {
	const together = 20
	ticker := time.NewTicker(together * time.Millisecond)
	defer ticker.Stop()
	for n := 0; ; {
		select {
		case <-stop:
			return
		case <-ticker.C:
		}
		result, err := db.pool.Query(b.Context(), `INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key)
			SELECT 't', '{"n": 1}', 'key-' || i, 'k' || i % 500 FROM generate_series($1::int, $2) i RETURNING idempotency_key`, n, n+together-1)
		if err != nil {
			continue
		}
		var keys []string
		for result.Next() {
			var key string
			_ = result.Scan(&key)
			keys = append(keys, key)
		}
		n += together // also when the commit is unknown: the next keys are others
		if result.Err() != nil {
			continue
		}
		a.mu.Lock()
		for _, key := range keys {
			a.committed[key] = time.Now()
		}
		a.mu.Unlock()
	}
}
