package main

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

const (
	pageToken  = "page-token-of-32-characters-0001"
	readToken  = "read-token-of-32-characters-0001"
	wrongToken = "wrong-token-of-32-characters-001"
)

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
	pgtest.Must(c, err)
	r.SetBasicAuth("ann", pageToken)
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	response, err := c.client.Do(r)
	pgtest.Must(c, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	pgtest.Must(c, err)
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
		"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=" + receiver.URL + "/in/x7Kq4471Zs71bT?token=hunter2", "OUTBOX_SIGNING_SECRET=" + goodSecret, "OUTBOX_RELAY_NAME=r1",
		"OUTBOX_ADMIN_LISTEN=127.0.0.1:0", "OUTBOX_ADMIN_TOKEN=" + pageToken, "OUTBOX_ADMIN_PATH_PREFIX=/outbox", "OUTBOX_DESTINATION_BEARER_TOKEN=bearer-4471",
	}, "--poll-interval=1s")
	c := s.console(t)
	execute(t, db, `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('invoice.paid', '{"iban": "payload-4471"}', 'first')`)
	var overview struct {
		LastHour struct{ Delivered int } `json:"last_hour"`
	}
	testkit.Eventually(t, "the delivery on the page", func() bool {
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
	s.end(t, 0)
	if strings.Contains(s.stderr.String(), pageToken) {
		t.Error("the token is in the log")
	}
}

// An address may try ten wrong tokens, and then one a second. The log has one line a minute. Who
// has signed in before is not slowed by others at the same address. A site that points its name at
// the relay reads neither metrics nor the page.
func TestSecurityTokensAndHosts(t *testing.T) {
	t.Parallel()
	s := start(t, []string{
		"OUTBOX_DATABASE_URL=" + pgtest.New(t, migrations.Outbox), "OUTBOX_DESTINATION_URL=http://127.0.0.1:1/", "OUTBOX_ADMIN_LISTEN=127.0.0.1:0", "OUTBOX_ADMIN_TOKEN=" + pageToken,
		"OUTBOX_ADMIN_PATH_PREFIX=/outbox", "OUTBOX_ADMIN_ALLOWED_HOSTS=relay.internal", "OUTBOX_METRICS_LISTEN=127.0.0.1:0",
		"OUTBOX_ADMIN_READ_TOKEN=" + readToken,
	})
	c := s.console(t)
	var cookie *http.Cookie // sent along
	var given []*http.Cookie
	get := func(url, host, token string) int {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
		pgtest.Must(t, err)
		if host != "" {
			r.Host = host
		}
		if token != "" {
			r.Header.Set("Authorization", "Bearer "+token)
		}
		if cookie != nil {
			r.AddCookie(cookie)
		}
		response, err := c.client.Do(r)
		pgtest.Must(t, err)
		pgtest.Must(t, response.Body.Close())
		given = response.Cookies()
		return response.StatusCode
	}
	metrics := "http://" + metricsAddress.FindStringSubmatch(s.stderr.String())[1]
	for host, want := range map[string]int{"": 200, "localhost:9464": 200, "relay.internal": 200, "evil.example": 421, "127.0.0.1.nip.io": 421} {
		if got := get(metrics+"/metrics", host, ""); got != want {
			t.Errorf("/metrics as %q: %d, want %d", host, got, want)
		}
		if got := get(metrics+"/healthz", host, ""); got == 421 {
			t.Errorf("/healthz as %q: %d", host, got)
		}
	}
	page := c.url + "/api/v1/overview"
	cookieOf := func(token string) *http.Cookie {
		if got := get(page, "", token); got != 200 || len(given) != 1 || !given[0].HttpOnly {
			t.Fatalf("a right token: %d with cookies %v", got, given)
		}
		return given[0]
	}
	administrators, readers := cookieOf(pageToken), cookieOf(readToken)
	answers := map[int]int{}
	for range 300 {
		answers[get(page, "", wrongToken)]++
	}
	if answers[401] < 10 || answers[401] > 100 || answers[429] != 300-answers[401] { // one more for each second that this took
		t.Errorf("answers to wrong tokens: %v", answers)
	}
	if got := get(page, "", ""); got != 401 { // nothing is tried
		t.Errorf("without a token: %d", got)
	}
	for cookie = administrators; answers[200] < 100; answers[200]++ {
		if got := get(page, "", pageToken); got != 200 || len(given) != 0 {
			t.Fatalf("who has signed in before: %d with cookies %v", got, given)
		}
	}
	testkit.Equal(t, "the cookie alone", get(page, "", ""), 401)
	forged := *administrators //nolint:gosec // G124: it is sent, not set
	forged.Value = strings.Repeat("0", len(forged.Value))
	for name, sent := range map[string]*http.Cookie{"a reader who guesses": readers, "a forged cookie": &forged} {
		cookie = sent
		testkit.Eventually(t, name+" is slowed", func() bool { return get(page, "", wrongToken) == 429 })
	}
	cookie = nil
	testkit.Eventually(t, "the right token", func() bool { return get(page, "", pageToken) == 200 })
	s.end(t, 0)
	if n := strings.Count(s.stderr.String(), "wrong tokens were sent to the page or the API"); n < 1 || n > 4 || strings.Contains(s.stderr.String(), "wrong-token") {
		t.Errorf("%d lines in the log\n%s", n, s.stderr)
	}
}

// Strangers who hold as many connections as they like keep neither a probe, nor a scraper, nor the
// page from being answered.
func TestSecurityStrangersKeepNoProbe(t *testing.T) {
	t.Parallel()
	s := start(t, []string{
		"OUTBOX_DATABASE_URL=" + pgtest.New(t, migrations.Outbox), "OUTBOX_DESTINATION_URL=http://127.0.0.1:1/", "OUTBOX_ADMIN_LISTEN=127.0.0.1:0",
		"OUTBOX_ADMIN_PATH_PREFIX=/outbox", "OUTBOX_METRICS_LISTEN=127.0.0.1:0",
	})
	c := s.console(t)
	metrics := "http://" + metricsAddress.FindStringSubmatch(s.stderr.String())[1]
	for _, url := range []string{metrics + "/healthz", metrics + "/metrics", c.url + "/"} {
		for range 400 {
			r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/none", http.NoBody)
			pgtest.Must(t, err)
			conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", r.URL.Host)
			pgtest.Must(t, err)
			defer conn.Close()
			pgtest.Must(t, r.Write(conn)) // and keeps the connection, which is idle from then on
			_, _ = conn.Read(make([]byte, 1))
		}
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
		pgtest.Must(t, err)
		response, err := c.client.Do(r)
		if err != nil || response.StatusCode != 200 {
			t.Fatalf("%s: %v, %v", url, response, err)
		}
		pgtest.Must(t, response.Body.Close())
	}
	s.end(t, 0)
}

// Each command that reads a configuration file warns if the file has a secret and other accounts of
// the machine may read it.
func TestSecurityOpenConfigurationIsWarnedOf(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	literal := "destinations: {a: {url: 'http://127.0.0.1:1/', signing_secrets: [" + goodSecret + "]}}\n"
	kept := writeFile(t, filepath.Join(t.TempDir(), "kept"), goodSecret)
	for name, c := range map[string]struct {
		text string
		mode os.FileMode
		warn bool
	}{
		"a secret, open to all":          {literal, 0o644, true},
		"a secret, for the owner":        {literal, 0o640, false},
		"a secret in a file":             {strings.Replace(literal, goodSecret, "'${KEPT}'", 1), 0o644, false},
		"a secret by its name":           {strings.Replace(literal, goodSecret, "'${SECRET}'", 1), 0o644, false},
		"no secret":                      {"destinations: {a: {url: 'http://127.0.0.1:1/'}}\n", 0o644, false},
		"a password in a URL":            {"destinations: {a: {url: 'http://127.0.0.1:1/', basic_auth: {username: u, password: hunter2}}}\n", 0o644, true},
		"a webhook without a key":        {"destinations: {a: {url: 'http://127.0.0.1:1/'}}\nalerts: {channels: [{webhook: 'http://127.0.0.1:1/hooks/outbox'}]}\n", 0o644, false},
		"a webhook with a key":           {"destinations: {a: {url: 'http://127.0.0.1:1/'}}\nalerts: {channels: [{webhook: 'http://127.0.0.1:1/hooks/hunter2?key=hunter2'}]}\n", 0o644, true},
		"one secret by name, one as is":  {"destinations: {a: {url: 'http://127.0.0.1:1/', signing_secrets: ['${SECRET}', " + goodSecret + "]}}\n", 0o644, true},
		"a header with a bearer's token": {"destinations: {a: {url: 'http://127.0.0.1:1/', headers: {Authorization: Bearer hunter2}}}\n", 0o644, true},
	} {
		file := writeFile(t, filepath.Join(t.TempDir(), "relay.yaml"), c.text)
		pgtest.Must(t, os.Chmod(file, c.mode))
		env := []string{"OUTBOX_DATABASE_URL=" + dsn, "SECRET=" + goodSecret, "KEPT_FILE=" + kept, "OUTBOX_CONFIG=" + file, "OUTBOX_METRICS_LISTEN=none", "OUTBOX_ADMIN_LISTEN=none"}
		for _, args := range [][]string{{"config", "check"}, {"doctor"}} {
			r := command(env, args...)
			if said := strings.Contains(r.stdout+r.stderr, "is readable by everyone on this machine; run: chmod o-r "+file+" if the relay's user can read it then"); said != c.warn || strings.Contains(r.stdout+r.stderr, "hunter2") {
				t.Errorf("%s: %v: %+v", name, args, r)
			}
		}
	}
	file := writeFile(t, filepath.Join(t.TempDir(), "relay.yaml"), literal)
	pgtest.Must(t, os.Chmod(file, 0o644))
	s := start(t, []string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_CONFIG=" + file})
	s.stderr.wait(t, "holds the secret of destinations.a.signing_secrets and is readable by everyone", s.code)
	s.end(t, 0)
}
