package main

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// malformed returns the URL of a receiver whose answer is no HTTP.
func malformed(t *testing.T, answer string) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	pgtest.Must(t, err)
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Read(make([]byte, 4096))
			_, _ = io.WriteString(conn, answer)
			_ = conn.Close()
		}
	})
	t.Cleanup(func() { _ = listener.Close(); serving.Wait() })
	return "http://" + listener.Addr().String()
}

// answerWith returns the URL of a receiver that answers with a canary in its header and its body.
func answerWith(t *testing.T, status int) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Answer", "CANARY-answer-header")
		w.Header().Set("Location", "http://127.0.0.1:1/CANARY-location")
		w.Header().Set("Content-Type", "text/html")
		w.WriteHeader(status)
		_, _ = fmt.Fprintf(w, "CANARY-answer-body %s", r.Header.Get("X-Configured"))
	}))
	t.Cleanup(server.Close)
	return server.URL
}

// What is secret, or content that only an operator who asks for it may see, is planted wherever the
// program reads it: a payload, the headers of an event, signing secrets and credentials, the query
// of URLs, the key in the path of a channel, the password of the database's, and what receivers
// answer, in the body, in a header and in a status line that is none. It appears in nothing that
// the program writes or serves.
func TestSecurityCanariesNowhere(t *testing.T) {
	t.Parallel()
	testsize.Long(t)
	var alerts buffer
	channel := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(&alerts, r.Body)
		w.Header().Set("X-Answer", "CANARY-channel-header")
		w.WriteHeader(http.StatusBadGateway) // what it answers is logged, or not
		_, _ = io.WriteString(w, "CANARY-channel-body")
	}))
	t.Cleanup(channel.Close)
	dsn := pgtest.New(t, migrations.Outbox)
	db := open(t, dsn)
	secret := "CANARY-signing-secret-of-32-bytes"
	encoded := base64.StdEncoding.EncodeToString([]byte(secret))
	var file strings.Builder
	file.WriteString("alerts: {channels: [{webhook: '" + channel.URL + "/CANARY-x7Kq9ZtR2mB4vN8?key=CANARY-channel-query'}]}\ndefaults: {retry: {max_attempts: 2, schedule: [10ms]}, breaker: {enabled: false}}\ndestinations:\n")
	destinations := map[string]string{
		"rejects": answerWith(t, http.StatusUnprocessableEntity), "refuses": answerWith(t, http.StatusUnauthorized), "breaks": answerWith(t, http.StatusInternalServerError),
		"moves": answerWith(t, http.StatusFound), "stutters": malformed(t, "HTTP/1.1 CANARY-status-line\r\n\r\n"), "babbles": malformed(t, "CANARY-no-http\r\n\r\n"),
		"cheats": malformed(t, "HTTP/1.1 200 OK\r\nCANARY-bad-header\r\n\r\n"), "dead": testkit.NewVacant(t).URL,
	}
	for name, url := range destinations {
		fmt.Fprintf(&file, "  %s: {url: '%s/in?token=CANARY-query', signing_secrets: [whsec_%s], headers: {X-Configured: CANARY-configured-header, Authorization: Basic CANARY-credentials}}\n", name, url, encoded)
	}
	config := writeFile(t, filepath.Join(t.TempDir(), "relay.yaml"), file.String())
	env := append(os.Environ(), "OUTBOX_CONFIG="+config, "OUTBOX_DATABASE_URL="+strings.Replace(dsn, "://postgres@", "://postgres:CANARY-database-password@", 1),
		"OUTBOX_LOG_LEVEL=debug", "OUTBOX_LOG_FORMAT=json", "OUTBOX_METRICS_LISTEN=127.0.0.1:0", "OUTBOX_ADMIN_LISTEN=127.0.0.1:0", "OUTBOX_ADMIN_PATH_PREFIX=/outbox",
		"OUTBOX_ADMIN_TOKEN="+pageToken, "OUTBOX_RELAY_POLL_INTERVAL=1s", "UNRELATED=CANARY-environment")
	relay := launch(t, t.TempDir(), []string{"run"}, env...)
	log := relay.stderr
	c := relay.console(t)
	metrics := "http://" + metricsAddress.FindStringSubmatch(log.String())[1]
	execute(t, db, `INSERT INTO outbox (event_type, payload, idempotency_key, headers) VALUES ('invoice.paid', '{"iban": "CANARY-payload"}', 'k1', '{"X-Event-A": "CANARY-event-header"}')`)
	until(t, db, fmt.Sprintf("SELECT count(*) = %d FROM outbox_delivery WHERE status = 'failed'", len(destinations)))
	until(t, db, "SELECT count(*) > 0 FROM outbox_alert")
	log.wait(t, `"alert"`, relay.code)

	// The headers of an event are content: nothing shows them that does not reveal the payload.
	type output struct {
		where, text string
	}
	var all []output
	add := func(where, text string) { all = append(all, output{where: where, text: text}) }
	for _, args := range []string{
		"status", "events list", "relays", "routes list", "routes test invoice.paid", "doctor", "config check", "config show", "identity show", "replay --dry-run 1",
		"retry --dry-run 1", "pause nowhere", "pause shop", "events show 99", "version", "archive run --dry-run", "alerts test", "migrate status",
		"events show 1", "explain 1",
	} {
		for _, more := range [][]string{nil, {"--json"}} {
			r := command(env, append(strings.Fields(args), more...)...)
			add(args, r.stdout+r.stderr)
		}
	}
	r, _ := process(t, env, "doctor") // libraries write to the stderr of the process itself
	add("doctor", r.stdout+r.stderr)
	for _, path := range []string{"/metrics", "/healthz", "/readyz"} {
		_, text := fetch(t, metrics+path)
		add(path, text)
	}
	paths := []string{
		"/", "/events", "/events?status=failed", "/alerts", "/relays", "/audit", "/operations/new?action=replay&id=1", "/nowhere", "/api/v1/overview", "/api/v1/history",
		"/api/v1/destinations", "/api/v1/events", "/api/v1/alerts", "/api/v1/relays", "/api/v1/audit", "/api/openapi.json", "/api/v1/nowhere",
	}
	for name := range destinations {
		paths = append(paths, "/destinations/"+name, "/api/v1/destinations/"+name)
	}
	for _, path := range paths {
		_, text := c.send("GET", path, nil)
		add(path, text)
	}
	for _, path := range []string{"/events/1", "/api/v1/events/1"} {
		_, text := c.send("GET", path, nil)
		add(path, text)
	}
	add("alert channel", alerts.String())
	for _, table := range []string{"outbox_audit", "outbox_alert", "outbox_attempt", "outbox_delivery", "outbox_relay", "outbox_identity"} {
		add(table, query[string](t, db, "SELECT coalesce(string_agg(t::text, E'\\n'), '') FROM "+table+" t"))
	}
	// The stacks of all goroutines are what a panic prints.
	relay.signal(t, syscall.SIGQUIT)
	<-relay.code
	testkit.Contains(t, "the log has no stacks", log.String(), "goroutine ")
	add("log", log.String())
	if alerts.String() == "" {
		t.Error("the channel was sent nothing")
	}
	for _, o := range all {
		text := o.text
		for _, part := range []string{"CANARY", encoded, encoded[:20]} {
			if at := bytes.Index([]byte(text), []byte(part)); at >= 0 {
				t.Errorf("%s: …%s…", o.where, text[max(at-150, 0):min(at+150, len(text))])
			}
		}
	}
}
