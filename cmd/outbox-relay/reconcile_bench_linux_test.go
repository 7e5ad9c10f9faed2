package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/reconcile/compare"
	"github.com/outbox-relay/outbox-relay/migrations"
)

var (
	reconcileLoad = flag.Int("reconcile-load", 2000, "how many delivered events BenchmarkReconcileUnderLoad compares")
	reconcileCalm = flag.Duration("reconcile-calm", time.Second, "for how long it delivers before, and again after that")
)

// comparedPart makes delivered events with random keys, and what their receiver has of them.
const (
	deliveredPart = `
WITH e AS (
	INSERT INTO outbox (event_type, payload, idempotency_key, created_at, xid)
	SELECT 'paid', '{"n": 1}', md5(i::text), now() - interval '2 hours', '2' FROM generate_series($1::int, $2::int) i RETURNING id)
INSERT INTO outbox_delivery (event_id, destination, status, attempts, delivered_at) SELECT id, 'default', 'delivered', 1, now() - interval '1 hour' FROM e`
	receivedPart = `
INSERT INTO processed_events (receiver, source, idempotency_key, destination, event_type, event_id, payload_hash, processing_state, received_at, processed_at, response_status)
SELECT 'shop', 'billing', md5(i::text), 'default', 'paid', i, sha256('{"n": 1}'), 'succeeded', now() - interval '1 hour', now() - interval '1 hour', 200 FROM generate_series($1::int, $2::int) i`
	effectsPart = `INSERT INTO effect SELECT md5(i::text) FROM generate_series($1::int, $2::int) i`
)

// BenchmarkReconcileUnderLoad compares delivered events with what the receiver has, on a durable
// server beside 100 live events a second. Five losses, five strangers and five doubled effects are
// planted: each must be named, and nothing else.
func BenchmarkReconcileUnderLoad(b *testing.B) {
	for b.Loop() {
		reconcileUnderLoad(b)
	}
}

func reconcileUnderLoad(b *testing.B) {
	b.Helper()
	server := pgtest.Start(b, durable())
	database := func(name string, set migrations.Set) string {
		pgtest.Must(b, server.CreateDatabase(b.Context(), name, ""))
		pgtest.Migrate(b, server.DSN(name), set)
		return server.DSN(name)
	}
	l := &live{}
	c := newComparedAt(b, database("sender", migrations.Outbox), database("receiver", migrations.Inbox), func(h http.Handler) http.Handler {
		l.HandlerFunc = h.ServeHTTP
		return l
	})
	// Random keys fill an index many times slower than the index is built.
	c.sender.Exec(`ALTER TABLE outbox DROP CONSTRAINT outbox_idempotency_key_is_unique`)
	c.receiver.Exec(`ALTER TABLE processed_events DROP CONSTRAINT processed_events_pkey`)
	const step = 100_000
	for from := 1; from <= *reconcileLoad; from += step {
		to := min(from+step-1, *reconcileLoad)
		c.sender.Exec(deliveredPart, from, to)
		c.receiver.Exec(receivedPart, from, to)
		c.receiver.Exec(effectsPart, from, to)
	}
	c.sender.Exec(`ALTER TABLE outbox ADD CONSTRAINT outbox_idempotency_key_is_unique UNIQUE (idempotency_key)`)
	c.receiver.Exec(`ALTER TABLE processed_events ADD CONSTRAINT processed_events_pkey PRIMARY KEY (receiver, source, idempotency_key)`)
	c.receiver.Exec(`CREATE INDEX ON effect (key)`)
	c.receiver.Exec(`DELETE FROM processed_events WHERE idempotency_key IN (SELECT md5(i::text) FROM generate_series(1, 5) i)`)
	c.receiver.Exec(`DELETE FROM effect WHERE key IN (SELECT md5(i::text) FROM generate_series(1, 5) i)`)
	c.receiver.Exec(`INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, received_at)
		SELECT 'shop', 'billing', md5('stranger' || i), 'succeeded', now() - interval '1 hour' FROM generate_series(1, 5) i`)
	c.receiver.Exec(`INSERT INTO effect SELECT md5(i::text) FROM generate_series(6, 10) i UNION ALL SELECT md5('stranger' || i) FROM generate_series(1, 5) i`)
	c.sender.Exec(`VACUUM ANALYZE`)
	c.receiver.Exec(`VACUUM ANALYZE`)
	c.receiver.Exec(`CHECKPOINT`)

	program := filepath.Join(b.TempDir(), "outbox-relay")
	if out, err := exec.Command("go", "build", "-buildvcs=false", "-o", program, ".").CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	relay := launchAs(b, b.TempDir(), []string{"run"}, append(c.env, "OUTBOX_METRICS_LISTEN=none", "OUTBOX_ADMIN_LISTEN=none", "OUTBOX_RETENTION_SCHEDULE=0 0 29 2 *")...)
	end := l.commit(b, c.sender, 1)
	rest := func() { <-time.After(*reconcileCalm) }
	rest()
	before := l.during(rest)
	var report struct {
		compare.Report
		Seconds float64 `json:"seconds"`
	}
	peak := ""
	during := l.during(func() {
		var out, said bytes.Buffer
		cmd := exec.CommandContext(b.Context(), program, "reconcile", "--url="+c.url, "--settle=1s", "--json")
		cmd.Env, cmd.Stdout, cmd.Stderr = c.env, &out, &said
		pgtest.Must(b, cmd.Start())
		stop := watchMemory(cmd.Process.Pid, &peak)
		err := cmd.Wait()
		stop()
		if exit, failed := errors.AsType[*exec.ExitError](err); !failed || exit.ExitCode() != cli.ExitFound || json.Unmarshal(out.Bytes(), &report) != nil {
			b.Fatalf("%v: %s%s", err, &out, &said)
		}
	})
	after := l.during(rest)
	end()
	relay.stop(b)

	if !report.Complete || len(report.NeverArrived) != 5 || len(report.Strangers) != 5 || len(report.Doubled) != 5 || report.Findings() != 15 {
		b.Errorf("found %+v", report)
	}
	kib := 0.0
	_, _ = fmt.Sscan(peak, &kib)
	b.ReportMetric(report.Seconds, "s")
	b.ReportMetric(100*float64(report.RowsRead)/float64(report.Sent+report.Received), "%rows")
	b.ReportMetric(kib/1024, "MiB")
	reportLive(b, before, during, after)
}

// watchMemory reads the peak of a process's memory until stop is called. What the kernel says of an
// ended one includes its parent's.
func watchMemory(pid int, peak *string) (stop func()) {
	ended := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
				if _, found, ok := bytes.Cut(status, []byte("VmHWM:")); ok {
					*peak = string(found)
				}
			case <-ended:
				return
			}
		}
	})
	return func() {
		close(ended)
		watching.Wait()
	}
}
