package natstest

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/relay"
)

// BenchmarkDeadCluster compares how long live events take to a receiver over HTTP, alone and beside
// a dead cluster with 20,000 due events. Both take turns, each with its own relay, because a
// busy machine makes each of them slower by more than the other.
func BenchmarkDeadCluster(b *testing.B) {
	for _, dead := range deadClusters {
		b.Run(dead.name, func(b *testing.B) {
			const due, turns = 20_000, 8
			address, kill := dead.start(b)
			alone, beside := newLiveLane(b, address), newLiveLane(b, address)
			kill()
			beside.insertApart("paid", "paid-", due)
			var without, with []time.Duration
			for range b.N * turns {
				without = append(without, alone.run(b, "")...)
				with = append(with, beside.run(b, "open")...)
			}
			slices.Sort(without)
			slices.Sort(with)
			for _, q := range []float64{0.5, 0.99} {
				one, other := quantile(without, q), quantile(with, q)
				b.ReportMetric(float64(one.Microseconds())/1000, fmt.Sprintf("p%.0f-ms-without", 100*q))
				b.ReportMetric(float64(other.Microseconds())/1000, fmt.Sprintf("p%.0f-ms-with", 100*q))
				b.ReportMetric(float64(other)/float64(one), fmt.Sprintf("p%.0f-ratio", 100*q))
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

func quantile(sorted []time.Duration, q float64) time.Duration {
	return sorted[int(q*float64(len(sorted)-1))]
}

// A liveLane is an outbox with a destination that lives and one of a cluster.
type liveLane struct {
	db        *relaytest.Database
	cluster   relay.Destination
	receiver  *httptest.Server
	arrived   chan arrival
	committed []time.Time // of all events, by their number
}

type arrival struct {
	number int
	at     time.Time
}

func newLiveLane(b *testing.B, cluster string) *liveLane {
	b.Helper()
	l := &liveLane{db: twoLanes(b), arrived: make(chan arrival, 10_000), cluster: settingsOf("nats://" + cluster)}
	l.receiver = httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if n, err := strconv.Atoi(strings.TrimPrefix(r.Header.Get("X-Idempotency-Key"), "live-")); err == nil {
			l.arrived <- arrival{n, time.Now()}
		}
	}))
	b.Cleanup(l.receiver.Close)
	return l
}

// insertApart adds n events in its own session. The session whose first statement inserts many
// keeps a plan for many, which PostgreSQL compiles (jit) for each single event after that, for 8
// ms: the live events must come from another one.
func (l *liveLane) insertApart(eventType, prefix string, n int) {
	l.db.Helper()
	conn, err := pgx.Connect(l.db.Context(), l.db.DSN)
	pgtest.Must(l.db, err)
	pgtest.Exec(l.db, conn, insertSeries, eventType, prefix, n)
	pgtest.Must(l.db, conn.Close(l.db.Context()))
}

// run runs a relay, and returns how long each of some hundred events took from its commit to the
// receiver. Before them the breaker of the cluster is in the given state, if that is not empty.
func (l *liveLane) run(b *testing.B, breaker string) (took []time.Duration) {
	b.Helper()
	const events, unmeasured, every = 400, 50, 5 * time.Millisecond
	stop := startRelay(b, l.db, relay.Config{Routes: twoRoutes, Destinations: []relay.Destination{{Name: "live", URL: l.receiver.URL}, l.cluster}})
	defer stop()
	if breaker != "" {
		relaytest.Becomes(l.db, breaker, `SELECT coalesce((SELECT breaker FROM outbox_destination WHERE destination = 'audit'), '')`)
	}
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	first := len(l.committed)
	for range events {
		<-ticker.C
		l.db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('live', '{}', $1)`, fmt.Sprint("live-", len(l.committed)))
		l.committed = append(l.committed, time.Now())
	}
	for range events {
		if a := <-l.arrived; a.number >= first+unmeasured {
			took = append(took, max(0, a.at.Sub(l.committed[a.number])))
		}
	}
	return took
}
