package main

import (
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// replaceFile swaps in another content at once, as editors and Kubernetes do.
func replaceFile(t *testing.T, name, content string) {
	t.Helper()
	pgtest.Must(t, os.Rename(writeFile(t, name+".new", content), name))
}

// reload sends a hangup and waits for the line that says what became of it.
func (s started) reload(t *testing.T, text string) {
	t.Helper()
	before := len(s.stderr.String())
	s.hangups <- syscall.SIGHUP
	s.stderr.waitBehind(t, before, text, s.code)
}

const (
	inEffect  = `"msg":"configuration read again, and in effect"`
	noChange  = `"msg":"configuration read again: nothing has changed"`
	notUsable = `"msg":"the configuration was read again and cannot be used; what was in effect stays"`
)

func TestReload(t *testing.T) {
	t.Parallel()
	posted := make(chan string, 100)
	receiver := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		posted <- r.URL.Path + " " + r.Header.Get("X-Idempotency-Key")
	}))
	defer receiver.Close()
	dsn := pgtest.New(t, migrations.Outbox)
	db := open(t, dsn)
	file := filepath.Join(t.TempDir(), usualFile)
	config := func(path, more string) string {
		return fmt.Sprintf("destinations: {a: {url: '%s/%s'}}\nrelay: {poll_interval: 1s}\n%s", receiver.URL, path, more)
	}
	replaceFile(t, file, config("old", ""))
	s := start(t, []string{"OUTBOX_DATABASE_URL=" + dsn}, "--config="+file)
	s.stderr.wait(t, `"registered"`, s.code)

	deliver := func(key, want string) {
		t.Helper()
		execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', '"+key+"')")
		testkit.Equal(t, "got", receive(t, posted, s), want)
	}
	deliver("1", "/old 1")
	s.reload(t, noChange)
	if strings.Contains(s.stderr.String(), `"level":"debug"`) {
		t.Error("debug lines at level info")
	}

	replaceFile(t, file, config("new", "log: {level: debug}\n"))
	s.reload(t, `"msg":"log.level changed"`)
	testkit.Contains(t, "stderr", s.stderr.String(), `"changes":["destinations.a changed: url"],"time"`)
	deliver("2", "/new 2")
	s.stderr.wait(t, `"level":"debug"`, s.code)

	// Mistakes: each of them is told, as config check does, and what was in effect stays.
	replaceFile(t, file, config("worse", "log: {level: loud}\ndefaults: {timeout: 10}\nrotes: []\n"))
	s.reload(t, notUsable)
	r := command([]string{"OUTBOX_DATABASE_URL=" + dsn}, "config", "check", "--config="+file)
	lines := strings.Split(strings.TrimSpace(r.stderr), "\n")
	if len(lines) != 4 { // and how many there are
		t.Errorf("config check says %q", r.stderr)
	}
	for _, line := range lines[:len(lines)-1] {
		if !strings.Contains(s.stderr.String(), `"msg":`+fmt.Sprintf("%q", line)) {
			t.Errorf("%s is not in the log:\n%s", line, s.stderr)
		}
	}
	deliver("3", "/new 3")
	pgtest.Must(t, os.Remove(file))
	s.reload(t, notUsable)
	testkit.Contains(t, "stderr", s.stderr.String(), "cannot read "+file)
	deliver("4", "/new 4")

	replaceFile(t, file, config("newer", "log: {format: console}\n"))
	s.hangups <- syscall.SIGHUP
	s.reload(t, `"settings":["log.format"],"time"`)
	deliver("5", "/newer 5")
	s.end(t, 0)
}

// Before the database is there, and while the relay stops, a hangup is harmless.
func TestReloadAtTheEdges(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), usualFile)
	replaceFile(t, file, "destinations: {a: {url: 'http://a.invalid'}}\n")
	s := start(t, []string{"OUTBOX_DATABASE_URL=postgres://u@127.0.0.1:1/db"}, "--config="+file)
	s.stderr.wait(t, "connection refused", s.code)
	replaceFile(t, file, "destinations: {b: {url: 'http://b.invalid'}}\n")
	s.reload(t, `"changes":["destinations.b added","destinations.a removed","routes: 1 added, 1 removed"]`)
	s.signals <- syscall.SIGTERM
	select {
	case s.hangups <- syscall.SIGHUP:
	case code := <-s.code:
		s.code <- code
	}
	if code := <-s.code; code != 0 {
		t.Errorf("exit code %d, stderr:\n%s", code, s.stderr)
	}
}

// A process of its own changes its signing secret from one to both to the other while deliveries
// flow: every request verifies at a receiver that knows both, none is lost, none is unsigned, and
// the first secret ends.
func TestSecretRotation(t *testing.T) {
	t.Parallel()
	old, next := rotationSecret(t, 1), rotationSecret(t, 2)
	var mu sync.Mutex
	seen := map[string]string{} // by key: which of the secrets verify
	changed := make(chan struct{}, 1)
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		verified := ""
		for _, s := range []struct{ name, text string }{{"old", old}, {"next", next}} {
			secret, err := webhook.ParseSecret(s.text)
			if err == nil {
				_, err = webhook.Verify(r.Header, body, time.Now(), time.Minute, secret)
			}
			if err == nil {
				verified += s.name
			}
		}
		mu.Lock()
		seen[r.Header.Get("X-Idempotency-Key")] += verified
		mu.Unlock()
		select {
		case changed <- struct{}{}:
		default:
		}
		w.WriteHeader(http.StatusNoContent)
	}))
	defer receiver.Close()
	dsn := pgtest.New(t, migrations.Outbox)
	db := open(t, dsn)
	file := writeFile(t, filepath.Join(t.TempDir(), "secret"), old)
	s := launch(t, t.TempDir(), []string{"run", "--poll-interval=1s"}, "OUTBOX_DATABASE_URL="+dsn, "OUTBOX_DESTINATION_URL="+receiver.URL, "OUTBOX_SIGNING_SECRET_FILE="+file)
	// arrives inserts until a request carries exactly these signatures.
	inserted := 0
	arrives := func(want string) {
		t.Helper()
		for found := false; !found; {
			execute(t, db, fmt.Sprintf(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 't', '{}', %d + i FROM generate_series(1, 50) i`, inserted))
			inserted += 50
			receive(t, changed, s.started)
			mu.Lock()
			for _, verified := range seen {
				found = found || verified == want
			}
			mu.Unlock()
		}
	}
	rotate := func(content string) {
		t.Helper()
		before := len(s.stderr.String())
		replaceFile(t, file, content)
		s.signal(t, syscall.SIGHUP)
		s.stderr.waitBehind(t, before, `"changes":["destinations.default changed: signing_secrets"]`, s.code)
	}
	arrives("old")
	rotate(next + "," + old)
	arrives("oldnext")
	rotate(next)
	arrives("next")
	for query[int](t, db, "SELECT count(*)::int FROM outbox_delivery WHERE status = 'delivered'") < inserted {
		receive(t, time.After(20*time.Millisecond), s.started)
	}
	s.stop(t)
	mu.Lock()
	defer mu.Unlock()
	for key, verified := range seen {
		if verified != "old" && verified != "oldnext" && verified != "next" {
			t.Errorf("event %s was verified by %q", key, verified)
		}
	}
	if len(seen) != inserted {
		t.Errorf("%d of %d events arrived", len(seen), inserted)
	}
}

func rotationSecret(t *testing.T, n int) string {
	t.Helper()
	return "whsec_" + base64.StdEncoding.EncodeToString(fmt.Appendf(nil, "%032d", n))
}

// fetch returns the answer of a local server.
func fetch(t *testing.T, url string) (code int, body string) {
	t.Helper()
	transport := &http.Transport{DisableKeepAlives: true}
	response, err := (&http.Client{Transport: transport}).Get(url)
	pgtest.Must(t, err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	pgtest.Must(t, err)
	return response.StatusCode, string(text)
}

var metricsAddress = regexp.MustCompile(`"metrics":"([^"]*)"`)

// monitorOf returns where a started relay serves its metrics.
func monitorOf(t *testing.T, s started) string {
	t.Helper()
	s.stderr.wait(t, `"msg":"starting"`, s.code)
	return "http://" + metricsAddress.FindStringSubmatch(s.stderr.String())[1]
}

func (s started) end(t testing.TB, want int) {
	t.Helper()
	s.signals <- syscall.SIGTERM
	if code := <-s.code; code != want {
		t.Errorf("exit code %d, want %d, stderr:\n%s", code, want, s.stderr)
	}
}

// A relay that drains is alive and not ready: a load of its metrics shows the last outcomes.
func TestMonitorServesWhileTheRelayDrains(t *testing.T) {
	t.Parallel()
	reached, release := make(chan struct{}, 1), make(chan struct{})
	receiver := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		reached <- struct{}{}
		<-release
	}))
	defer receiver.Close()
	dsn := pgtest.New(t, migrations.Outbox)
	db := open(t, dsn)
	execute(t, db, `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', 'k')`)
	s := start(t, []string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=" + receiver.URL, "OUTBOX_METRICS_LISTEN=127.0.0.1:0"})
	url := monitorOf(t, s)
	receive(t, reached, s)
	s.signals <- syscall.SIGTERM
	s.stderr.wait(t, `"msg":"stopping"`, s.code)
	if code, text := fetch(t, url+"/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(text, "the relay is stopping") {
		t.Errorf("%d %s", code, text)
	}
	if code, _ := fetch(t, url+"/healthz"); code != http.StatusOK {
		t.Errorf("healthz: %d", code)
	}
	close(release)
	if code := <-s.code; code != 0 {
		t.Errorf("exit code %d, stderr:\n%s", code, s.stderr)
	}
}

// A changed address needs a restart, and the log says so.
func TestReloadKeepsTheMonitor(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	file := filepath.Join(t.TempDir(), "relay.yaml")
	const text = "destinations: {shop: {url: 'http://127.0.0.1:1/'}}\nmetrics: {listen: '127.0.0.1:0'}\n"
	writeFile(t, file, text)
	s := start(t, []string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_METRICS_LISTEN=127.0.0.1:0"}, "--config", file)
	url := monitorOf(t, s)
	s.stderr.wait(t, `"msg":"registered"`, s.code)
	writeFile(t, file, strings.Replace(text, "shop: {url: 'http://127.0.0.1:1/'}", "shop: {url: 'http://127.0.0.1:1/'}, mail: {url: 'http://127.0.0.1:1/'}", 1))
	s.hangups <- os.Signal(syscall.SIGHUP)
	relaytest.Eventually(t, "the series of a new destination", func() bool {
		_, text := fetch(t, url+"/metrics")
		return strings.Contains(text, `outbox_claimed_deliveries_total{destination="mail"} 0`) && strings.Contains(text, `outbox_reloads_total{result="success"} 1`)
	})
	s.end(t, 0)
}
