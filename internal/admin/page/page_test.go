package page

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"html"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/admin/control"
	"github.com/outbox-relay/outbox-relay/internal/admin/guard"
	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

const (
	adminToken = "admin-token-of-32-characters-0001"
	readToken  = "read-token-of-32-characters-00002"
)

// A site is the page below a prefix, over real HTTP, as a browser without scripts sees it.
type site struct {
	*testing.T
	url, token string
	client     *http.Client
	header     http.Header
	within     time.Duration // how long one answer may ask the database; 0: as long as it wants
	forget     func()        // makes the next page read the status again
}

func serve(t *testing.T, pool *pgxpool.Pool) *site {
	t.Helper()
	c := control.New(control.Config{Outbox: ops.New(pool), History: history.New()})
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	running.Go(func() { c.Run(ctx) })
	p, err := New(Config{Control: c, Prefix: "/ops", Relay: "test", Version: "1.2.3", Database: "postgres://localhost/app", Log: zerolog.Nop()})
	relaytest.Must(t, err)
	open := guard.Config{Address: "0.0.0.0:1", Token: adminToken, ReadToken: readToken}
	site := &site{T: t, token: adminToken, header: http.Header{}, forget: c.Forget}
	s := httptest.NewServer(open.Handler(http.StripPrefix("/ops", site.bounded(p.Handler())), p.Refuse))
	t.Cleanup(func() {
		s.Close()
		stop()
		running.Wait()
	})
	site.url, site.client = s.URL, s.Client()
	return site
}

func (s *site) bounded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s.within > 0 {
			ctx, cancel := context.WithTimeout(r.Context(), s.within)
			defer cancel()
			r = r.WithContext(ctx)
		}
		next.ServeHTTP(w, r)
	})
}

// get follows redirects, as a browser does.
func (s *site) get(path string) (int, string) {
	s.Helper()
	return s.send(http.MethodGet, path, nil)
}

func (s *site) post(path string, form url.Values) (int, string) {
	s.Helper()
	return s.send(http.MethodPost, path, form)
}

func (s *site) send(method, path string, form url.Values) (int, string) {
	s.Helper()
	r, err := http.NewRequestWithContext(s.Context(), method, s.url+"/ops"+path, strings.NewReader(form.Encode()))
	relaytest.Must(s, err)
	r.SetBasicAuth("ann", s.token)
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	for name, values := range s.header {
		r.Header[name] = values
	}
	if host := s.header.Get("Host"); host != "" {
		r.Host = host
	}
	response, err := s.client.Do(r)
	relaytest.Must(s, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	relaytest.Must(s, err)
	if csp := response.Header.Get("Content-Security-Policy"); !strings.Contains(csp, "script-src 'self'") || strings.Contains(csp, "unsafe") {
		s.Errorf("%s: policy %q", path, csp)
	}
	return response.StatusCode, string(body)
}

// gets checks the answer to a GET: its status, and texts on the page.
func (s *site) gets(want int, path string, texts ...string) {
	s.Helper()
	status, body := s.get(path)
	s.wants(want, path, status, body, texts)
}

// posts does so for a POST.
func (s *site) posts(want int, path string, form url.Values, texts ...string) {
	s.Helper()
	status, body := s.post(path, form)
	s.wants(want, path, status, body, texts)
}

func (s *site) wants(want int, path string, status int, body string, texts []string) {
	s.Helper()
	testkit.Equal(s, path, status, want)
	testkit.Contains(s, path, body, texts...)
}

// pages are all of them, with the one event and operation that the tests make.
func pages() []string {
	return []string{"/", "/destinations/default", "/events", "/events?status=failed", "/events/1", "/operations/1", "/operations/new?action=replay&id=1", "/alerts", "/relays", "/audit"}
}

// Every text that others write stays text, and a payload stays hidden, on every page.
func TestCanariesStayInert(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	const canary = `"'><script>alert(4471)</script><img src=x onerror=alert(4471)>{{.}}`
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, related_reference, headers)
		SELECT replace($1, ' ', '-'), json_build_object('secret', 'hidden-payload-4471'), $1, $1, $1, jsonb_build_object('x-a', 'canary-header')`, canary)
	db.Settled("failed", "true")
	db.Exec(`UPDATE outbox_delivery SET last_error = $1, last_reason = $1`, canary)
	db.Exec(`INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay_id, destination, outcome, reason, http_status, error)
		VALUES (1, 1, now(), 12, 1, 1, 'default', 'retry', $1, 500, $1)`, canary)
	db.Exec(`INSERT INTO outbox_relay (name, version, quarantined) VALUES ($1, $1, $1)`, canary)
	db.Exec(`INSERT INTO outbox_alert (rule, subject, detail, first_error) VALUES ('failed', $1, $1, $1)`, canary)
	db.Exec(`INSERT INTO outbox_audit (actor, origin, action, state, detail, selection) VALUES ($1, 'page', 'replay', 'interrupted', $1, jsonb_build_object('type', $1::text))`, canary)
	db.Exec(`INSERT INTO outbox_destination (destination, paused, paused_at, paused_reason, breaker, breaker_opened_at, breaker_until, breaker_error)
		VALUES ('default', true, now(), $1, 'open', now(), now(), $1)`, canary)
	s := serve(t, db.Pool)
	for _, path := range append(pages(), "/events?type="+url.QueryEscape(canary), "/events?key="+url.QueryEscape(canary), "/nowhere"+url.PathEscape(canary), "/?done="+url.QueryEscape(canary)) {
		status, body := s.get(path)
		if status >= 500 {
			t.Errorf("%s: %d\n%s", path, status, body)
		}
		for _, active := range []string{"<script>alert", "<img src=x", "onerror=alert(4471)>", "hidden-payload-4471"} {
			if strings.Contains(body, active) {
				t.Errorf("%s has %q", path, active)
			}
		}
		if scripts := regexp.MustCompile(`<script(?:[^>]*)>`).FindAllString(body, -1); len(scripts) != 4 {
			t.Errorf("%s: scripts %q", path, scripts)
		}
		if strings.Contains(body, "http://") || strings.Contains(body, "https://") && !strings.Contains(path, "events/1") {
			t.Errorf("%s refers to another host", path)
		}
	}
	if _, body := s.post("/events/1/reveal", nil); !strings.Contains(body, "hidden-payload-4471") {
		t.Error("an administrator cannot see the payload")
	}
	if got := relaytest.Row[string](db, `SELECT actor || ' ' || origin FROM outbox_audit WHERE action = 'reveal_payload'`); !strings.HasPrefix(got, "ann@127.0.0.1 page") {
		t.Error(got)
	}
}

var field = regexp.MustCompile(`name="(\w+)" value="([^"]*)"`)

// Both times are shown, each by its name: how long receivers take, and how long events take from
// when they are due.
func TestPageNamesResponseTimeAndLatency(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "k")
	s := serve(t, db.Pool)
	for _, page := range []string{"/", "/destinations/default"} {
		s.gets(200, page, "<dt>Response <small>p50, 1h", "<dt>From due <small>p50, 1h", `aria-label="Response time"`, `aria-label="Latency from due"`, "latency_p99")
	}
}

// From the pages of a destination and of an event to the preview of a retry, and from there to an
// operation of the audit.
func TestRetryNowFromThePage(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(2, "k")
	db.Exec(`UPDATE outbox_delivery SET attempts = 1, last_attempt_at = now(), last_reason = 'unauthorized', next_attempt_at = now() + interval '4 hours'`)
	db.Exec(`INSERT INTO outbox_destination (destination, paused, paused_at) VALUES ('default', true, now())`)
	s := serve(t, db.Pool)
	s.gets(200, "/destinations/default", "operations/new?action=retry&amp;destination=default")
	s.gets(200, "/events/1", `name="action" value="retry"`)
	_, body := s.get("/operations/new?action=retry&destination=default")
	if !strings.Contains(body, "Retry 2 deliveries?") || !strings.Contains(body, "outbox-relay resume default") {
		t.Fatal(body)
	}
	form := url.Values{}
	for _, match := range field.FindAllStringSubmatch(body, -1) {
		form.Set(match[1], html.UnescapeString(match[2]))
	}
	s.posts(200, "/operations", form, "Retry</h1>")
	relaytest.Becomes(db, "retry page done 2", `SELECT concat_ws(' ', action, origin, state, done) FROM outbox_audit`)
	testkit.Equal(t, "due", relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE next_attempt_at <= now() AND attempts = 1 AND NOT replay`), 2)
}

// From a filter to a preview to a replay, and a pause and its end, with forms alone.
func TestFormsWorkWithoutScripts(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(3, "k")
	db.Settled("failed", "event_id < 3")
	s := serve(t, db.Pool)
	s.gets(200, "/", "2 deliveries to &#34;default&#34; failed; last:")
	_, body := s.get("/operations/new?action=replay&status=failed&destination=default")
	if !strings.Contains(body, "Replay 2 deliveries?") {
		t.Fatal(body)
	}
	if strings.Contains(body, `id="rate"`) {
		t.Error("what is over at once asks for a rate")
	}
	_, body = s.get("/operations/new?action=replay&status=failed&destination=default&rate=1")
	testkit.Contains(t, "found", body, "spread over about 2s, 1 delivery a second", `name="status" value="failed"`, `id="rate" value="1"`)
	s.gets(422, "/operations/new?action=replay&status=failed&destination=default&rate=fast", "is not a number of deliveries a second")
	_, body = s.get("/operations/new?action=replay&status=failed&destination=default&rate=1000")
	form := url.Values{}
	for _, match := range field.FindAllStringSubmatch(body, -1) {
		form.Set(match[1], html.UnescapeString(match[2]))
	}
	wider := url.Values{"token": form["token"], "order": {strings.Replace(form.Get("order"), `"statuses":["failed"]`, `"statuses":["delivered"]`, 1)}}
	s.posts(409, "/operations", wider, "preview the same selection")
	status, body := s.post("/operations", form)
	if status != 200 || !strings.Contains(body, "Replay</h1>") {
		t.Fatal(status, body)
	}
	relaytest.Becomes(db, "done 2 1000", `SELECT state || ' ' || done || ' ' || (selection->>'rate') FROM outbox_audit`)
	testkit.Equal(t, "replayed", relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE replay AND status = 'pending'`), 2)
	for range 2 { // two clicks: the second answer is the one that is seen
		s.posts(200, "/destinations/default/pause", url.Values{"reason": {"until <Monday>"}}, "Paused.", "until &lt;Monday&gt;")
	}
	for range 2 {
		s.posts(200, "/destinations/default/resume", nil, "Resumed.")
	}
	db.Exec(`INSERT INTO outbox_alert (rule, subject) VALUES ('lag', 'default')`)
	about := url.Values{"rule": {"lag"}, "subject": {"default"}}
	s.posts(200, "/alerts/acknowledge", about, "Acknowledged.", "acknowledged by")
	s.posts(200, "/alerts/silence", about, "silent until", "End silence")
	if status, body := s.post("/alerts/unsilence", about); status != 200 || strings.Contains(body, "silent until") {
		t.Errorf("%d %s", status, body)
	}
	s.posts(404, "/destinations/nowhere/pause", nil)
}

// An operation whose process was killed says so, and continues from the page.
func TestKilledOperationGoesOn(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(5, "k")
	db.Settled("failed", "true")
	db.Exec(`INSERT INTO outbox_audit (actor, origin, action, state, selection, matched, done, updated_at)
		VALUES ('rob', 'page', 'replay', 'running', '{"destination": "default", "seen_at": "2100-01-01T00:00:00Z", "seen_event": "1000"}', 8, 3, now() - interval '5 minutes')`)
	s := serve(t, db.Pool)
	s.gets(200, "/operations/1", "probably killed", "Go on")
	s.posts(200, "/operations/1/resume", nil, "It continues.")
	relaytest.Becomes(db, "done 8", `SELECT state || ' ' || done FROM outbox_audit WHERE id = 1`)
	if got := relaytest.Row[string](db, `SELECT split_part(actor, '@', 1) || ' ' || origin || ' ' || detail FROM outbox_audit WHERE action = 'resume_operation'`); got != "ann page operation 1" {
		t.Error(got)
	}
	s.posts(409, "/operations/1/resume", nil)
	s.posts(409, "/operations/1/interrupt", nil)
}

func TestReaderSeesNoButtons(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "k")
	db.Settled("failed", "true")
	db.Exec(`INSERT INTO outbox_audit (actor, origin, action, state, selection) VALUES ('rob', 'page', 'replay', 'interrupted', '{"destination": "default", "seen_at": "2100-01-01T00:00:00Z", "seen_event": "1000"}')`)
	s := serve(t, db.Pool)
	s.token = readToken
	for _, path := range pages() {
		if _, body := s.get(path); strings.Contains(body, `method="post"`) || strings.Contains(body, "Replay selected") {
			t.Errorf("%s offers a change", path)
		}
	}
	for _, path := range []string{"/destinations/default/pause", "/destinations/default/resume", "/destinations/default/reset-breaker", "/operations", "/operations/1/resume", "/operations/1/interrupt", "/events/1/reveal", "/alerts/silence"} {
		s.posts(403, path, nil, "role")
	}
	testkit.Equal(t, "entries", relaytest.Row[int](db, `SELECT count(*) FROM outbox_audit`), 1)
}

// Who comes from another site, or a foreign name, or has not signed in, is refused. The last two
// learn nothing of the relay and its database.
func TestForeignersAreRefused(t *testing.T) {
	t.Parallel()
	s := serve(t, relaytest.Covered(t).Pool)
	s.header = http.Header{"Sec-Fetch-Site": {"cross-site"}, "Origin": {"https://evil.example"}}
	s.posts(http.StatusForbidden, "/destinations/default/pause", nil, "Another site")
	refused := func(want int, text string) {
		t.Helper()
		status, body := s.get("/")
		if status != want || !strings.Contains(body, text) || strings.Contains(body, "postgres://") || strings.Contains(body, "1.2.3") {
			t.Errorf("%d, want %d and %q: %s", status, want, text, body)
		}
	}
	s.header = http.Header{"Host": {"evil.example"}}
	refused(http.StatusMisdirectedRequest, "admin.allowed_hosts")
	s.header, s.token = http.Header{}, "guessed"
	refused(http.StatusUnauthorized, "Sign in")
}

// What is embedded is what was published.
func TestVendoredFiles(t *testing.T) {
	t.Parallel()
	readme, err := staticFiles.ReadFile("static/vendor/README.md")
	relaytest.Must(t, err)
	for _, name := range []string{"htmx.min.js", "uPlot.iife.min.js", "uPlot.min.css"} {
		body, err := staticFiles.ReadFile("static/vendor/" + name)
		relaytest.Must(t, err)
		sum := sha256.Sum256(body)
		if !strings.Contains(string(readme), fmt.Sprintf("| `%s` |", name)) || !strings.Contains(string(readme), hex.EncodeToString(sum[:])) {
			t.Errorf("%s has the sum %x", name, sum)
		}
	}
}

// Selected are those that were ticked, and never all that the filter leaves.
func TestNothingSelected(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(3, "k")
	db.Settled("failed", "true")
	s := serve(t, db.Pool)
	_, list := s.get("/events?status=failed&destination=default")
	testkit.Contains(t, "the form does not say that it selects", list, `type="hidden" name="selected"`)
	status, body := s.get("/operations/new?selected=1&action=discard&status=failed&destination=default")
	if status != 422 || strings.Contains(body, `name="token"`) {
		t.Errorf("%d %s", status, body)
	}
	s.gets(200, "/operations/new?selected=1&id=2&action=discard&status=failed&destination=default", "Discard 1 delivery?")
	s.token = readToken
	s.gets(403, "/operations/new?action=replay&id=1")
}

// An event is found by its id, its key or its reference; of a reference that several events have,
// the list shows all, page by page.
func TestFindsEvents(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, related_reference)
		SELECT 't', '{}', 'key-' || i, CASE WHEN i = 7 THEN 'INV-7' WHEN i <= 60 THEN 'INV & sons' END FROM generate_series(1, 70) i`)
	s := serve(t, db.Pool)
	for text, want := range map[string]string{
		"7": "<h1>Event 7</h1>", "key-9": "<h1>Event 9</h1>", " INV-7 ": "<h1>Event 7</h1>", "": `id="filter"`,
		"nothing <b>": "There is no such event", "a\x00b": "contains a NUL", "INV & sons": `value="INV &amp; sons"`,
	} {
		if _, body := s.get("/find?q=" + url.QueryEscape(text)); !strings.Contains(body, want) {
			t.Errorf("%q leads to\n%s", text, body)
		}
	}
	_, body := s.get("/events?related=" + url.QueryEscape("INV & sons"))
	if n := strings.Count(body, `id="row-`); n != pageSize || strings.Contains(body, "all that match") || !strings.Contains(body, "Replay selected") {
		t.Errorf("%d rows:\n%s", n, body)
	}
	next := html.UnescapeString(regexp.MustCompile(`id="next" href="/ops([^"]+)"`).FindStringSubmatch(body)[1])
	if _, body = s.get(next); strings.Count(body, `id="row-`) != 9 || !strings.Contains(body, "No older ones.") {
		t.Errorf("%s:\n%s", next, body)
	}
}

// A search by reference that was cut says so, how far it came, and continues from there.
func TestSearchByReferenceSaysWhereItEnded(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, related_reference) SELECT 't', '{}', 'k' || i, CASE i WHEN 1 THEN 'old' END FROM generate_series(1, 12000) i`)
	s := serve(t, db.Pool)
	_, body := s.get("/events?related=old")
	if !strings.Contains(body, `id="searched"`) || !strings.Contains(body, "Search further back") || strings.Contains(body, `id="row-`) {
		t.Fatal(body)
	}
	next := html.UnescapeString(regexp.MustCompile(`id="next" href="/ops([^"]+)"`).FindStringSubmatch(body)[1])
	if _, body = s.get(next); !strings.Contains(body, `id="row-1-default"`) {
		t.Errorf("%s:\n%s", next, body)
	}
}

// The probes of a long outage are two moments of the timeline, with how many lie between.
func TestTimelineOfManyProbes(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "k")
	db.Exec(`INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay_id, destination, outcome, reason, error)
		SELECT 1, i, now() + make_interval(mins => i), 1, CASE WHEN i < 10 THEN 1 ELSE 2 END, i % 2, 'default', 'hold', 'connect', 'refused' FROM generate_series(1, 11) i`)
	_, body := serve(t, db.Pool).get("/events/1")
	if n := strings.Count(body, "no answer, connect"); n != 4 || !strings.Contains(body, "7 more like it within 8m") {
		t.Errorf("%d attempts:\n%s", n, body)
	}
}

// Attempts count again after a replay: the timeline keeps that the event had failed, and names who
// replayed it, and that the replay delivered it.
func TestTimelineOfReplay(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "k")
	db.Settled("failed", "true")
	db.Exec(`INSERT INTO outbox_attempt (event_id, destination, claim, attempt, relay_id, outcome, reason, duration_ms, started_at)
		VALUES (1, 'default', 1, 1, 1, 'fail', 'rejected', 0, clock_timestamp())`)
	_, err := ops.New(db.Pool).As(ops.Actor{Name: "root@vm"}).Replay(t.Context(), ops.Selection{EventIDs: []int64{1}}, 0, nil)
	relaytest.Must(t, err)
	db.Exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = clock_timestamp(), attempts = 1`)
	_, body := serve(t, db.Pool).get("/events/1")
	testkit.Contains(t, "the page", body, "Inserted by its producer", "When its transaction began; when that committed is not recorded.", "replayed by root@vm (cli), after it had failed", "by the replay, with its 1st attempt")
	if failed := strings.Index(body, "<p>for good: rejected</p>"); failed < 0 || strings.Index(body, "after it had failed") < failed {
		t.Errorf("failed at %d of the page:\n%s", failed, body)
	}
}

// The audit says which deliveries an operation was for, not their destination alone.
func TestAuditNamesTheSelection(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "k")
	_, err := ops.New(db.Pool).As(ops.Actor{Name: "ann"}).Discard(t.Context(), ops.Selection{EventIDs: []int64{1}, Destination: "default", Type: "in*"}, nil)
	relaytest.Must(t, err)
	serve(t, db.Pool).gets(200, "/audit", "event 1 · destination default", "type in*")
}
