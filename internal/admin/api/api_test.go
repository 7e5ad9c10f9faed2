package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"
	"github.com/santhosh-tekuri/jsonschema/v6"

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
	canary     = "canary-4471"
)

// A server is the API over real HTTP, as an administrator reaches it.
type server struct {
	*testing.T
	url, token string
	client     *http.Client
	schemas    *jsonschema.Compiler
	called     map[string]bool // operations by id
}

func serve(t *testing.T, pool *pgxpool.Pool) *server {
	t.Helper()
	c := control.New(control.Config{Outbox: ops.New(pool), History: history.New()})
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	running.Go(func() { c.Run(ctx) })
	open := guard.Config{Address: "0.0.0.0:1", Token: adminToken, ReadToken: readToken}
	s := httptest.NewServer(open.Handler(New(c, "1.2.3", zerolog.Nop()), Refuse))
	t.Cleanup(func() {
		s.Close()
		stop()
		running.Wait()
	})
	return &server{T: t, url: s.URL, token: adminToken, client: s.Client(), called: map[string]bool{}}
}

// call sends a request and returns the status and the body.
func (s *server) call(method, path, body string) (int, string) {
	s.Helper()
	r, err := http.NewRequestWithContext(s.Context(), method, s.url+path, strings.NewReader(body))
	relaytest.Must(s, err)
	r.Header.Set("Authorization", "Bearer "+s.token)
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	response, err := s.client.Do(r)
	relaytest.Must(s, err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	relaytest.Must(s, err)
	if want := "application/json"; response.StatusCode < 300 && response.Header.Get("Content-Type") != want {
		s.Errorf("%s %s: content type %q", method, path, response.Header.Get("Content-Type"))
	}
	if response.StatusCode >= 400 {
		var p problemBody
		if json.Unmarshal(text, &p) != nil || p.Status != response.StatusCode || p.Title == "" || response.Header.Get("Content-Type") != "application/problem+json" {
			s.Errorf("%s %s: no problem: %d %s", method, path, response.StatusCode, text)
		}
	}
	return response.StatusCode, string(text)
}

// load reads the document of the server.
func (s *server) load() map[string]any {
	s.Helper()
	status, text := s.call("GET", "/api/openapi.json", "")
	document, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
	if status != 200 || err != nil {
		s.Fatal(status, err)
	}
	s.schemas = jsonschema.NewCompiler()
	s.schemas.AssertFormat()
	relaytest.Must(s, s.schemas.AddResource("mem://doc", document))
	return document.(map[string]any)
}

// fits calls an operation, and checks its answer against the document.
func (s *server) fits(operation, method, template, path, body string, want int) string {
	s.Helper()
	s.called[operation] = true
	status, text := s.call(method, path, body)
	if status != want {
		s.Fatalf("%s: %d %s", operation, status, text)
	}
	escaped := strings.NewReplacer("/", "~1", "{", "%7B", "}", "%7D").Replace(template)
	schema, err := s.schemas.Compile(fmt.Sprintf("mem://doc#/paths/%s/%s/responses/%d/content/application~1json/schema", escaped, strings.ToLower(method), want))
	relaytest.Must(s, err)
	value, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
	relaytest.Must(s, err)
	if err := schema.Validate(value); err != nil {
		s.Errorf("%s: %v\n%s", operation, err, text)
	}
	return text
}

// Ids are strings: JavaScript and jq lose the last digits of large numbers.
func TestIDsAreStrings(t *testing.T) {
	t.Parallel()
	document := serve(t, relaytest.Covered(t).Pool).load()
	for name, schema := range document["components"].(map[string]any)["schemas"].(map[string]any) {
		for field, of := range schema.(map[string]any)["properties"].(map[string]any) {
			isID := field == "id" || field == "seen_event" || strings.HasSuffix(field, "_id") || strings.HasSuffix(field, "_ids")
			if text, err := json.Marshal(of); err != nil || isID && !strings.Contains(string(text), `"string"`) {
				t.Errorf("%s.%s is %s: %v", name, field, text, err)
			}
		}
	}
}

// Every operation of the document answers as the document says, and no answer but that of reveal
// has the payload.
func TestAnswersFitTheDocument(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, related_reference, headers)
		SELECT 'paid', '{"secret": "` + canary + `"}', 'k-' || i, 'o-' || i % 3, 'ref', '{"x-tenant": "a"}' FROM generate_series(1, 5) i`)
	db.Settled("failed", "event_id < 4")
	db.Exec(`INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay_id, destination, outcome, reason, http_status, error)
		VALUES (1, 1, now(), 12, 1, 1, 'default', 'retry', 'server_error', 500, 'no')`)
	db.Exec(`INSERT INTO outbox_relay (name, version) VALUES ('r1', '1'); INSERT INTO outbox_alert (rule, subject) VALUES ('failed', 'default')`)
	s := serve(t, db.Pool)
	document := s.load()

	var all []string
	call := func(operation, method, template, path, body string, status int) {
		t.Helper()
		all = append(all, s.fits(operation, method, template, path, body, status))
	}
	const v1 = "/api/v1"
	call("getDocument", "GET", "/api/openapi.json", "/api/openapi.json", "", 200)
	call("getOverview", "GET", v1+"/overview", v1+"/overview", "", 200)
	call("getHistory", "GET", v1+"/history", v1+"/history?destination=default", "", 200)
	call("listDestinations", "GET", v1+"/destinations", v1+"/destinations", "", 200)
	call("getDestination", "GET", v1+"/destinations/{name}", v1+"/destinations/default", "", 200)
	call("pauseDestination", "POST", v1+"/destinations/{name}/pause", v1+"/destinations/default/pause", `{"reason": "x"}`, 200)
	call("listDestinations", "GET", v1+"/destinations", v1+"/destinations", "", 200)
	call("resumeDestination", "POST", v1+"/destinations/{name}/resume", v1+"/destinations/default/resume", "", 200)
	call("resetBreaker", "POST", v1+"/destinations/{name}/reset-breaker", v1+"/destinations/default/reset-breaker", "", 200)
	call("listDeliveries", "GET", v1+"/events", v1+"/events?status=failed&limit=2&since=1h", "", 200)
	call("getEvent", "GET", v1+"/events/{id}", v1+"/events/1", "", 200)
	call("listAlerts", "GET", v1+"/alerts", v1+"/alerts", "", 200)
	call("acknowledgeAlert", "POST", v1+"/alerts/acknowledge", v1+"/alerts/acknowledge", `{"rule": "failed", "subject": "default"}`, 200)
	call("silenceAlerts", "POST", v1+"/alerts/silence", v1+"/alerts/silence", `{"subject": "default", "seconds": 60, "reason": "x"}`, 200)
	testkit.Contains(t, "found", all[len(all)-1], `"acknowledged_by":`, `"silent_until":`)
	if status, text := s.call("POST", v1+"/alerts/acknowledge", `{"rule": "failed", "subject": "nowhere"}`); status != 404 {
		t.Errorf("an alert that is not open: %d %s", status, text)
	}
	call("listRelays", "GET", v1+"/relays", v1+"/relays", "", 200)

	var preview control.Preview
	text := s.fits("previewOperation", "POST", v1+"/previews", v1+"/previews", `{"action": "replay", "selection": {"destination": "default"}}`, 200)
	relaytest.Must(t, json.Unmarshal([]byte(text), &preview))
	if preview.Found.Matched != 3 {
		t.Errorf("%+v", preview.Found)
	}
	order := fmt.Sprintf(`{"action": "replay", "selection": {"destination": "default"}, "matched": 3, "token": %q}`, preview.Token)
	call("startOperation", "POST", v1+"/operations", v1+"/operations", order, 202)
	var entry ops.AuditEntry
	relaytest.Must(t, json.Unmarshal([]byte(all[len(all)-1]), &entry))
	operation := fmt.Sprint(v1+"/operations/", entry.ID)
	relaytest.Becomes(db, "done", `SELECT state FROM outbox_audit WHERE id = $1`, entry.ID)
	call("getOperation", "GET", v1+"/operations/{id}", operation, "", 200)
	if status, text := s.call("POST", operation+"/interrupt", ""); status != 409 {
		t.Errorf("what has ended was interrupted: %d %s", status, text)
	}
	db.RewriteAudit(fmt.Sprintf(`state = 'interrupted' WHERE id = %d`, entry.ID))
	call("resumeOperation", "POST", v1+"/operations/{id}/resume", operation+"/resume", "", 202)
	relaytest.Becomes(db, "done", `SELECT state FROM outbox_audit WHERE id = $1`, entry.ID)
	call("listAudit", "GET", v1+"/audit", v1+"/audit?limit=10", "", 200)

	if joined := strings.Join(all, ""); strings.Contains(joined, canary) || strings.Contains(joined, adminToken) {
		t.Error("an answer has a payload, or a token")
	}
	testkit.Contains(t, "found", s.fits("revealEvent", "POST", v1+"/events/{id}/reveal", v1+"/events/1/reveal", "", 200), canary)
	wantDocumented(t, document, s.called)
}

// wantDocumented compares the document with what was called, and with the routes.
func wantDocumented(t *testing.T, document map[string]any, called map[string]bool) {
	t.Helper()
	documented := map[string]bool{}
	for path, item := range document["paths"].(map[string]any) {
		for method, operation := range item.(map[string]any) {
			id := operation.(map[string]any)["operationId"].(string)
			documented[strings.ToUpper(method)+" "+path] = true
			if !called[id] && id != "interruptOperation" {
				t.Errorf("%s was not called", id)
			}
		}
	}
	routes := (&API{}).routes()
	for _, route := range routes {
		if !documented[route.Method+" "+route.Path] {
			t.Errorf("%s %s is not documented", route.Method, route.Path)
		}
	}
	if len(documented) != len(routes)+1 {
		t.Errorf("%d operations are documented, there are %d", len(documented), len(routes)+1)
	}
}

func TestMistakes(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "logistics")
	s := serve(t, db.Pool)
	for _, test := range []struct {
		method, path, body string
		status             int
		want               string
	}{
		{"GET", "/api/v1/nothing", "", 404, "openapi.json"},
		{"DELETE", "/api/v1/overview", "", 405, "Use GET"},
		{"GET", "/api/v1/operations", "", 405, "Use POST"},
		{"GET", "/api/v1/destinations/shop", "", 404, "destination"},
		{"POST", "/api/v1/destinations/shop/pause", `{}`, 404, "destination"},
		{"POST", "/api/v1/destinations/logistics/pause", `{"reasn": "x"}`, 422, "reasn"},
		{"POST", "/api/v1/destinations/logistics/pause", `{`, 422, "body"},
		{"GET", "/api/v1/events?destination=logistic", "", 422, "did you mean \\\"logistics\\\"?"},
		{"GET", "/api/v1/events?destinaton=logistics", "", 422, `destinaton: is not a parameter of this request; did you mean \"destination\"?`},
		{"GET", "/api/v1/events?status=failed&status=pending", "", 422, "status: is given more than once"},
		{"GET", "/api/v1/events?status=failed&limit=%zz", "", 422, "query: cannot be read"},
		{"GET", "/api/v1/overview?destination=logistics", "", 422, "is not a parameter"},
		{"GET", "/api/v1/events?since=2026-01-02T15:04:05+02:00", "", 200, "deliveries"},
		{"POST", "/api/v1/previews", `{"action": "replay", "selection": {"event_ids": ["1"]}} {"action": "discard"}`, 422, "body: is followed by more"},
		{"POST", "/api/v1/previews", `{"action": "replay", "selection": {"event_ids": ["1", "x"]}}`, 422, "event_ids: is not a list of ids"},
		{"POST", "/api/v1/previews", `{"action": "replay", "selection": {"event_ids": [0]}}`, 422, "event_ids: \\\"0\\\" is not the id of an event"},
		{"POST", "/api/v1/previews", `{"action": "replay", "selection": {"event_ids": [], "destination": "logistics"}}`, 422, "event_ids: is empty"},
		{"POST", "/api/v1/previews", `{"action": "replay", "selection": {"event_ids": ["1", 2]}}`, 200, `"unknown_event_ids":["1","2"]`},
		{"GET", "/api/v1/events/12", "", 404, "archive"},
		{"GET", "/api/v1/events/abc", "", 422, "number"},
		{"POST", "/api/v1/events/12/reveal", "", 404, "archive"},
		{"POST", "/api/v1/previews", `{"action": "replay", "selection": {}}`, 422, "names nothing"},
		{"POST", "/api/v1/previews", `{"action": "replay", "selection": {"destination": "logistic"}}`, 422, `selection.destination: there is no destination \"logistic\"; did you mean \"logistics\"?`},
		{"GET", "/api/v1/operations/77", "", 404, "audit"},
		{"POST", "/api/v1/operations/77/resume", "", 404, "audit"},
		{"GET", "/api/v1/audit?before=x", "", 422, "before"},
		{"POST", "/api/v1/previews", `{"action": "` + strings.Repeat("x", 2<<20) + `"}`, 422, "1 MiB"},
	} {
		if status, text := s.call(test.method, test.path, test.body); status != test.status || !strings.Contains(text, test.want) {
			t.Errorf("%s %s: %d %s", test.method, test.path, status, text)
		}
	}
}

// Lists of thousands of destinations show a hundred, those in trouble first, and parameters lead to
// the others.
func TestManyDestinations(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox_route (pattern, destination) SELECT 't' || i, 'd' || to_char(i, 'FM00000') FROM generate_series(0, 9998) i;
		INSERT INTO outbox_destination (destination, paused, paused_at) SELECT destination, true, now() FROM outbox_route WHERE destination LIKE 'd0432_'
		ON CONFLICT (destination) DO UPDATE SET paused = EXCLUDED.paused, paused_at = EXCLUDED.paused_at;
		INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 't' || i, '{}', 'k' || i FROM generate_series(4320, 4500) i;
		INSERT INTO outbox_relay (name, version) VALUES ('r1', '1')`)
	s := serve(t, db.Pool)
	s.load()
	type page struct {
		Destinations []struct {
			Destination string `json:"destination"`
		} `json:"destinations"`
		Total      int          `json:"destinations_total"`
		Left       int          `json:"destinations_left"`
		Next       string       `json:"next"`
		Advice     []ops.Advice `json:"advice"`
		AdviceLeft int          `json:"advice_left"`
	}
	get := func(operation, path, query string) (p page, size int) {
		t.Helper()
		text := s.fits(operation, "GET", path, path+query, "", 200)
		relaytest.Must(t, json.Unmarshal([]byte(text), &p))
		return p, len(text)
	}
	for operation, path := range map[string]string{"getOverview": "/api/v1/overview", "listDestinations": "/api/v1/destinations"} {
		p, size := get(operation, path, "")
		if len(p.Destinations) != 100 || p.Total != 10_000 || p.Left != 9900 || p.Next != p.Destinations[99].Destination || !strings.HasPrefix(p.Destinations[0].Destination, "d0432") {
			t.Errorf("%s: %d destinations, %d left of %d, next %q, first %+v", path, len(p.Destinations), p.Left, p.Total, p.Next, p.Destinations[0])
		}
		if size > 256<<10 || len(p.Advice) > 100 || operation == "getOverview" && p.AdviceLeft == 0 {
			t.Errorf("%s: %d bytes, %d pieces of advice, %d left", path, size, len(p.Advice), p.AdviceLeft)
		}
		if p, _ := get(operation, path, "?prefix=d0432&limit=4&sort=name&after=d04322"); len(p.Destinations) != 4 || p.Destinations[0].Destination != "d04323" || p.Left != 3 || p.Next != "d04326" || p.Total != 10_000 {
			t.Errorf("%s: %+v", path, p)
		}
		if p, _ := get(operation, path, "?prefix=x"); len(p.Destinations) != 0 || p.Destinations == nil || p.Left != 0 || p.Next != "" {
			t.Errorf("%s: %+v", path, p)
		}
		for query, want := range map[string]string{
			"limit=0":         `limit: \"0\" is not a number from 1 to 500`,
			"limit=501":       `limit: \"501\" is not`,
			"limit=x":         `limit: \"x\" is not`,
			"after=d0432":     `after: no destination \"d0432\" is in this list`,
			"sort=nmae":       `sort: \"nmae\" is not known; choose name, state, delivered, pending, retrying, failed, lag, p95`,
			"prefix=a%00":     `prefix: contains a NUL`,
			"prefx=d":         `prefx: is not a parameter of this request; did you mean \"prefix\"?`,
			"after=a&after=b": `after: is given more than once`,
		} {
			if status, text := s.call("GET", path+"?"+query, ""); status != 422 || !strings.Contains(text, want) {
				t.Errorf("%s?%s: %d %s", path, query, status, text)
			}
		}
	}
	seen := map[string]bool{}
	for _, sort := range []string{"", "name", "delivered"} {
		clear(seen)
		for after, pages := "", 0; pages == 0 || after != ""; pages++ {
			p, _ := get("listDestinations", "/api/v1/destinations", "?limit=500&sort="+sort+"&after="+after)
			for _, d := range p.Destinations {
				seen[d.Destination] = true
			}
			after = p.Next
		}
		testkit.Equal(t, "destinations sorted by "+sort, len(seen), 10_000)
	}
}

// Of many alerts a page is sent, and of a relay with many destinations some, each with the number
// of those that are left out.
func TestManyAlertsAndDestinationsOfARelay(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox_alert (rule, subject, opened_at) SELECT 'lag', 'd' || to_char(i, 'FM0000'), now() - make_interval(secs => 1000 - i) FROM generate_series(0, 999) i`)
	db.Exec(`WITH r AS (INSERT INTO outbox_relay (name, version) VALUES ('r1', '1') RETURNING id)
		INSERT INTO outbox_relay_destination (relay_id, destination, settings) SELECT id, 'd' || i, '' FROM r, generate_series(0, 999) i`)
	s := serve(t, db.Pool)
	s.load()
	var list struct {
		Alerts []struct {
			Subject string `json:"subject"`
		} `json:"alerts"`
		Left   int `json:"alerts_left"`
		Relays []struct {
			Destinations []string `json:"destinations"`
			Left         int      `json:"destinations_left"`
		} `json:"relays"`
	}
	get := func(operation, path, query string) {
		t.Helper()
		relaytest.Must(t, json.Unmarshal([]byte(s.fits(operation, "GET", path, path+query, "", 200)), &list))
	}
	seen := map[string]bool{}
	for skip, sizes := 0, []int{100, 500, 400}; len(sizes) > 0; skip, sizes = skip+sizes[0], sizes[1:] {
		get("listAlerts", "/api/v1/alerts", fmt.Sprintf("?skip=%d&limit=%d", skip, max(sizes[0], 100)))
		if len(list.Alerts) != sizes[0] || list.Left != 1000-skip-sizes[0] {
			t.Fatalf("skip %d: %d alerts, %d left", skip, len(list.Alerts), list.Left)
		}
		for _, a := range list.Alerts {
			seen[a.Subject] = true
		}
	}
	testkit.Equal(t, "alerts", len(seen), 1000)
	get("listAlerts", "/api/v1/alerts", "?skip=5000")
	testkit.Equal(t, "alerts beyond the last", len(list.Alerts), 0)
	get("listRelays", "/api/v1/relays", "")
	if r := list.Relays[0]; len(r.Destinations) != 100 || r.Left != 900 {
		t.Errorf("%d destinations, %d left", len(r.Destinations), r.Left)
	}
	if status, text := s.call("GET", "/api/v1/alerts?skip=-1", ""); status != 422 || !strings.Contains(text, `skip: \"-1\" is not a number from 0`) {
		t.Errorf("%d %s", status, text)
	}
}

// A reader changes nothing and sees no payload, by any route.
func TestReaderMayOnlyRead(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "k")
	s := serve(t, db.Pool)
	s.token = readToken
	for _, route := range (&API{}).routes() {
		path := strings.NewReplacer("{name}", "default", "{id}", "1").Replace(route.Path)
		status, text := s.call(route.Method, path, "{}")
		if refused := status == 403; refused != route.Changes || refused && !strings.Contains(text, "role") {
			t.Errorf("%s %s: %d %s", route.Method, route.Path, status, text)
		}
		if route.Changes != (route.Method == http.MethodPost) {
			t.Errorf("%s %s: only what changes is a POST", route.Method, route.Path)
		}
	}
	testkit.Equal(t, "entries in the audit", relaytest.Row[int](db, `SELECT count(*) FROM outbox_audit`), 0)
	s.token = "wrong"
	if status, _ := s.call("GET", "/api/v1/overview", ""); status != 401 {
		t.Errorf("a wrong token: %d", status)
	}
}

// Without a database every answer says so; none has its address, its user or its password.
func TestDatabaseDown(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), "postgres://hidden-user:hidden-password@127.0.0.1:1/hidden-database?connect_timeout=2")
	relaytest.Must(t, err)
	t.Cleanup(pool.Close)
	s := serve(t, pool)
	for _, path := range []string{"overview", "destinations", "events", "events/1", "alerts", "relays", "audit", "operations/1"} {
		status, text := s.call("GET", "/api/v1/"+path, "")
		if status != 503 || !strings.Contains(text, "cannot be reached") || strings.Contains(text, "hidden") {
			t.Errorf("%s: %d %s", path, status, text)
		}
	}
}

// No answer depends on the order of a map.
func TestDocumentIsStable(t *testing.T) {
	t.Parallel()
	a := &API{}
	var first, second bytes.Buffer
	relaytest.Must(t, json.NewEncoder(&first).Encode(a.document()))
	relaytest.Must(t, json.NewEncoder(&second).Encode(a.document()))
	if !slices.Equal(first.Bytes(), second.Bytes()) {
		t.Error("it differs")
	}
}
