package relay

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// latencyTime is how long a rate of BenchmarkLatency lasts. With -short it shows that it works, and measures nothing.
func latencyTime() time.Duration {
	if testing.Short() {
		return time.Second
	}
	return 10 * time.Second
}

// BenchmarkLatency measures the time from the commit of an event to its arrival at the receiver, when events come at a steady
// rate, each in a transaction of its own. The load is open: an event is inserted when its time has come, however late those before
// it are. server-ms/s is the processor time of PostgreSQL, inserts included.
func BenchmarkLatency(b *testing.B) {
	for _, perSecond := range []int{1, 20, 200, 1000, 4000} {
		b.Run(strconv.Itoa(perSecond), func(b *testing.B) {
			var latencies []time.Duration
			var used, took time.Duration
			for b.Loop() {
				l := runLatency(b, perSecond, latencyTime())
				latencies = append(latencies, l.latencies...)
				used, took = used+l.used, took+l.took
			}
			slices.Sort(latencies)
			quantile := func(q float64) float64 {
				return float64(latencies[int(q*float64(len(latencies)-1))].Microseconds()) / 1000
			}
			b.ReportMetric(quantile(0.5), "p50-ms")
			b.ReportMetric(quantile(0.99), "p99-ms")
			b.ReportMetric(used.Seconds()*1000/took.Seconds(), "server-ms/s")
			b.ReportMetric(0, "ns/op")
		})
	}
}

type latencyRun struct {
	latencies  []time.Duration
	used, took time.Duration
}

func runLatency(b *testing.B, perSecond int, duration time.Duration) (l latencyRun) {
	server := pgtest.Start(b, localpg.Options{Durable: true})
	dsn := server.DSN("postgres")
	pgtest.Migrate(b, dsn, migrations.Outbox)
	db := &database{TB: b, pool: pgtest.Pool(b, dsn), dsn: dsn}

	events := perSecond * int(duration/time.Second)
	arrived := make([]time.Time, events)
	var all sync.WaitGroup
	all.Add(events)
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, _ := strconv.Atoi(r.Header.Get(webhook.IdempotencyKey))
		arrived[n] = time.Now()
		w.WriteHeader(http.StatusNoContent)
		all.Done()
	}))
	b.Cleanup(receiver.Close)
	r := start(b, db.config(post.Destination{Name: "default", URL: receiver.URL}))
	eventually(b, "a relay that is idle", func() bool { return row[bool](db, armed) })

	committed := make([]time.Time, events)
	insert := `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('invoice.created', '{"pad": "` + strings.Repeat("x", 290) + `"}', $1)`
	producers, err := pgxpool.New(b.Context(), dsn+"&pool_max_conns=8")
	if err != nil {
		b.Fatal(err)
	}
	defer producers.Close()
	usedBefore, begun := processorTime(db), time.Now()
	due := make(chan int, events)
	var inserting sync.WaitGroup
	for range 8 {
		inserting.Go(func() {
			for n := range due {
				if _, err := producers.Exec(b.Context(), insert, strconv.Itoa(n)); err != nil {
					b.Error(err)
				}
				committed[n] = time.Now()
			}
		})
	}
	for n := range events {
		<-time.After(time.Until(begun.Add(time.Duration(n) * time.Second / time.Duration(perSecond))))
		due <- n
	}
	close(due)
	inserting.Wait()
	all.Wait()
	l.took, l.used = time.Since(begun), processorTime(db)-usedBefore
	r.stop()
	for n := range events {
		l.latencies = append(l.latencies, max(0, arrived[n].Sub(committed[n])))
	}
	return l
}

// processorTime is what the server has used of the processors so far, by Linux's count; elsewhere it is zero.
func processorTime(db *database) (used time.Duration) {
	fields := func(file string) []string { // behind the name, which may contain blanks
		stat, _ := os.ReadFile(file)
		_, behind, _ := strings.Cut(string(stat), ") ")
		return strings.Fields(behind)
	}
	backend := fields(fmt.Sprintf("/proc/%d/stat", row[int](db, `SELECT pg_backend_pid()`)))
	if len(backend) == 0 {
		return 0
	}
	postmaster := backend[1]
	processes, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range processes {
		f := fields(file)
		isPostmaster := filepath.Base(filepath.Dir(file)) == postmaster
		if len(f) < 15 || !isPostmaster && f[1] != postmaster {
			continue
		}
		times := f[11:13] // of a child
		if isPostmaster {
			times = f[11:15] // with its dead children
		}
		for _, ticks := range times {
			n, _ := strconv.Atoi(ticks)
			used += time.Duration(n) * 10 * time.Millisecond // USER_HZ is 100
		}
	}
	return used
}
