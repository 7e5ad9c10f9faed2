package relay

import (
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// full makes scenarios as large as the README's numbers; otherwise they are small enough for every run of the tests.
var full = flag.Bool("full", false, "run scenarios at full size")

// A stage is a dead destination beside living ones that get a steady trickle.
type stage struct {
	destinations int           // living ones
	due          int           // deliveries that wait for the dead one
	every        time.Duration // between two events of each living destination
	lasts        time.Duration
}

// A census counts what a recovering receiver has in flight, and what slow start would allow.
type census struct {
	mu       sync.Mutex
	inFlight int
	answered int
	most     int
	excess   int // requests beyond what slow start allows
}

// allowed is how many a slow start has in flight at most after so many answers: a power of two.
func allowed(answered int) int {
	n := 1
	for answered >= 2*n-1 {
		n *= 2
	}
	return n
}

func (c *census) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	c.mu.Lock()
	c.inFlight++
	c.most = max(c.most, c.inFlight)
	if c.inFlight > allowed(c.answered) {
		c.excess++
	}
	c.mu.Unlock()
	<-time.After(time.Millisecond) // so that what is in flight at once is seen at once
	c.mu.Lock()                    // what the relay may come to know of is counted before it can
	c.inFlight--
	c.answered++
	c.mu.Unlock()
	w.WriteHeader(http.StatusNoContent)
}

// trickle sends events to the living destinations for a while and returns how long each took from its insert to its
// receiver, sorted.
func (db *database) trickle(s stage, latencies func() []time.Duration) []time.Duration {
	db.Helper()
	ticker := time.NewTicker(s.every)
	defer ticker.Stop()
	rounds := int(s.lasts / s.every)
	for range rounds {
		<-ticker.C
		db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key)
			SELECT 'to.' || i, '{}', gen_random_uuid()::text FROM generate_series(1, $1) i`, s.destinations)
	}
	var got []time.Duration
	eventually(db, "all of the trickle", func() bool {
		got = latencies()
		return len(got) >= rounds*s.destinations
	})
	slices.Sort(got)
	return got
}

func percentile(sorted []time.Duration, p float64) time.Duration {
	return sorted[min(len(sorted)-1, int(p*float64(len(sorted))))]
}

// deadDestination runs a stage without and with the dead destination, revives it, and returns the 99th percentile of the
// living ones' latencies of both.
func deadDestination(tb testing.TB, s stage) (without, with time.Duration) {
	db := newDatabase(tb, "nowhere")
	db.exec(`DELETE FROM outbox_route`)
	var mu sync.Mutex
	var latencies []time.Duration
	living := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		created, err := time.Parse(time.RFC3339Nano, r.Header.Get(webhook.CreatedAt))
		if err != nil {
			tb.Error(err)
		}
		mu.Lock()
		latencies = append(latencies, time.Since(created))
		mu.Unlock()
		w.WriteHeader(http.StatusNoContent)
	}))
	defer living.Close()
	take := func() []time.Duration {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(latencies)
	}
	forget := func() {
		mu.Lock()
		defer mu.Unlock()
		latencies = nil
	}

	dead := newVacant(tb)
	var cfg Config
	for i := 1; i <= s.destinations; i++ {
		name := fmt.Sprintf("d%d", i)
		cfg.Destinations = append(cfg.Destinations, post.Destination{Name: name, URL: living.URL})
		cfg.Routes = append(cfg.Routes, Route{Event: fmt.Sprintf("to.%d", i), To: []string{name}})
	}
	cfg.Destinations = append(cfg.Destinations, post.Destination{Name: "dead", URL: dead.url, Breaker: policy.BreakerPolicy{ProbeMax: 2 * time.Second}})
	cfg.Routes = append(cfg.Routes, Route{Event: "dead", To: []string{"dead"}})
	ops := &pager{name: "ops"}
	cfg.Pool, cfg.Name, cfg.Alerts = settings(tb, db.dsn), "test", alert.Config{Channels: []alert.Channel{ops}, Window: 5 * time.Second}
	r := start(tb, cfg)
	r.instance()
	db.trickle(stage{destinations: s.destinations, every: s.every, lasts: 10 * s.every}, take) // connections are made
	forget()
	without = percentile(db.trickle(s, take), 0.99)

	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 'dead', '{}', 'dead-' || i FROM generate_series(1, $1) i`, s.due)
	becomes(db, "open", `SELECT coalesce((SELECT breaker FROM outbox_destination WHERE destination = 'dead'), '')`)
	forget()
	with = percentile(db.trickle(s, take), 0.99)

	if n := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE destination = 'dead' AND attempts > 0`); n > policy.DefaultBreakerFailures {
		tb.Errorf("%d held deliveries have spent attempts", n)
	}
	if n := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE destination = 'dead' AND status <> 'pending'`); n != 0 {
		tb.Errorf("%d of the dead destination's deliveries are not pending", n)
	}
	ops.await(tb, alert.RuleBreakerOpen, "firing")

	recovered := &census{}
	dead.open(tb, recovered)
	becomes(db, s.due-row[int](db, `SELECT count(*) FROM outbox_delivery WHERE destination = 'dead' AND attempts > 0`),
		`SELECT count(*)::int FROM outbox_delivery WHERE destination = 'dead' AND status = 'delivered' AND attempts = 1`)
	ops.await(tb, alert.RuleBreakerOpen, "resolved")
	if states := ops.states(alert.RuleBreakerOpen); !slices.Equal(states, []string{"firing", "resolved"}) {
		tb.Errorf("told %q", states)
	}
	recovered.mu.Lock()
	defer recovered.mu.Unlock()
	if recovered.excess != 0 {
		tb.Errorf("%d requests beyond slow start", recovered.excess)
	}
	tb.Logf("%d living destinations: p99 %s without and %s with %d deliveries that wait for a dead one; in flight on its recovery at most %d",
		s.destinations, without, with, s.due, recovered.most)
	return without, with
}

// A destination that is down costs the others nothing and its own deliveries no attempts, is told once, and recovers
// slowly.
func TestDeadDestination(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	deadDestination(t, stage{destinations: 5, due: 2000, every: 20 * time.Millisecond, lasts: time.Second})
}

// BenchmarkDeadDestination reports the 99th percentile of the living destinations' latency beside a dead one, as a ratio
// to that without.
func BenchmarkDeadDestination(b *testing.B) {
	s := stage{destinations: 10, due: 5000, every: 50 * time.Millisecond, lasts: 2 * time.Second}
	if *full {
		s = stage{destinations: 49, due: 200_000, every: 100 * time.Millisecond, lasts: 20 * time.Second}
	}
	var without, with time.Duration
	for b.Loop() {
		one, other := deadDestination(b, s)
		without, with = without+one, with+other
	}
	b.ReportMetric(float64(without.Microseconds())/1000/float64(b.N), "p99-ms-without")
	b.ReportMetric(float64(with.Microseconds())/1000/float64(b.N), "p99-ms-with")
	b.ReportMetric(float64(with)/float64(without), "ratio")
	b.ReportMetric(0, "ns/op")
}
