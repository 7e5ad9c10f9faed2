package main

import (
	"encoding/json"
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

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
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
		"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=" + receiver.URL + "/in/x7Kq4471Zs71bT?token=hunter2", "OUTBOX_SIGNING_SECRET=" + goodSecret, "OUTBOX_NAME=r1",
		"OUTBOX_ADMIN_LISTEN=127.0.0.1:0", "OUTBOX_ADMIN_TOKEN=" + pageToken, "OUTBOX_ADMIN_PATH_PREFIX=/outbox", "OUTBOX_BEARER_TOKEN=bearer-4471",
	}, "--poll-interval=1s")
	c := s.console(t)
	execute(t, db, `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('invoice.paid', '{"iban": "payload-4471"}', 'first')`)
	var overview struct {
		LastHour struct{ Delivered int } `json:"last_hour"`
	}
	waitUntil(t, "the delivery on the page", func() bool {
		status, body := c.send("GET", "/api/v1/overview", nil)
		return status == 200 && json.Unmarshal([]byte(body), &overview) == nil && overview.LastHour.Delivered == 1
	})
	for _, path := range []string{"", "/", "/destinations/default", "/events", "/events/1", "/relays", "/alerts", "/audit", "/api/v1/events/1", "/api/v1/destinations/default"} {
		status, body := c.send("GET", path, nil)
		if status != 200 {
			t.Errorf("%s: %d", path, status)
		}
		for _, secret := range []string{"hunter2", "x7Kq4471", "bearer-4471", "payload-4471", goodSecret, pageToken} {
			if strings.Contains(body, secret) {
				t.Errorf("%s has %s", path, secret)
			}
		}
	}
	if _, body := c.send("GET", "/destinations/default", nil); !strings.Contains(body, receiver.URL+"/in/***?***") {
		t.Errorf("the page of a destination does not show where it leads:\n%s", body)
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
