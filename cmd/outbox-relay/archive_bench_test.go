package main

import (
	"database/sql"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/archive"
	"github.com/outbox-relay/outbox-relay/migrations"
)

var (
	archiveLoad = flag.Int("archive-load", 2000, "how many settled events BenchmarkArchiveUnderLoad archives")
	archiveSize = flag.Int("archive-batch", archive.DefaultArchiveBatch, "how many of them a transaction looks at")
	archiveCalm = flag.Duration("archive-calm", time.Second, "for how long it delivers before, and again after that")
)

// BenchmarkArchiveUnderLoad commits 1,000 events a second on a durable server, where a relay delivers them, and measures
// from before their commit until they arrive: first in calm, then while a process archives a backlog of settled events,
// is killed twice and started again, and then in calm again. ratio is the p99 during the archive over that of both calms.
// It fails if an event is lost, or is anywhere twice.
func BenchmarkArchiveUnderLoad(b *testing.B) {
	for b.Loop() {
		l := newLoad(b, *archiveLoad)
		start := time.Now()
		l.sleep(2 * time.Second) // connections, caches, plans
		before := l.during(func() { l.sleep(*archiveCalm) })
		var took time.Duration
		archiving := l.during(func() { took = l.archive(b) })
		after := l.during(func() { l.sleep(*archiveCalm) })
		l.end(b)

		calm := slices.Concat(l.latencies(before), l.latencies(after))
		busy := l.latencies(archiving)
		b.Logf("calm:      %s (before: %s; after: %s)", spread(calm), spread(l.latencies(before)), spread(l.latencies(after)))
		b.Logf("archiving: %s; %d events in %s", spread(busy), *archiveLoad, took.Round(time.Millisecond))
		b.ReportMetric(milliseconds(percentile(calm, 99)), "calm-p99-ms")
		b.ReportMetric(milliseconds(percentile(busy, 99)), "archiving-p99-ms")
		b.ReportMetric(float64(percentile(busy, 99))/float64(percentile(calm, 99)), "ratio")
		b.ReportMetric(float64(*archiveLoad)/took.Seconds(), "archived/s")
		b.ReportMetric(float64(len(l.sent))/time.Since(start).Seconds(), "committed/s")
		b.ReportMetric(0, "ns/op")
	}
}

// A load commits events at a constant rate and remembers when each was committed and arrived.
type load struct {
	dsn     string
	db      *sql.DB
	relay   *exec.Cmd
	stop    chan struct{}
	stopped sync.WaitGroup
	settled int

	mu      sync.Mutex // guards the fields below
	sent    []time.Time
	arrived []time.Time // zero: not yet
	twice   int         // requests for what had arrived
}

func newLoad(b *testing.B, events int) *load {
	server := pgtest.Start(b, localpg.Options{Durable: true, ListenTCP: true, Settings: map[string]string{
		"shared_buffers": "256MB", "max_wal_size": "4GB", "autovacuum": "on",
	}})
	l := &load{dsn: server.DSN("postgres"), stop: make(chan struct{}), settled: events}
	pgtest.Migrate(b, l.dsn, migrations.Outbox)
	var err error
	if l.db, err = sql.Open("pgx", l.dsn); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = l.db.Close() })
	receiver := httptest.NewServer(http.HandlerFunc(l.receive))
	b.Cleanup(receiver.Close)

	if _, err := l.db.ExecContext(b.Context(), `INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'default')`); err != nil {
		b.Fatal(err)
	}
	const step = 20_000
	for from := 1; from <= events; from += step {
		settled(b, l.db, from, min(from+step-1, events))
	}
	if _, err := l.db.ExecContext(b.Context(), `VACUUM ANALYZE`); err != nil {
		b.Fatal(err)
	}
	if _, err := l.db.ExecContext(b.Context(), `CHECKPOINT`); err != nil {
		b.Fatal(err)
	}

	l.relay = exec.Command(os.Args[0], "run")
	l.relay.Env = append(os.Environ(), asProgram+"=1", "OUTBOX_DATABASE_URL="+l.dsn, "OUTBOX_DESTINATION_URL="+receiver.URL, "OUTBOX_RETENTION_SCHEDULE=0 0 29 2 *")
	pgtest.Must(b, l.relay.Start())
	b.Cleanup(func() {
		_ = l.relay.Process.Kill()
		_ = l.relay.Wait()
	})
	l.stopped.Go(func() { l.commit(b) })
	return l
}

func (l *load) receive(_ http.ResponseWriter, r *http.Request) {
	now := time.Now()
	number, err := strconv.Atoi(strings.TrimPrefix(r.Header.Get("X-Idempotency-Key"), "live-"))
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil || number >= len(l.arrived) || !l.arrived[number].IsZero() {
		l.twice++
		return
	}
	l.arrived[number] = now
}

// commit inserts ten events every hundredth of a second; what it is late with it makes up for.
func (l *load) commit(b *testing.B) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	began := time.Now()
	for next := 0; ; {
		select {
		case <-l.stop:
			return
		case <-tick.C:
		}
		for ; next < int(time.Since(began)/time.Millisecond); next += 10 {
			now := time.Now()
			l.mu.Lock()
			for range 10 {
				l.sent, l.arrived = append(l.sent, now), append(l.arrived, time.Time{})
			}
			l.mu.Unlock()
			if _, err := l.db.ExecContext(b.Context(), `INSERT INTO outbox (event_type, payload, idempotency_key)
				SELECT 'invoice.issued', json_build_object('invoice', i, 'pad', repeat('x', 250)), 'live-' || i FROM generate_series($1::int, $1::int + 9) i`, next); err != nil {
				b.Error(err)
				return
			}
		}
	}
}

// sleep lets the load go on.
func (l *load) sleep(d time.Duration) { <-time.After(d) }

// during returns which events were committed while f ran: from the first to before the second.
func (l *load) during(f func()) (span [2]int) {
	count := func() int {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.sent)
	}
	span[0] = count()
	f()
	span[1] = count()
	return span
}

// archive runs the command until everything is archived; two runs are killed on their way.
func (l *load) archive(b *testing.B) time.Duration {
	began := time.Now()
	batch := fmt.Sprint("--batch=", *archiveSize)
	for _, third := range []int{1, 2} {
		cmd, out := archiveProcess(b, l.dsn, batch)
		exited := make(chan struct{})
		go func() {
			defer close(exited)
			_ = cmd.Wait()
		}()
		until(b, l.db, `SELECT NOT EXISTS (SELECT FROM outbox WHERE id = $1::bigint * $2 / 3)`, l.settled, third)
		_ = cmd.Process.Signal(syscall.SIGKILL)
		<-exited
		if cmd.ProcessState.Success() {
			b.Logf("run %d came to its end before it could be killed:\n%s", third, out)
		}
	}
	cmd, out := archiveProcess(b, l.dsn, batch)
	if err := cmd.Wait(); err != nil {
		b.Errorf("archive: %v\n%s", err, out)
	}
	return time.Since(began)
}

// end waits for what is still under way and checks that everything is where it belongs.
func (l *load) end(b *testing.B) {
	close(l.stop)
	l.stopped.Wait()
	until(b, l.db, `SELECT NOT EXISTS (SELECT FROM outbox_delivery WHERE status = 'pending')`)
	if n := moved(b, l.db, l.settled); n != l.settled {
		b.Errorf("%d of %d settled events are archived", n, l.settled)
	}
	_ = l.relay.Process.Signal(syscall.SIGTERM)
	_ = l.relay.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	missing := 0
	for _, at := range l.arrived {
		if at.IsZero() {
			missing++
		}
	}
	if missing > 0 {
		b.Errorf("of %d events %d never arrived", len(l.sent), missing)
	}
	if l.twice > 0 {
		b.Logf("%d requests were sent again", l.twice)
	}
}

func (l *load) latencies(span [2]int) (all []time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := span[0]; i < span[1]; i++ {
		all = append(all, l.arrived[i].Sub(l.sent[i]))
	}
	return all
}

func percentile(all []time.Duration, p int) time.Duration {
	if len(all) == 0 {
		return 0
	}
	return slices.Sorted(slices.Values(all))[(len(all)-1)*p/100]
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func spread(all []time.Duration) string {
	return fmt.Sprintf("p50 %.1f ms, p99 %.1f ms, max %.1f ms of %d", milliseconds(percentile(all, 50)), milliseconds(percentile(all, 99)), milliseconds(percentile(all, 100)), len(all))
}
