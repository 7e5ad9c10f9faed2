package drill

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

func parseURL(t testing.TB, text string) *url.URL {
	t.Helper()
	u, err := url.Parse(text)
	pgtest.Must(t, err)
	return u
}

// secretTexts are those of config, as receivers are given them.
var secretTexts = []string{"whsec_new1AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=", "whsec_new2AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}

// database returns a receiver's database with a table of effects.
func database(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.Pool(t, pgtest.New(t, migrations.Inbox))
	pgtest.Exec(t, pool, tables)
	return pool
}

func insert(ctx context.Context, tx pgx.Tx, event consumer.Event, _ struct {
	Drill string `json:"drill"`
},
) error {
	_, err := tx.Exec(ctx, insertEffect, event.IdempotencyKey)
	return err
}

func router() *consumer.Router[pgx.Tx] {
	r := consumer.NewRouter()
	consumer.HandleJSON(r, "drill.created", 1, insert)
	return r
}

func consumerConfig() consumer.Config {
	return consumer.Config{Receiver: "drilled", Secrets: secretTexts, Limits: consumer.Limits{BodyTimeout: stall}, Logger: slog.New(slog.DiscardHandler)}
}

// passes asserts that a receiver does everything right.
func passes(t *testing.T, cfg Config) Report {
	t.Helper()
	report, err := Run(t.Context(), cfg)
	pgtest.Must(t, err)
	for _, r := range report.Checks {
		if r.Outcome != Passed {
			t.Errorf("%s: %s: %s", r.Name, r.Outcome, r.Found)
		}
	}
	if len(report.Checks) != len(table) || report.Requests < 300 {
		t.Errorf("%d checks, %d requests", len(report.Checks), report.Requests)
	}
	return report
}

func TestOursPass(t *testing.T) {
	t.Parallel()
	t.Run("consumer.New", func(t *testing.T) {
		t.Parallel()
		pool := database(t)
		receive, err := consumer.New(pool, consumerConfig(), router().Dispatch)
		pgtest.Must(t, err)
		mux := http.NewServeMux()
		mux.Handle("POST /webhooks/finance", receive)
		passes(t, config(t, serve(t, mux, stall)+"/webhooks/finance", countEffects(pool)))
	})
	t.Run("inbox.New", func(t *testing.T) {
		t.Parallel()
		pool := database(t)
		invoices, err := inbox.New(pool, inbox.Config{Config: consumerConfig(), Handle: router().Dispatch, Workers: 2})
		pgtest.Must(t, err)
		ctx, cancel := context.WithCancel(context.Background())
		var running sync.WaitGroup
		running.Go(func() { _ = invoices.Run(ctx) }) // it fails as its context ends
		t.Cleanup(func() { cancel(); running.Wait() })
		passes(t, config(t, serve(t, invoices.Handler(), stall), countEffects(pool)))
	})
	t.Run("over TLS", func(t *testing.T) {
		t.Parallel()
		pool := database(t)
		receive, err := consumer.New(pool, consumerConfig(), router().Dispatch)
		pgtest.Must(t, err)
		server := httptest.NewUnstartedServer(receive)
		server.Config.ReadHeaderTimeout, server.EnableHTTP2 = stall, true
		server.Config.ErrorLog = log.New(io.Discard, "", 0) // a client that does not trust the server is one of the tests
		server.StartTLS()
		t.Cleanup(func() { server.CloseClientConnections(); server.Close() })
		cfg := config(t, server.URL, countEffects(pool))
		cfg.TLS = server.Client().Transport.(*http.Transport).TLSClientConfig
		cfg.Only = []string{"duplicate", "cut-before-answer", "chunked", "header-case"}
		report, err := Run(t.Context(), cfg)
		pgtest.Must(t, err)
		if report.Count(Passed) != len(cfg.Only)+1 {
			t.Errorf("%+v", report)
		}
		cfg.TLS = nil // the system's authorities do not know this one
		report, err = Run(t.Context(), cfg)
		pgtest.Must(t, err)
		if r := report.Checks[0]; r.Outcome != Failed || !strings.Contains(r.Found, "certificate") || report.Count(Skipped) != len(table)-1 {
			t.Errorf("%+v", r)
		}
	})
	t.Run("the unchanged mutant", func(t *testing.T) {
		t.Parallel()
		pool := database(t)
		rc := newReceiver(t, "right", pool, secret(t, "new1"), secret(t, "new2"))
		passes(t, config(t, serve(t, rc, stall), countEffects(pool)))
	})
}

// links are what the headings of a document are linked as.
func links(t *testing.T, name string) map[string]bool {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../..", name))
	pgtest.Must(t, err)
	found := map[string]bool{}
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.+)$`).FindAllStringSubmatch(string(text), -1) {
		anchor := strings.ReplaceAll(strings.ToLower(heading[1]), " ", "-")
		found[name+"#"+regexp.MustCompile(`[^a-z0-9-]`).ReplaceAllString(anchor, "")] = true
	}
	return found
}

// Every check says what it does, and links to a heading that exists.
func TestTable(t *testing.T) {
	t.Parallel()
	known := map[string]bool{}
	for _, name := range []string{"docs/receiving.md", "docs/receiving-elsewhere.md", "docs/wire.md"} {
		for link := range links(t, name) {
			known[link] = true
		}
	}
	seen := map[string]bool{}
	for _, c := range Checks() {
		if c.Name == "" || c.Sends == "" || c.Expects == "" || !strings.HasSuffix(c.Remedy, ".") && !strings.HasSuffix(c.Remedy, ")") || c.run == nil || seen[c.Name] {
			t.Errorf("%+v is incomplete or stands twice", c)
		}
		if !known[c.Link] {
			t.Errorf("%s links to %s, which does not exist", c.Name, c.Link)
		}
		seen[c.Name] = true
	}
}

func TestStagingHosts(t *testing.T) {
	t.Parallel()
	for host, want := range map[string]bool{
		"localhost": true, "127.0.0.1": true, "::1": true, "127.8.9.1": true, "receiver.localhost": true, "Logistics.STAGING.example.com": true, "logistics-test2.example.com": true,
		"staging": true, "logistics.test": true, "dev.example.com.": true, "logistics.staging.svc.cluster.local": true, "qa-1.eu.example.com": true,
		"logistics.example.com": false, "example.com": false, "test.de": false, "example.dev": false, "api.example.dev": false, "latest.example.com": false, "logistics.internal": false,
		"contest.example.com": false, "10.0.0.1": false, "0.0.0.0": false, "192.0.2.1": false, "staging.com": false, "logistics": false, "": false,
		"stage.co.uk": false, "api.test-prep.co.uk": false, "hooks.dev-tools.com.au.": false, "test.com.br": false, "test.tokyo.jp": false, "staging.example.io": false,
		"staging.example.co.uk": true, "logistics.test-2.example.com.au": true, "app.staging.example.com.br": true, "qa.eu.example.de": true,
	} {
		if got := isStaging(host, ""); got != want {
			t.Errorf("%q: %t", host, got)
		}
	}
	if !isStaging("logistics-green.example.com", "GREEN") || !isStaging("logistics.internal", "logistics") || isStaging("evergreen.example.com", "green") || isStaging("10.0.0.1", "10") {
		t.Error("the word that is given is not found where it is, or where it is not")
	}
}

// A host that is not marked is sent one request, which asks for nothing, and events only if the
// answer allows it.
func TestConsent(t *testing.T) {
	t.Parallel()
	for answer, want := range map[string]error{"": ErrProduction, "yes": ErrProduction, ConsentAllowed: nil} {
		var methods []string
		var mu sync.Mutex
		listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp4", "0.0.0.0:0")
		pgtest.Must(t, err)
		server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			methods = append(methods, r.Method)
			mu.Unlock()
			// A receiver that does not look at the method takes an event for one.
			if r.Header.Del("User-Agent"); r.Method == http.MethodOptions && (len(r.Header) > 0 || r.ContentLength != 0) {
				t.Errorf("the receiver was asked with %v and %d bytes", r.Header, r.ContentLength)
			}
			w.Header().Set(Consent, answer)
			w.WriteHeader(http.StatusMethodNotAllowed)
		}))
		_ = server.Listener.Close()
		server.Listener = listener
		server.Start()
		t.Cleanup(server.Close)
		cfg := config(t, "http://"+listener.Addr().String(), nil)
		cfg.URL.Host = "0.0.0.0:" + cfg.URL.Port() // this machine, and no address of loopback
		cfg.Header = http.Header{"Authorization": {"Bearer credentials"}}
		_, err = Run(t.Context(), cfg)
		if !errors.Is(err, want) {
			t.Errorf("%q: %v, want %v", answer, err, want)
		}
		mu.Lock()
		if got := strings.Join(methods, " "); got != map[bool]string{true: "OPTIONS", false: "OPTIONS POST"}[want != nil] {
			t.Errorf("%q: the receiver was sent %s", answer, got)
		}
		mu.Unlock()
	}
}

// What takes effect once too often after its check has passed is found at the end.
func TestLateEffectsAreFound(t *testing.T) {
	t.Parallel()
	pool := database(t)
	rc := newReceiver(t, "late", pool, secret(t, "new1"), secret(t, "new2"))
	right, asked := countEffects(pool), atomic.Int64{}
	cfg := config(t, serve(t, rc, rc.headerTime), func(ctx context.Context, key string) (int, error) {
		n, err := right(ctx, key)
		if strings.Contains(key, "-duplicate-") && asked.Add(1) > 1 {
			n++
		}
		return n, err
	})
	cfg.Only = []string{"duplicate"}
	report, err := Run(t.Context(), cfg)
	pgtest.Must(t, err)
	if got := outcomes(report, Failed); !slices.Equal(got, []string{"duplicate"}) || !strings.Contains(report.Checks[2].Found, "the last one came later") {
		t.Errorf("%q failed: %+v", got, report.Checks[2])
	}
}

// A run that is ended says why, and leaves nothing running.
func TestRunEnds(t *testing.T) {
	t.Parallel()
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	pool := database(t)
	rc := newReceiver(t, "ended", pool, secret(t, "new1"), secret(t, "new2"))
	cfg := config(t, serve(t, rc, time.Hour), countEffects(pool))
	cfg.Done = func(r Result) {
		if r.Name == "at-once" {
			cancel(cause)
		}
	}
	if _, err := Run(ctx, cfg); !errors.Is(err, cause) {
		t.Errorf("got %v", err)
	}
	for _, change := range []func(*Config){func(c *Config) { c.Only = []string{"duplicates"} }, func(c *Config) { c.Skip = []string{""} }} {
		bad := cfg
		change(&bad)
		if _, err := Run(t.Context(), bad); !errors.Is(err, ErrUnknownCheck) {
			t.Errorf("got %v", err)
		}
	}
}

// docs/drill.md has a row for each check.
func TestDocumentHasTheTable(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/drill.md")
	pgtest.Must(t, err)
	var rows strings.Builder
	for _, c := range Checks() {
		fmt.Fprintf(&rows, "| `%s` | %s | %s |\n", c.Name, c.Sends, c.Expects)
	}
	if !strings.Contains(string(text), rows.String()) {
		t.Errorf("docs/drill.md lacks\n%s", rows.String())
	}
}

// try runs a drill against a mutant and asserts that it is named rightly. With all, every check is
// made, and those that have nothing to do with its mistake must find nothing.
func (m mutant) try(t *testing.T, pool *pgxpool.Pool, all bool) {
	rc := newReceiver(t, m.name, pool, secret(t, "new1"), secret(t, "new2"))
	m.mutate(t, rc)
	t.Cleanup(rc.working.Wait)
	cfg := config(t, serve(t, rc, rc.headerTime), countEffects(pool))
	if m.config != nil {
		m.config(&cfg)
	}
	cfg.For = 500 * time.Millisecond
	if !all {
		cfg.Only = append(slices.Clone(m.finds), cfg.Only...)
	}
	for _, slow := range []string{"under-load", "slow-body", "half-request"} {
		if !slices.Contains(append(m.finds, cfg.Only...), slow) {
			cfg.Skip = append(cfg.Skip, slow)
		}
	}
	report, err := Run(t.Context(), cfg)
	pgtest.Must(t, err)
	for _, r := range report.Checks {
		must, wrong := slices.Contains(m.finds, r.Name), r.Outcome == Failed || r.Outcome == Warned
		switch {
		case must && !wrong:
			t.Errorf("%s does not find it: %s %s", r.Name, r.Outcome, r.Found)
		case wrong && !must && !slices.Contains(m.may, r.Name):
			t.Errorf("%s finds what is not there: %s", r.Name, r.Found)
		case r.Name == m.finds[0] && !strings.Contains(r.Found, m.says):
			t.Errorf("%s says %q, want it to contain %q", r.Name, r.Found, m.says)
		}
	}
}

func TestMutantsAreNamed(t *testing.T) {
	t.Parallel()
	pool := database(t)
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			m.try(t, pool, false)
		})
	}
}

func TestMutantsAreNamedAmongAllChecks(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	pool := database(t)
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			m.try(t, pool, true)
		})
	}
}
