package main

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// An address may try ten wrong tokens, and then one a second. The log has one line a minute. A site that points its name at the relay
// reads neither metrics nor the page.
func TestSecurityTokensAndHosts(t *testing.T) {
	t.Parallel()
	s := start(t, []string{
		"OUTBOX_DATABASE_URL=" + pgtest.New(t, migrations.Outbox), "OUTBOX_DESTINATION_URL=http://127.0.0.1:1/", "OUTBOX_ADMIN_LISTEN=127.0.0.1:0", "OUTBOX_ADMIN_TOKEN=" + pageToken,
		"OUTBOX_ADMIN_PATH_PREFIX=/outbox", "OUTBOX_ADMIN_ALLOWED_HOSTS=relay.internal", "OUTBOX_METRICS_LISTEN=127.0.0.1:0",
	})
	c := s.console(t)
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
		response, err := c.client.Do(r)
		pgtest.Must(t, err)
		pgtest.Must(t, response.Body.Close())
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
	answers := map[int]int{}
	for range 300 {
		answers[get(page, "", "wrong-token-of-32-characters-001")]++
	}
	if answers[401] < 10 || answers[401] > 100 || answers[429] != 300-answers[401] { // one more for each second that this took
		t.Errorf("answers to wrong tokens: %v", answers)
	}
	if got := get(page, "", ""); got != 401 { // nothing is tried
		t.Errorf("without a token: %d", got)
	}
	waitUntil(t, "the right token", func() bool { return get(page, "", pageToken) == 200 })
	s.signals <- syscall.SIGTERM
	if code := <-s.code; code != 0 {
		t.Errorf("exit code %d", code)
	}
	if n := strings.Count(s.stderr.String(), "wrong tokens were sent to the page or the API"); n < 1 || n > 2 || strings.Contains(s.stderr.String(), "wrong-token") {
		t.Errorf("%d lines in the log\n%s", n, s.stderr)
	}
}

// Each command that reads a configuration file warns if the file has a secret and other accounts of the machine may read it.
func TestSecurityOpenConfigurationIsWarnedOf(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	literal := "destinations: {a: {url: 'http://127.0.0.1:1/', signing_secrets: [" + goodSecret + "]}}\n"
	for name, c := range map[string]struct {
		text string
		mode os.FileMode
		warn bool
	}{
		"a secret, open to all":          {literal, 0o644, true},
		"a secret, for the owner":        {literal, 0o640, false},
		"a secret by its name":           {strings.Replace(literal, goodSecret, "'${SECRET}'", 1), 0o644, false},
		"no secret":                      {"destinations: {a: {url: 'http://127.0.0.1:1/'}}\n", 0o644, false},
		"a password in a URL":            {"destinations: {a: {url: 'http://127.0.0.1:1/', basic_auth: {username: u, password: hunter2}}}\n", 0o644, true},
		"one secret by name, one as is":  {"destinations: {a: {url: 'http://127.0.0.1:1/', signing_secrets: ['${SECRET}', " + goodSecret + "]}}\n", 0o644, true},
		"a header with a bearer's token": {"destinations: {a: {url: 'http://127.0.0.1:1/', headers: {Authorization: Bearer hunter2}}}\n", 0o644, true},
	} {
		file := writeFile(t, filepath.Join(t.TempDir(), "relay.yaml"), c.text)
		pgtest.Must(t, os.Chmod(file, c.mode))
		env := []string{"OUTBOX_DATABASE_URL=" + dsn, "SECRET=" + goodSecret, "OUTBOX_CONFIG=" + file, "OUTBOX_METRICS_LISTEN=off", "OUTBOX_ADMIN_LISTEN=off"}
		for _, args := range [][]string{{"config", "check"}, {"doctor"}} {
			r := command(env, args...)
			if said := strings.Contains(r.stdout+r.stderr, "is readable by everyone on this machine; run: chmod o-r "+file); said != c.warn || strings.Contains(r.stdout+r.stderr, "hunter2") {
				t.Errorf("%s: %v: %+v", name, args, r)
			}
		}
	}
	file := writeFile(t, filepath.Join(t.TempDir(), "relay.yaml"), literal)
	pgtest.Must(t, os.Chmod(file, 0o644))
	s := start(t, []string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_CONFIG=" + file})
	s.stderr.wait(t, "holds the secret of destinations.a.signing_secrets and is readable by everyone", s.code)
	s.signals <- syscall.SIGTERM
	if code := <-s.code; code != 0 {
		t.Errorf("exit code %d", code)
	}
}
