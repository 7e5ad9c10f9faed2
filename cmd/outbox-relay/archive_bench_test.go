package main

import (
	"database/sql"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/archive"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

var (
	archiveLoad = flag.Int("archive-load", 2000, "how many settled events BenchmarkArchiveUnderLoad archives")
	archiveSize = flag.Int("archive-batch", archive.DefaultArchiveBatch, "how many of them a transaction looks at")
	archiveCalm = flag.Duration("archive-calm", time.Second, "for how long it delivers before, and again after that")
)

// BenchmarkArchiveUnderLoad commits 1,000 events a second on a durable server, where a relay
// delivers them, and measures how long they take: first in calm, then while a process archives a
// backlog of settled events, is killed twice and started again, and then in calm again. It fails if
// an event is lost, or is anywhere twice.
func BenchmarkArchiveUnderLoad(b *testing.B) {
	for b.Loop() {
		archiveUnderLoad(b)
	}
}

// durable is a server that loses nothing, with room for what takes long to fill.
func durable() localpg.Options {
	return localpg.Options{Durable: true, Settings: map[string]string{"shared_buffers": "256MB", "max_wal_size": "4GB", "autovacuum": "on"}}
}

func archiveUnderLoad(b *testing.B) {
	b.Helper()
	dsn := pgtest.Start(b, durable()).DSN("postgres")
	pgtest.Migrate(b, dsn, migrations.Outbox)
	db, pool := open(b, dsn), relaytest.At(b, dsn)
	pool.Route()
	const step = 20_000
	for from := 1; from <= *archiveLoad; from += step {
		settled(b, db, from, min(from+step-1, *archiveLoad))
	}
	pool.Exec(`VACUUM ANALYZE`)
	pool.Exec(`CHECKPOINT`)
	l := &live{HandlerFunc: func(http.ResponseWriter, *http.Request) {}}
	receiver := httptest.NewServer(l)
	b.Cleanup(receiver.Close)
	relay := launchAs(b, b.TempDir(), []string{"run"}, "OUTBOX_DATABASE_URL="+dsn, "OUTBOX_DESTINATION_URL="+receiver.URL,
		"OUTBOX_METRICS_LISTEN=none", "OUTBOX_ADMIN_LISTEN=none", "OUTBOX_RETENTION_SCHEDULE=0 0 29 2 *")

	start := time.Now()
	end := l.commit(b, pool, 10)
	calm := func() { <-time.After(*archiveCalm) }
	<-time.After(2 * time.Second) // connections, caches, plans
	before := l.during(calm)
	began := time.Now()
	during := l.during(func() { archiveThroughKills(b, dsn, db) })
	took := time.Since(began)
	after := l.during(calm)
	committed := end()
	b.ReportMetric(float64(committed)/time.Since(start).Seconds(), "committed/s")

	relaytest.Becomes(pool, committed, `SELECT count(*)::int FROM outbox JOIN outbox_delivery ON event_id = id
		WHERE starts_with(idempotency_key, 'live-') AND status = 'delivered'`)
	relay.stop(b)
	if n := moved(b, db, *archiveLoad); n != *archiveLoad {
		b.Errorf("%d of %d settled events are archived", n, *archiveLoad)
	}
	if len(l.requests) != committed {
		b.Errorf("%d of %d events arrived", len(l.requests), committed)
	}
	b.ReportMetric(float64(*archiveLoad)/took.Seconds(), "archived/s")
	reportLive(b, before, during, after)
}

// archiveThroughKills runs the command until everything is archived; two runs are killed on their
// way.
func archiveThroughKills(b *testing.B, dsn string, db *sql.DB) {
	b.Helper()
	batch := fmt.Sprint("--batch=", *archiveSize)
	for _, third := range []int{1, 2} {
		cmd, out := archiveProcess(b, dsn, batch)
		exited := make(chan struct{})
		go func() {
			defer close(exited)
			_ = cmd.Wait()
		}()
		until(b, db, `SELECT NOT EXISTS (SELECT FROM outbox WHERE id = $1::bigint * $2 / 3)`, *archiveLoad, third)
		_ = cmd.Process.Signal(syscall.SIGKILL)
		<-exited
		if cmd.ProcessState.Success() {
			b.Logf("run %d came to its end before it could be killed:\n%s", third, out)
		}
	}
	cmd, out := archiveProcess(b, dsn, batch)
	if err := cmd.Wait(); err != nil {
		b.Errorf("archive: %v\n%s", err, out)
	}
}
