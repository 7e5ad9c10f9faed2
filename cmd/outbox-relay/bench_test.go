package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/bench"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// benchEnv is an environment for bench, whose other process is this test binary.
func benchEnv(dsn string) []string { return []string{"OUTBOX_DATABASE_URL=" + dsn, asProgram + "=1"} }

// outboxWithEvent makes a database whose own outbox has an event that waits.
func outboxWithEvent(t *testing.T) (dsn string, unchanged func()) {
	t.Helper()
	dsn = coveredOutbox(t)
	pool := pgtest.Pool(t, dsn)
	pgtest.Exec(t, pool, `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('invoice.created', '{}', 'k')`)
	state := func() (text string) {
		t.Helper()
		err := pool.QueryRow(t.Context(), `SELECT (SELECT json_agg(o) FROM outbox o) || (SELECT json_agg(d)::text FROM outbox_delivery d)
			|| (SELECT count(*) FROM outbox_route) || (SELECT count(*) FROM outbox_relay) || (SELECT last_value FROM outbox_armed)
			|| (SELECT coalesce(string_agg(nspname, ','), '') FROM pg_namespace WHERE nspname LIKE 'outbox%')`).Scan(&text)
		pgtest.Must(t, err)
		return text
	}
	before := state()
	return dsn, func() {
		t.Helper()
		if after := state(); after != before {
			t.Errorf("bench changed the database:\n%s\nbefore:\n%s", after, before)
		}
	}
}

func TestBench(t *testing.T) {
	t.Parallel()
	dsn, unchanged := outboxWithEvent(t)
	r := command(benchEnv(dsn), "bench", "--json", "--events", "300", "--rate", "100", "--duration", "1s", "--inserts", "1s", "--payload", "500")
	if r.code != 0 {
		t.Fatalf("exit code %d, stderr %s", r.code, r.stderr)
	}
	var report bench.Report
	pgtest.Must(t, json.Unmarshal([]byte(r.stdout), &report))
	d, s := report.Drain, report.Steady
	if d.Events != 300 || d.Attempts < 300 || d.PerSecond <= 0 || d.WALBytes <= 0 || d.InFlight <= 0 || d.Limit == "" || report.Payload != 500 {
		t.Errorf("the drain is %+v", d)
	}
	if s == nil || s.Events != 100 || s.P50 <= 0 || s.P50 > s.P90 || s.P90 > s.P99 || s.P99 > s.Max {
		t.Errorf("the steady rate is %+v", s)
	}
	if i := report.Inserts; i == nil || i.Alone.PerSecond <= 0 || i.Beside.PerSecond <= 0 || i.Alone.PostgresMS == nil || *i.Alone.PostgresMS <= 0 {
		t.Errorf("the inserts are %+v", i)
	}
	if strings.Contains(r.stdout+r.stderr, "password") || !strings.Contains(r.stderr, "DROP SCHEMA outbox_bench_") {
		t.Errorf("stderr does not say how to clean up by hand:\n%s", r.stderr)
	}
	unchanged()
}

// A receiver of the user's gets what the configuration says of it.
func TestBenchAgainstAReceiver(t *testing.T) {
	t.Parallel()
	testsize.Long(t)
	dsn, unchanged := outboxWithEvent(t)
	var mu sync.Mutex
	var types []string
	unsigned := 0
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		types = append(types, r.Header.Get(webhook.EventType))
		if r.Header.Get(webhook.Signature) == "" {
			unsigned++
		}
	}))
	defer receiver.Close()
	env := append(benchEnv(dsn), "OUTBOX_SIGNING_SECRET=whsec_b3V0Ym94LXJlbGF5IGJlbmNobWFyayBzZWNyZXQ=")
	r := command(env, "bench", "--events", "50", "--rate", "0", "--inserts", "0", "--url", receiver.URL+"/hook?token=hidden")
	if r.code != 0 || !strings.Contains(r.stdout, "50 events of 300 bytes") || !strings.Contains(r.stdout, "limit: ") || strings.Contains(r.stdout, "hidden") {
		t.Errorf("exit code %d, stdout:\n%s\nstderr:\n%s", r.code, r.stdout, r.stderr)
	}
	mu.Lock()
	defer mu.Unlock()
	slices.Sort(types)
	if len(types) < 50 || !slices.Equal(slices.Compact(types), []string{"bench.event"}) || unsigned > 0 {
		t.Errorf("%d requests, %d of them unsigned, of the types %q", len(types), unsigned, slices.Compact(types))
	}
	unchanged()
}

// A receiver that refuses the events for good, or that is not there, ends the run with what to do
// about it.
func TestBenchRefused(t *testing.T) {
	t.Parallel()
	dsn, unchanged := outboxWithEvent(t)
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadRequest) }))
	defer receiver.Close()
	r := command(benchEnv(dsn), "bench", "--events", "1", "--rate", "0", "--inserts", "0", "--url", receiver.URL)
	r.holds(t, cli.ExitFailed, "", "1 request failed, the last one with status 400; let it accept the type bench.event")
	unchanged()
}

// A rate that the database cannot bear ends with the duration, and what is left of a killed run is
// named.
func TestBenchOverload(t *testing.T) {
	t.Parallel()
	dsn, unchanged := outboxWithEvent(t)
	pool := pgtest.Pool(t, dsn)
	pgtest.Exec(t, pool, `CREATE SCHEMA outbox_bench_left`)
	r := command(benchEnv(dsn), "bench", "--json", "--events", "1", "--rate", "100000", "--duration", "1s", "--inserts", "0")
	var report bench.Report
	if err := json.Unmarshal([]byte(r.stdout), &report); r.code != 0 || err != nil {
		t.Fatalf("exit code %d, error %v, stderr:\n%s", r.code, err, r.stderr)
	}
	if s := report.Steady; s == nil || s.Events < 1 || s.Events >= 100_000 || s.CommittedAt >= 100_000 {
		t.Errorf("the steady rate is %+v", s)
	}
	testkit.Contains(t, "stderr does not name the schema of a killed run", r.stderr, "remove what a killed one has left: DROP SCHEMA outbox_bench_left CASCADE\n")
	pgtest.Exec(t, pool, `DROP SCHEMA outbox_bench_left`)
	unchanged()
}

// A login without rights, and a URL that is none, are named with what to do.
func TestBenchMistakes(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t)
	pool := pgtest.Pool(t, dsn)
	pgtest.Exec(t, pool, `CREATE ROLE bench_guest LOGIN`)
	defer func() { _, _ = pool.Exec(t.Context(), `DROP ROLE bench_guest`) }()
	r := command(benchEnv(asRole(t, dsn, "bench_guest")), "bench")
	if r.code != cli.ExitFailed || !strings.Contains(r.stderr, "GRANT CREATE ON DATABASE ") || !strings.Contains(r.stderr, `TO "bench_guest"`) {
		t.Errorf("exit code %d, stderr:\n%s", r.code, r.stderr)
	}
	r = command(benchEnv(dsn), "bench", "--url", "nonsense")
	if r.code != cli.ExitConfig || !strings.HasPrefix(r.stderr, `outbox-relay: flag --url: scheme "" is not supported`) {
		t.Errorf("exit code %d, stderr:\n%s", r.code, r.stderr)
	}
}

// A writer that reports when a text was written.
type watchedWriter struct {
	buffer
	text string
	once sync.Once
	seen chan<- os.Signal
}

func (w *watchedWriter) Write(p []byte) (int, error) {
	n, err := w.buffer.Write(p)
	if strings.Contains(w.String(), w.text) {
		w.once.Do(func() { w.seen <- os.Interrupt })
	}
	return n, err
}

// An interrupt removes the schema, whatever is under way.
func TestBenchInterrupted(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	for _, moment := range []string{"using schema", "inserting", "committing"} {
		t.Run(moment, func(t *testing.T) {
			t.Parallel()
			dsn, unchanged := outboxWithEvent(t)
			signals := make(chan os.Signal, 2)
			var stdout buffer
			stderr := &watchedWriter{text: moment, seen: signals}
			m := Main{Env: benchEnv(dsn), Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: stderr, Signals: signals}
			code := m.Run([]string{"bench", "--events", "100", "--rate", "10", "--duration", "1h"})
			if code != cli.ExitInterrupted || stdout.String() != "" || !strings.HasSuffix(stderr.String(), "outbox-relay: interrupted\n") {
				t.Errorf("exit code %d, stdout %q, stderr:\n%s", code, stdout.String(), stderr.String())
			}
			unchanged()
		})
	}
}

func TestBenchUsage(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]string{
		"--events=0":                  "--events 0 is out of range; write 1 to 10000000",
		"--rate=-1":                   "--rate -1 is out of range; write 0 to 100000",
		"--payload=1":                 "--payload 1 is out of range; write 32 to 1048576",
		"--duration=1ms":              "--duration 1ms is out of range; write 1s to 1h",
		"--inserts=1ms":               "--inserts 1ms is out of range; write 100ms to 1m, or 0 for none",
		"--rate=100000 --duration=1h": "--rate 100000 for a --duration of 1h0m0s is too much: at most 10000000 events",
		"--rate=1 --schema=real":      "unknown flag --schema (see: outbox-relay bench --help)",
	} {
		command(nil, append([]string{"bench"}, strings.Fields(args)...)...).expect(t, cli.ExitUsage, "", "outbox-relay: "+want+"\n")
	}
	file := writeFile(t, filepath.Join(t.TempDir(), "relay.yaml"), "destinations: {shop: {url: https://shop.test/}}\n")
	command([]string{"OUTBOX_DATABASE_URL=postgres://127.0.0.1:1/none"}, "bench", "--config", file, "--url", "https://staging.test/").expect(t, cli.ExitUsage, "",
		"outbox-relay: --url stands beside the destinations of "+file+" (shop); name a file without destinations with --config\n")
}
