package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

var (
	outboxesOf  = flag.Int("outboxes", 500, "schemas of BenchmarkIdleOutboxes")
	idleSeconds = flag.Int("idle-seconds", 60, "for how long BenchmarkIdleOutboxes measures")
)

// BenchmarkIdleOutboxes measures what a process costs that serves many idle outboxes of one server:
// memory, connections, queries a second by statement, and the delay of the first event. Run it with
// -benchtime=1x.
func BenchmarkIdleOutboxes(b *testing.B) {
	n, window, calm := *outboxesOf, *idleSeconds, 5 // connections of outboxes that are all asleep, and one that wakes
	if testing.Short() {                            // to see that it works
		n, window, calm = min(n, 4), min(window, 2), 5*n
	}
	server := pgtest.Start(b, localpg.Options{Settings: map[string]string{
		"max_connections": fmt.Sprint(5*n + 50), "shared_preload_libraries": "pg_stat_statements", "pg_stat_statements.max": "20000", "pg_stat_statements.track": "top",
	}})
	dsn := server.DSN("postgres")
	pool := pgtest.Pool(b, dsn)
	pgtest.Exec(b, pool, "CREATE EXTENSION pg_stat_statements")
	text := ""
	var making sync.WaitGroup
	next := make(chan int)
	for range 4 {
		making.Go(func() {
			for i := range next {
				schema := fmt.Sprintf("s%d", i)
				if r := command([]string{"OUTBOX_DATABASE_URL=" + dsn}, "migrate", "up", "--schema="+schema); r.code != 0 {
					b.Errorf("%+v", r)
				}
			}
		})
	}
	for i := range n {
		next <- i
		text += fmt.Sprintf("- {name: s%d, url: '%s', schema: s%d}\n", i, dsn, i)
	}
	close(next)
	making.Wait()
	receiver := relaytest.NewReceiver(b, nil)
	file := filepath.Join(b.TempDir(), usualFile)
	pgtest.Must(b, os.WriteFile(file, []byte("destinations: {shop: {url: '"+receiver.URL+"'}}\ndatabases:\n"+text), 0o600))
	relay := launch(b, b.TempDir(), []string{"run", "--config", file}, "OUTBOX_METRICS_LISTEN=none", "OUTBOX_ADMIN_LISTEN=none")
	defer relay.kill(b)
	const connections = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'outbox-relay%'"
	relaytest.Eventually(b, "all relays", func() bool { return pgtest.Row[int](b, pool, connections) >= n })
	settle := time.NewTicker(time.Second)
	defer settle.Stop()
	for pgtest.Row[int](b, pool, connections) > calm {
		<-settle.C
	}
	pgtest.Exec(b, pool, "SELECT pg_stat_statements_reset()")
	settle.Reset(time.Duration(window) * time.Second)
	<-settle.C
	rows, err := pool.Query(b.Context(), `SELECT left(regexp_replace(regexp_replace(query, '"?\ms\d+"?', 'SCHEMA', 'g'), '\s+', ' ', 'g'), 110) AS statement, sum(calls)::float8
		FROM pg_stat_statements GROUP BY 1 ORDER BY 2 DESC LIMIT 15`)
	pgtest.Must(b, err)
	per := float64(n * window)
	for rows.Next() {
		var statement string
		var calls float64
		pgtest.Must(b, rows.Scan(&statement, &calls))
		b.Logf("%.3f a second and outbox: %s", calls/per, statement)
	}
	rows.Close()
	b.ReportMetric(pgtest.Row[float64](b, pool, "SELECT sum(calls)::float8 FROM pg_stat_statements")/per, "queries/s/outbox")
	b.ReportMetric(pgtest.Row[float64](b, pool, connections)/float64(n), "connections/outbox")
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", relay.program.Process.Pid))
	pgtest.Must(b, err)
	var kib float64
	_, err = fmt.Sscan(regexp.MustCompile(`VmRSS:\s+(\d+)`).FindStringSubmatch(string(status))[1], &kib)
	pgtest.Must(b, err)
	b.ReportMetric(kib/1024, "RSS-MiB")
	began := time.Now()
	pgtest.Exec(b, pool, fmt.Sprintf("INSERT INTO s%d.outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', 'first')", n/2))
	relaytest.Eventually(b, "the first event", func() bool { return strings.Contains(strings.Join(receiver.Keys(), " "), "first") })
	b.ReportMetric(float64(time.Since(began).Milliseconds()), "first-ms")
}
