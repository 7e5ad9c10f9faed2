package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

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

func (s started) end(t *testing.T, want int) {
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
		return strings.Contains(text, `outbox_claimed_deliveries_total{destination="mail"} 0`) && strings.Contains(text, `outbox_reloads_total{outcome="ok"} 1`)
	})
	s.end(t, 0)
}
