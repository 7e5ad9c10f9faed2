package natstest

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/relay"
)

// BenchmarkDeadCluster compares how long live events take to a receiver over HTTP, alone and beside a dead cluster with 20,000 due
// events. Both take turns, each with a relay of its own, because a busy machine makes each of them slower by more than the other.
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

// insertApart adds n events in a session of its own. The session whose first statement inserts many keeps a plan for many, which PostgreSQL
// compiles (jit) for each single event after that, for 8 ms: the live events must come from another one.
func (l *liveLane) insertApart(eventType, prefix string, n int) {
	l.db.Helper()
	conn, err := pgx.Connect(l.db.Context(), l.db.DSN)
	pgtest.Must(l.db, err)
	pgtest.Exec(l.db, conn, insertSeries, eventType, prefix, n)
	pgtest.Must(l.db, conn.Close(l.db.Context()))
}

// run runs a relay, and returns how long each of some hundred events took from its commit to the receiver. Before them the breaker of
// the cluster is in the given state, if that is not empty.
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

// serveVariable makes this program a receiver instead of a test: a process of its own, so that the benchmark measures the relay alone.
const serveVariable = "NATSTEST_SERVE"

// serve runs a receiver until standard input ends, and prints its address.
func serve(kind string) {
	switch kind {
	case "http":
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			panic(err)
		}
		go func() {
			_ = (&http.Server{Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) })}).Serve(l)
		}()
		fmt.Println(l.Addr())
	default:
		s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: kind, NoLog: true, NoSigs: true})
		if err != nil {
			panic(err)
		}
		go s.Start()
		if !s.ReadyForConnections(patience) {
			panic("the server does not start")
		}
		fmt.Println(s.Addr())
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// startProcess starts a receiver in a process of its own, and returns its address and its process.
func startProcess(b *testing.B, kind string) (address string, process *os.Process) {
	b.Helper()
	cmd := exec.CommandContext(b.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), serveVariable+"="+kind)
	in, err := cmd.StdinPipe()
	pgtest.Must(b, err)
	out, err := cmd.StdoutPipe()
	pgtest.Must(b, err)
	pgtest.Must(b, cmd.Start())
	b.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	pgtest.Must(b, err)
	return line[:len(line)-1], cmd.Process
}

// BenchmarkDrain compares a backlog's way to a receiver over HTTP with the way to a stream in memory and in files, in turns.
func BenchmarkDrain(b *testing.B) {
	const events = 20_000
	for _, keys := range []int{0, 200} {
		for _, kind := range []string{"http", "memory", "file"} {
			b.Run(fmt.Sprintf("%s/keys=%d", kind, keys), func(b *testing.B) {
				for range b.N {
					drain(b, kind, events, keys)
				}
			})
		}
	}
}

func drain(b *testing.B, kind string, events, keys int) {
	b.Helper()
	b.StopTimer()
	db := relaytest.Covered(b, "audit")
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key)
		SELECT 'paid', json_build_object('n', i, 'pad', repeat('x', 280)), 'k-' || i, 'key-' || i % nullif($2, 0) FROM generate_series(1, $1) i`, events, keys)
	db.Exec(`ANALYZE outbox, outbox_delivery`)
	d := relay.Destination{Name: "audit"}
	var receiver *os.Process
	if kind == "http" {
		var address string
		address, receiver = startProcess(b, "http")
		d.URL = "http://" + address + "/"
	} else {
		var address string
		address, receiver = startProcess(b, b.TempDir())
		nc, err := nats.Connect("nats://" + address)
		pgtest.Must(b, err)
		defer nc.Close()
		js, err := jetstream.New(nc)
		pgtest.Must(b, err)
		storage := jetstream.FileStorage
		if kind == "memory" {
			storage = jetstream.MemoryStorage
		}
		_, err = js.CreateStream(b.Context(), jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"outbox.>"}, Storage: storage})
		pgtest.Must(b, err)
		d = settingsOf("nats://" + address)
	}
	left, done := events, make(chan struct{})
	settled := make(chan int, events)
	hooks := relay.Hooks{SettleRan: func(n int, _ time.Duration) { settled <- n }}
	go func() {
		defer close(done)
		for left > 0 {
			left -= <-settled
		}
	}()
	others := func() (receiving, database time.Duration) {
		return scheduled(receiver.Pid), scheduled(relaytest.Rows[int](db, `SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()`)...)
	}
	receiverBefore, databaseBefore := others()
	relayBefore := processorTime(b)
	b.StartTimer()
	started := time.Now()
	runRelay(b, db, hooks, d)
	<-done
	took := time.Since(started)
	b.StopTimer()
	relayAfter := processorTime(b)
	receiverAfter, databaseAfter := others()
	perEvent := func(spent time.Duration, what string) {
		b.ReportMetric(float64(spent.Nanoseconds())/1000/float64(events), what+"-µs/event")
	}
	b.ReportMetric(float64(events)/took.Seconds(), "events/s")
	perEvent(relayAfter-relayBefore, "relay")
	perEvent(receiverAfter-receiverBefore, "receiver")
	perEvent(databaseAfter-databaseBefore, "postgres")
	b.StartTimer()
}

// scheduled returns how long the threads of processes have run, which only Linux says; 0 elsewhere.
func scheduled(pids ...int) (sum time.Duration) {
	for _, pid := range pids {
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
		for _, thread := range threads {
			content, _ := os.ReadFile(thread) // of a thread that has just ended there is none
			var nanoseconds int64
			_, _ = fmt.Sscan(string(content), &nanoseconds)
			sum += time.Duration(nanoseconds)
		}
	}
	return sum
}

func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var usage syscall.Rusage
	pgtest.Must(b, syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
