package main

import (
	"encoding/json"
	"fmt"
	"html"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

const pageToken = "page-token-of-32-characters-0001"

var pageAddress = regexp.MustCompile(`"page":"([^"]+)"`)

// A consoleClient speaks to the page of a relay that runs.
type consoleClient struct {
	testing.TB
	url    string
	client *http.Client
}

func (s started) console(t testing.TB) consoleClient {
	t.Helper()
	s.stderr.wait(t, `"page":"`, s.code)
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return consoleClient{t, "http://" + pageAddress.FindStringSubmatch(s.stderr.String())[1] + "/outbox", &http.Client{Transport: transport}}
}

// send sends a request, with a form if there is one, and returns status and body.
func (c consoleClient) send(method, path string, form url.Values) (int, string) {
	c.Helper()
	r, err := http.NewRequestWithContext(c.Context(), method, c.url+path, strings.NewReader(form.Encode()))
	if err != nil {
		c.Fatal(err)
	}
	r.SetBasicAuth("ann", pageToken)
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	response, err := c.client.Do(r)
	if err != nil {
		c.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		c.Fatal(err)
	}
	return response.StatusCode, string(body)
}

// The page and the API run beside the relay, show what it does, and neither has a secret.
func TestConsole(t *testing.T) {
	t.Parallel()
	receiver := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer receiver.Close()
	dsn := pgtest.New(t, migrations.Outbox)
	db := open(t, dsn)
	s := start(t, []string{
		"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=" + receiver.URL + "/in-4471?token=hunter2", "OUTBOX_SIGNING_SECRET=" + goodSecret, "OUTBOX_NAME=r1",
		"OUTBOX_ADMIN_LISTEN=127.0.0.1:0", "OUTBOX_ADMIN_TOKEN=" + pageToken, "OUTBOX_ADMIN_PATH_PREFIX=/outbox", "OUTBOX_BEARER_TOKEN=bearer-4471",
	}, "--poll-interval=1s")
	c := s.console(t)
	execute(t, db, `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('invoice.paid', '{"iban": "payload-4471"}', 'first')`)
	var overview struct {
		LastMinute struct{ Delivered int } `json:"last_minute"`
	}
	waitUntil(t, "the delivery on the page", func() bool {
		status, body := c.send("GET", "/api/v1/overview", nil)
		return status == 200 && json.Unmarshal([]byte(body), &overview) == nil && overview.LastMinute.Delivered == 1
	})
	for _, path := range []string{"", "/", "/destinations/default", "/events", "/events/1", "/relays", "/alerts", "/audit", "/api/v1/events/1", "/api/v1/destinations/default"} {
		status, body := c.send("GET", path, nil)
		if status != 200 {
			t.Errorf("%s: %d", path, status)
		}
		for _, secret := range []string{"hunter2", "in-4471", "bearer-4471", "payload-4471", goodSecret, pageToken} {
			if strings.Contains(body, secret) {
				t.Errorf("%s has %s", path, secret)
			}
		}
	}
	outside := consoleClient{t, strings.TrimSuffix(c.url, "/outbox"), c.client}
	if status, body := outside.send("GET", "/", nil); status != 404 || !strings.Contains(body, "admin.path_prefix") {
		t.Errorf("beside the prefix: %d", status)
	}
	here := *c.client
	here.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	stays := consoleClient{t, c.url, &here}
	for _, path := range []string{"//events", "/../events", "/./events"} { // no redirect to what lies beside the prefix
		if status, body := stays.send("GET", path, nil); status != 404 || !strings.Contains(body, "admin.path_prefix") {
			t.Errorf("%s: %d", path, status)
		}
	}
	s.signals <- syscall.SIGTERM
	if code := <-s.code; code != 0 {
		t.Errorf("exit code %d, stderr:\n%s", code, s.stderr)
	}
	if strings.Contains(s.stderr.String(), pageToken) {
		t.Error("the token is in the log")
	}
}

var formField = regexp.MustCompile(`name="(order|token)" value="([^"]*)"`)

// confirmation returns the form of a preview.
func confirmation(body string) url.Values {
	form := url.Values{}
	for _, match := range formField.FindAllStringSubmatch(body, -1) {
		form.Set(match[1], html.UnescapeString(match[2]))
	}
	return form
}

// A replay that is ordered on the page outlives its process: killed in the middle, it goes on in the next one, and the audit has
// counted each delivery once.
func TestReplayOfThePageIsKilledAndGoesOn(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const all = 20_000
	dsn := pgtest.New(t, migrations.Outbox)
	db := open(t, dsn)
	execute(t, db, `INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'default')`)
	execute(t, db, `INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 't', '{}', 'k-' || i FROM generate_series(1, $1) i`, all)
	execute(t, db, `UPDATE outbox_delivery SET status = 'failed', attempts = 8, last_reason = 'timeout', last_attempt_at = now()`)
	execute(t, db, `INSERT INTO outbox_destination (destination, paused, paused_at) VALUES ('default', true, now()) ON CONFLICT (destination) DO UPDATE SET paused = true, paused_at = now()`)
	execute(t, db, `CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.1); RETURN NEW; END'`)
	execute(t, db, `CREATE TRIGGER slow BEFORE UPDATE OF done ON outbox_audit FOR EACH ROW EXECUTE FUNCTION slow()`)
	env := []string{
		"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=http://127.0.0.1:1/in", "OUTBOX_METRICS_LISTEN=off",
		"OUTBOX_ADMIN_LISTEN=127.0.0.1:0", "OUTBOX_ADMIN_TOKEN=" + pageToken, "OUTBOX_ADMIN_PATH_PREFIX=/outbox",
	}
	first := launch(t, t.TempDir(), env...)
	c := first.console(t)
	_, body := c.send("GET", "/operations/new?action=replay&status=failed&destination=default&rate=0", nil)
	if !strings.Contains(strings.ReplaceAll(body, "\u202f", ""), fmt.Sprintf("Replay %d deliveries?", all)) {
		t.Fatal(body)
	}
	if status, body := c.send("POST", "/operations", confirmation(body)); status != 200 {
		t.Fatal(status, body)
	}
	waitUntil(t, "some batches", func() bool { return query[int](t, db, `SELECT done FROM outbox_audit WHERE action = 'replay'`) >= 2000 })
	first.kill(t)
	done, replayed := query[int](t, db, `SELECT done FROM outbox_audit WHERE action = 'replay'`), query[int](t, db, `SELECT count(*) FROM outbox_delivery WHERE replay`)
	if done != replayed || done >= all || query[string](t, db, `SELECT state FROM outbox_audit WHERE action = 'replay'`) != "running" {
		t.Errorf("after the kill %d are audited, %d replayed", done, replayed)
	}
	execute(t, db, `ALTER TABLE outbox_audit DISABLE TRIGGER outbox_audit_is_kept; UPDATE outbox_audit SET updated_at = now() - interval '5 minutes'`) // instead of waiting until it counts as killed
	second := launch(t, t.TempDir(), env...)
	c = second.console(t)
	if status, body := c.send("POST", "/operations/1/resume", nil); status != 200 {
		t.Fatal(status, body)
	}
	waitUntil(t, "the rest", func() bool {
		return query[string](t, db, `SELECT state FROM outbox_audit WHERE action = 'replay'`) == "done"
	})
	if got := query[string](t, db, `SELECT done || ' ' || matched || ' ' || actor FROM outbox_audit WHERE action = 'replay'`); got != fmt.Sprint(all, " ", all, " ann@127.0.0.1") {
		t.Errorf("audited: %s", got)
	}
	if n := query[int](t, db, `SELECT count(*) FROM outbox_delivery WHERE replay AND status = 'pending' AND claim = 1`); n != all {
		t.Errorf("%d were replayed once", n)
	}
	second.stop(t)
}

// waitUntil waits for what no hook reports.
func waitUntil(t *testing.T, what string, done func() bool) {
	t.Helper()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	deadline := time.After(time.Minute)
	for !done() {
		select {
		case <-ticker.C:
		case <-deadline:
			t.Fatalf("never came: %s", what)
		}
	}
}

// What commands change, or reveal, stands in the audit too, under the name that --as gives.
func TestCommandsAreAudited(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	db := open(t, dsn)
	execute(t, db, `INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'default')`)
	execute(t, db, `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{"a": "payload-4471"}', 'k')`)
	env := []string{"OUTBOX_DATABASE_URL=" + dsn}
	for _, args := range [][]string{
		{"pause", "default", "--as", "ann", "--reason", "maintenance"},
		{"resume", "default"},
		{"discard", "1", "--yes", "--as=ann"},
		{"replay", "1", "--yes", "--status=discarded"},
		{"events", "show", "1"},
		{"events", "show", "1", "--payload"},
	} {
		if r := command(env, args...); r.code != 0 {
			t.Errorf("%v: %+v", args, r)
		}
	}
	got := strings.ReplaceAll(query[string](t, db, `SELECT string_agg(concat_ws(' ', actor, origin, action, destination, event_id, done), ', ' ORDER BY id) FROM outbox_audit`), cli.OSUser(), "me")
	if want := "ann cli pause default 0, me cli resume default 0, ann cli discard 1, me cli replay 1, me cli reveal_payload 1 0"; got != want {
		t.Errorf("audited: %s", got)
	}
}
