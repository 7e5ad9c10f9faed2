package natstest

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/relay"
)

// A deadCluster is a cluster of NATS that stores nothing.
type deadCluster struct {
	name string
	// start returns its address, and what makes it dead if it is alive at first.
	start func(t testing.TB) (address string, kill func())
}

var deadClusters = []deadCluster{
	{"killed", func(t testing.TB) (string, func()) {
		s := startServer(t)
		_, js := admin(t, s)
		addStream(t, js)
		return addressOf(s), func() {
			s.Shutdown()
			s.WaitForShutdown()
		}
	}},
	// One server of three that are never all there takes connections, and its streams have no
	// leader.
	{"leaderless", func(t testing.TB) (string, func()) {
		s := startServer(t, func(o *server.Options) {
			o.ServerName, o.Cluster.Name, o.Cluster.Host, o.Cluster.Port = "a", "c", "127.0.0.1", -1
			o.Routes = []*url.URL{{Scheme: "nats", Host: testkit.NewVacant(t).Address}, {Scheme: "nats", Host: testkit.NewVacant(t).Address}}
		})
		return addressOf(s), func() {}
	}},
}

// twoRoutes send events of type "live" to a destination of that name, and those of type "paid" to
// "audit".
var twoRoutes = []relay.Route{{Event: "live", To: []string{"live"}}, {Event: "paid", To: []string{"audit"}}}

// twoLanes returns an outbox with these routes.
func twoLanes(t testing.TB) *relaytest.Database {
	t.Helper()
	db := relaytest.Covered(t)
	db.Exec(`DELETE FROM outbox_route`)
	db.Exec(`INSERT INTO outbox_route (pattern, destination) VALUES ('live', 'live'), ('paid', 'audit')`)
	return db
}

const insertSeries = `INSERT INTO outbox (event_type, payload, idempotency_key) SELECT $1, '{}', $2 || i FROM generate_series(1, $3) i`

// insertTyped adds n events of a type.
func insertTyped(db *relaytest.Database, eventType, prefix string, n int) {
	db.Helper()
	db.Exec(insertSeries, eventType, prefix, n)
}

// A dead cluster gets probes and nothing else: no claims, no attempts, and no part of what the
// relay sends at once.
func TestDeadClusterTakesNothing(t *testing.T) {
	t.Parallel()
	const capacity, due, rounds = 8, 500, 3
	const others = capacity - 1 // a probe is a request, too
	const classes = 2           // live and backlog: a claim for a probe may bring one of each, and one is given back
	for _, dead := range deadClusters {
		t.Run(dead.name, func(t *testing.T) {
			t.Parallel()
			address, kill := dead.start(t)
			receiver := newMeeting(others)
			live := httptest.NewServer(receiver)
			t.Cleanup(live.Close)
			db := twoLanes(t)
			var claims tally
			d := settingsOf("nats://"+address, func(d *relay.Destination) {
				d.Timeout, d.MaxInFlight = 2*time.Second, capacity
				d.Breaker.ProbeAfter, d.Breaker.ProbeMax = 50*time.Millisecond, 100*time.Millisecond
			})
			stop := startRelay(t, db, relay.Config{
				PollInterval: time.Second, Routes: twoRoutes, MaxInFlight: capacity, Hooks: relay.Hooks{Claimed: claims.add},
				Destinations: []relay.Destination{{Name: "live", URL: live.URL, MaxInFlight: capacity}, d},
			})
			t.Cleanup(stop)
			kill()
			insertTyped(db, "paid", "paid-", due)
			relaytest.Becomes(db, "open", `SELECT coalesce((SELECT breaker FROM outbox_destination WHERE destination = 'audit'), '')`)
			// What was claimed before the relay knew is given back first.
			relaytest.Becomes(db, true, `SELECT count(*) <= 1 FROM outbox_delivery WHERE destination = 'audit' AND lease_expires_at > now()`)
			claims.forget()
			spent := relaytest.Row[int](db, `SELECT sum(attempts)::int FROM outbox_delivery WHERE destination = 'audit'`)
			for i := range rounds {
				insertTyped(db, "live", fmt.Sprintf("live-%d-", i), others)
				receiver.await(t) // until all of them are there at once
			}
			probed := len(claims.of("audit"))
			testkit.Eventually(t, "a probe", func() bool { return len(claims.of("audit")) > probed })
			for _, n := range claims.of("audit") {
				if n > classes {
					t.Errorf("a claim brought %d deliveries for a dead cluster", n)
				}
			}
			relaytest.Becomes(db, others*rounds, `SELECT count(*)::int FROM outbox_delivery WHERE destination = 'live' AND status = 'delivered' AND attempts = 1`)
			if now := relaytest.Row[int](db, `SELECT sum(attempts)::int FROM outbox_delivery WHERE destination = 'audit'`); now != spent || now > policy.DefaultBreakerFailures+capacity {
				t.Errorf("%d attempts were spent on a dead cluster, and %d when it was known", now, spent)
			}
		})
	}
}

// A tally counts what claims bring.
type tally struct {
	mu sync.Mutex
	by map[string][]int
}

func (c *tally) add(destination string, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.by == nil {
		c.by = map[string][]int{}
	}
	c.by[destination] = append(c.by[destination], n)
}

func (c *tally) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.by = nil
}

func (c *tally) of(destination string) []int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.by[destination])
}

// A meeting answers requests when so many are there at once.
type meeting struct {
	of int

	mu   sync.Mutex
	here int
	full chan struct{} // closed when they are
	met  chan struct{}
}

func newMeeting(of int) *meeting {
	return &meeting{of: of, full: make(chan struct{}), met: make(chan struct{}, 100)}
}

func (m *meeting) ServeHTTP(_ http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	m.mu.Lock()
	full := m.full
	if m.here++; m.here == m.of {
		close(full)
		m.here, m.full = 0, make(chan struct{})
		m.met <- struct{}{}
	}
	m.mu.Unlock()
	select {
	case <-full:
	case <-r.Context().Done():
	}
}

// await waits for a meeting.
func (m *meeting) await(t testing.TB) {
	t.Helper()
	select {
	case <-m.met:
	case <-time.After(patience):
		m.mu.Lock()
		defer m.mu.Unlock()
		t.Fatalf("only %d of %d requests are sent at once", m.here, m.of)
	}
}
