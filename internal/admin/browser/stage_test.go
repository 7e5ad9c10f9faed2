package browser

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/admin/control"
	"github.com/outbox-relay/outbox-relay/internal/admin/guard"
	dashboard "github.com/outbox-relay/outbox-relay/internal/admin/page"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

const token = "admin-token-of-32-characters-0001"

// A stage is an outbox with a page, and a browser that looks at it.
type stage struct {
	*testing.T
	db  *relaytest.Database
	url string
	ctx context.Context // of the browser's tab

	mu       sync.Mutex
	faults   []string // errors of the console, what opens a window, and requests to other hosts
	expected []string // parts of faults that the test provokes
}

// open serves the page of db and opens a browser. width is that of its window; scheme is light or
// dark.
func open(t *testing.T, db *relaytest.Database, past *history.Recorder, width int64, scheme string) *stage {
	t.Helper()
	s := &stage{T: t, db: db}
	c := control.New(control.Config{Outbox: ops.New(db.Pool), History: past})
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	running.Go(func() { c.Run(ctx) })
	p, err := dashboard.New(dashboard.Config{
		Control: c, Prefix: "/outbox", Relay: "billing-1", Version: "1.0.0", Database: "postgres://relay:***@db.internal:5432/billing", Log: zerolog.Nop(),
		Targets: func() map[string]string {
			return map[string]string{"logistics": "https://logistics.internal/webhooks/billing", "crm": "https://crm.internal/hooks/***/in", "analytics": "https://analytics.internal/in"}
		},
	})
	relaytest.Must(t, err)
	cfg := guard.Config{Address: "0.0.0.0:1", Token: token}
	mux := http.NewServeMux()
	mux.Handle("/outbox/", http.StripPrefix("/outbox", p.Handler()))
	server := httptest.NewServer(cfg.Handler(mux, p.Refuse))
	t.Cleanup(func() {
		server.Close()
		stop()
		running.Wait()
	})
	s.url = server.URL + "/outbox"
	s.browse(width, scheme)
	return s
}

// browse starts the browser. It signs in with a header, as the dialog of Basic authentication
// would.
func (s *stage) browse(width int64, scheme string) {
	s.Helper()
	program, err := exec.LookPath("chromium")
	if err != nil {
		s.Skip("there is no chromium; install it: apt-get install chromium")
	}
	options := append(slices.Clone(chromedp.DefaultExecAllocatorOptions[:]), chromedp.ExecPath(program), chromedp.NoSandbox, chromedp.DisableGPU,
		chromedp.Flag("disable-dev-shm-usage", true), chromedp.Flag("disable-component-update", true))
	allocator, endAllocator := chromedp.NewExecAllocator(context.WithoutCancel(s.Context()), options...)
	tab, endTab := chromedp.NewContext(allocator)
	bounded, endBounded := context.WithTimeout(tab, 3*time.Minute)
	s.ctx = bounded
	s.Cleanup(func() {
		_ = chromedp.Cancel(tab)
		endBounded()
		endTab()
		endAllocator()
		s.check()
	})
	chromedp.ListenTarget(s.ctx, s.listen)
	r, _ := http.NewRequestWithContext(s.Context(), http.MethodGet, s.url, http.NoBody)
	r.SetBasicAuth("ann", token)
	height := int64(800)
	s.run(
		network.Enable(), runtime.Enable(), log.Enable(), page.Enable(),
		network.SetExtraHTTPHeaders(network.Headers{"Authorization": r.Header.Get("Authorization")}),
		emulation.SetDeviceMetricsOverride(width, height, 1, width < 500),
		emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}, {Name: "prefers-reduced-motion", Value: "reduce"}}),
	)
}

// listen notes what should not happen.
func (s *stage) listen(event any) {
	note := func(format string, args ...any) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.faults = append(s.faults, fmt.Sprintf(format, args...))
	}
	switch e := event.(type) {
	case *runtime.EventExceptionThrown:
		note("exception: %s", e.ExceptionDetails.Error())
	case *runtime.EventConsoleAPICalled:
		if e.Type == runtime.APITypeError || e.Type == runtime.APITypeWarning {
			note("console: %s", e.Type)
		}
	case *log.EventEntryAdded:
		if e.Entry.Level == log.LevelError || e.Entry.Level == log.LevelWarning {
			note("log: %s %s", e.Entry.Text, e.Entry.URL)
		}
	case *network.EventRequestWillBeSent:
		if u, err := url.Parse(e.Request.URL); err != nil || u.Scheme != "data" && u.Scheme != "about" && !strings.HasPrefix(e.Request.URL, s.url) {
			note("a request to %s", e.Request.URL)
		}
	case *page.EventJavascriptDialogOpening:
		note("a dialog: %s", e.Message)
	}
}

// check reports what should not have happened.
func (s *stage) check() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, fault := range s.faults {
		if !slices.ContainsFunc(s.expected, func(part string) bool { return strings.Contains(fault, part) }) {
			s.Error(fault)
		}
	}
}

func (s *stage) run(actions ...chromedp.Action) {
	s.Helper()
	if err := chromedp.Run(s.ctx, actions...); err != nil {
		s.Fatal(err)
	}
}

// visit opens a page and waits until its scripts have run.
func (s *stage) visit(path string) {
	s.Helper()
	s.run(chromedp.Navigate(s.url + path))
	s.scriptsRun()
}

// scriptsRun waits until the scripts of a page have run.
func (s *stage) scriptsRun() {
	s.Helper()
	s.run(chromedp.WaitVisible("#theme-switch", chromedp.ByID))
}

// reads waits until the page has a text.
func (s *stage) reads(want string) {
	s.Helper()
	var text string
	defer func() {
		if s.Failed() {
			s.Logf("the page reads %q", text)
		}
	}()
	relaytest.Eventually(s, "the text "+want, func() bool {
		_ = chromedp.Run(s.ctx, chromedp.Evaluate(`document.body ? document.body.innerText : ""`, &text)) // it may be on the way to another page
		return strings.Contains(strings.ReplaceAll(text, "\u202f", ""), want)
	})
}

// evaluate returns the value of an expression.
func evaluate[T any](s *stage, expression string) (value T) {
	s.Helper()
	s.run(chromedp.Evaluate(expression, &value))
	return value
}

// lastHour stores two weeks of deliveries as relays would have: calm ones, and an outage.
func lastHour(db *relaytest.Database) *history.Recorder {
	db.Exec(`WITH shape AS (
		SELECT s.step, t.at, d.name, d.type, d.n * s.step * (1 + 0.25 * sin(extract(epoch FROM t.at) / 230) + 0.12 * sin(extract(epoch FROM t.at) / 50) + 0.15 * random()) AS n, d.slow
		FROM (VALUES (1, interval '1 minute', interval '24 hours'), (60, interval '1 hour', interval '14 days')) s (step, width, back)
		CROSS JOIN LATERAL generate_series(date_bin(s.width, now() - s.back, 'epoch'), now(), s.width) t (at)
		CROSS JOIN (VALUES ('logistics', 'invoice.created', 420, 3), ('logistics', 'invoice.paid', 300, 3), ('crm', 'customer.moved', 132, 5), ('analytics', 'invoice.paid', 360, 4)) d (name, type, n, slow)
	), counts AS (
		SELECT step, at, name, type, CASE WHEN name = 'analytics' AND at > now() - interval '9 minutes' THEN 0 ELSE n END::int AS delivered,
		       CASE WHEN name = 'crm' AND extract(minute FROM at)::int % 14 = 4 THEN 3 ELSE 0 END AS failed,
		       CASE WHEN name = 'crm' AND extract(minute FROM at)::int % 6 = 5 THEN 8 ELSE 0 END AS retried,
		       CASE WHEN name = 'analytics' AND at > now() - interval '9 minutes' THEN 12 ELSE 0 END AS probes, slow
		FROM shape
	), sums AS (
		SELECT step, at, coalesce(name, '') AS name, coalesce(type, '') AS type, sum(delivered) AS delivered, sum(failed) AS failed, sum(retried) AS retried, sum(probes) AS probes,
		       max(slow)::int AS slow FROM counts GROUP BY step, at, GROUPING SETS ((name, type), (name), (type), ())
	)
	INSERT INTO outbox_history (step, destination, at, event_type, delivered, failed, retried, probes, backlog, took, latency)
	SELECT step, name, at, type, delivered, failed, retried, probes,
	       CASE WHEN type = '' THEN CASE WHEN name IN ('', 'analytics') AND probes > 0 THEN extract(epoch FROM at - (now() - interval '10 minutes')) * 0.15 ELSE 3 * random() END END::int,
	       ARRAY(SELECT (delivered * CASE WHEN i < slow + 3 THEN 0 WHEN i < slow + 8 THEN 0.19 WHEN i < slow + 10 THEN 0.024 ELSE 0.002 * random() END)::int FROM generate_series(1, 16) i),
	       ARRAY(SELECT (delivered * CASE WHEN i < slow + 5 THEN 0 WHEN i < slow + 10 THEN 0.19 WHEN i < slow + 12 THEN 0.024 ELSE 0.002 * random() END)::int FROM generate_series(1, 18) i)
	FROM sums`)
	return history.New()
}

// outage fills an outbox as an operator finds it at night: one destination is down, one refuses
// some events.
func outage(t *testing.T) *relaytest.Database {
	t.Helper()
	db := relaytest.Covered(t, "logistics")
	db.Exec(`DELETE FROM outbox_route; INSERT INTO outbox_route (pattern, destination) VALUES ('invoice.*', 'logistics'), ('customer.*', 'crm'), ('invoice.*', 'analytics')`)
	db.Exec(`INSERT INTO outbox_relay (name, version, session_pid, started_at) VALUES ('billing-1', '1.0.0', 41, now() - interval '3 days 7 hours'), ('billing-2', '1.0.0', 42, now() - interval '58 minutes')`)
	db.Exec(`INSERT INTO outbox_relay_destination (relay_id, destination) SELECT i, d FROM generate_series(1, 2) i, unnest('{logistics,analytics,crm}'::text[]) d`)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, related_reference, created_at, available_at)
		SELECT (ARRAY ['invoice.created', 'invoice.paid', 'customer.moved', 'invoice.cancelled'])[1 + i % 4], json_build_object('invoice', i, 'amount', i * 7, 'customer', json_build_object('name', 'Nordlicht GmbH', 'country', 'XK'), 'lines', json_build_array(json_build_object('sku', 'A-17', 'price', 12.50))),
		       'billing/2026/' || lpad((70210 + i)::text, 6, '0'), 'customer-' || 100 + i % 83, 'INV-' || 70210 + i, now() - interval '4 seconds' * (1400 - i) - interval '41 milliseconds', now() - interval '4 seconds' * (1400 - i) - interval '41 milliseconds'
		FROM generate_series(1, 1400) i`)
	db.Exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now() - interval '4 seconds' * (1400 - event_id), attempts = 1,
		last_attempt_at = now() - interval '4 seconds' * (1400 - event_id), last_http_status = 204 WHERE destination <> 'analytics' OR event_id < 1290`)
	db.Exec(`UPDATE outbox_delivery SET status = 'failed', delivered_at = NULL, attempts = 1, last_http_status = 422, last_reason = 'rejected',
		last_error = '422 Unprocessable Entity: unknown country "XK" in address' WHERE destination = 'crm' AND event_id % 41 = 1`)
	db.Exec(`UPDATE outbox_delivery SET status = 'failed', delivered_at = NULL, attempts = 8, last_http_status = NULL, last_reason = 'timeout',
		last_error = 'attempt 8 of 8: no answer within 10s' WHERE destination = 'crm' AND event_id % 97 = 5`)
	db.Exec(`UPDATE outbox_delivery SET attempts = 2, last_http_status = 503, last_reason = 'unavailable', last_error = '503 Service Unavailable: upstream is restarting',
		last_attempt_at = now() - interval '40 seconds', next_attempt_at = now() + interval '4 minutes' WHERE destination = 'analytics' AND status = 'pending' AND event_id IN (1301, 1305, 1309)`)
	db.Exec(`INSERT INTO outbox_destination (destination, breaker, breaker_opened_at, breaker_until, breaker_error)
		VALUES ('analytics', 'open', now() - interval '9 minutes', now() + interval '4 seconds', '503 Service Unavailable: upstream is restarting')
		ON CONFLICT (destination) DO UPDATE SET breaker = 'open', breaker_opened_at = excluded.breaker_opened_at, breaker_until = excluded.breaker_until, breaker_error = excluded.breaker_error`)
	db.Exec(`INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay_id, destination, outcome, reason, http_status, error)
		SELECT 1301, a, now() - interval '6 minutes 35 seconds' + make_interval(secs => s), ms, a, 1, 'analytics', 'retry', 'unavailable', 503, '503 Service Unavailable: upstream is restarting'
		FROM (VALUES (1, 0, 31), (2, 7, 28)) v (a, s, ms)`)
	db.Exec(`INSERT INTO outbox_alert (rule, subject, opened_at, count, detail, first_event_id) VALUES
		('breaker_open', 'analytics', now() - interval '9 minutes', 1, '503 Service Unavailable: upstream is restarting', 1301), ('failed', 'crm', now() - interval '3 hours', 11, '422 rejected: unknown country', 42)`)
	db.Exec(`INSERT INTO outbox_alert_past (rule, subject, began_at, resolved_at, returned, count, first_event_id, first_error, notices)
		SELECT 'breaker_open', 'logistics', now() - interval '2 days', now() - interval '47 hours', 0, 1, 7, '503 Service Unavailable',
			jsonb_build_array(jsonb_build_object('channel', 'slack-a8351fcf', 'sent_at', now() - interval '2 days', 'ended_at', now() - interval '47 hours'))`)
	db.Exec(`INSERT INTO outbox_audit (actor, origin, action, state, selection, matched, done, destination) VALUES
		('ann@10.0.0.7', 'page', 'replay', 'done', '{"destination": "crm", "statuses": ["failed"], "type": "customer.*"}', 42, 42, 'crm'),
		('bob@laptop', 'cli', 'discard', 'interrupted', '{"event_ids": [17, 23], "destination": "crm"}', 2, 1, 'crm')`)
	return db
}
