package page

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// An element is one of a page, with the text in it.
type element struct {
	name     string
	attr     map[string]string
	text     string
	parent   *element
	children []*element
}

func (e *element) has(class string) bool {
	return slices.Contains(strings.Fields(e.attr["class"]), class)
}

// within returns the nearest element around it for which is holds; nil: there is none.
func (e *element) within(is func(*element) bool) *element {
	for p := e.parent; p != nil; p = p.parent {
		if is(p) {
			return p
		}
	}
	return nil
}

// elements returns those of a page, in their order.
func elements(t *testing.T, page string) (all []*element) {
	t.Helper()
	decoder := xml.NewDecoder(strings.NewReader(page))
	decoder.Strict, decoder.AutoClose, decoder.Entity = false, xml.HTMLAutoClose, xml.HTMLEntity
	at := &element{attr: map[string]string{}}
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			return all
		}
		relaytest.Must(t, err)
		switch token := token.(type) {
		case xml.StartElement:
			e := &element{name: token.Name.Local, attr: map[string]string{}, parent: at}
			for _, a := range token.Attr {
				e.attr[a.Name.Local] = a.Value
			}
			at.children = append(at.children, e)
			all, at = append(all, e), e
		case xml.EndElement:
			at = at.parent
		case xml.CharData:
			for e := at; e != nil; e = e.parent {
				e.text += string(token)
			}
		}
	}
}

// named reports whether assistive technology finds a name for an element.
func named(e *element, all []*element) bool {
	if e.attr["aria-label"] != "" || e.attr["aria-labelledby"] != "" {
		return true
	}
	switch e.name {
	case "input", "select", "textarea":
		return e.within(func(p *element) bool { return p.name == "label" && strings.TrimSpace(p.text) != "" }) != nil ||
			slices.ContainsFunc(all, func(o *element) bool {
				return o.name == "label" && o.attr["for"] != "" && o.attr["for"] == e.attr["id"] && o.text != ""
			})
	}
	return strings.TrimSpace(e.text) != ""
}

// checkAccess returns what keeps people out who do not see a page, or see no colours.
func checkAccess(all []*element) (faults []string) {
	fault := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	count, ids, navs := map[string]int{}, map[string]bool{}, map[string]bool{}
	level := 0
	for _, e := range all {
		count[e.name]++
		if id := e.attr["id"]; id != "" {
			if ids[id] {
				fault("two elements are %q", id)
			}
			ids[id] = true
		}
		switch e.name {
		case "html":
			if e.attr["lang"] == "" {
				fault("no language")
			}
		case "title":
			if strings.TrimSpace(e.text) == "" {
				fault("no title")
			}
		case "h1", "h2", "h3", "h4":
			is := int(e.name[1] - '0')
			if level == 0 && is != 1 || is > level+1 {
				fault("%s %q follows a heading of level %d", e.name, e.text, level)
			}
			if strings.TrimSpace(e.text) == "" {
				fault("an empty %s", e.name)
			}
			level = is
		case "nav":
			if label := e.attr["aria-label"]; label == "" || navs[label] {
				fault("a nav has no label of its own: %q", label)
			}
			navs[e.attr["aria-label"]] = true
		case "th":
			if e.attr["scope"] != "col" && e.attr["scope"] != "row" {
				fault("the header %q has no scope", e.text)
			}
			if !named(e, all) && len(e.children) == 0 {
				fault("an empty header")
			}
		case "input", "select", "textarea":
			if e.attr["type"] != "hidden" && !named(e, all) {
				fault("the field %q has no label", e.attr["id"])
			}
		case "a", "button", "summary", "figure", "progress", "dialog":
			if !named(e, all) {
				fault("a %s %v has no name", e.name, e.attr)
			}
		case "svg":
			if e.attr["aria-hidden"] != "true" {
				fault("a drawing is neither hidden nor named")
			}
		case "section":
			if e.attr["aria-label"] == "" && e.attr["role"] == "" && !slices.ContainsFunc(e.children, func(c *element) bool { return strings.HasPrefix(c.name, "h") }) && !e.has("headline") {
				fault("a section has no heading")
			}
		case "i":
			if !e.has("dot") {
				break
			}
			siblings := e.parent.children
			at := slices.Index(siblings, e)
			if e.attr["aria-hidden"] != "true" {
				fault("a dot is not hidden")
			}
			if list := e.within(func(p *element) bool { return p.has("findings") || p.has("headline") }); list != nil {
				if at+1 == len(siblings) || !siblings[at+1].has("sr") || strings.TrimSpace(siblings[at+1].text) == "" {
					fault("only a colour says how bad it is: %.60q", e.parent.text)
				}
			}
		}
		if tab := e.attr["tabindex"]; tab != "" && tab != "0" && tab != "-1" {
			fault("a tabindex of %s", tab)
		}
		if e.attr["aria-labelledby"] != "" && !strings.Contains(fmt.Sprint(e.attr["aria-labelledby"]), "keys-title") {
			fault("an unknown label %q", e.attr["aria-labelledby"])
		}
		if live := e.attr["role"] == "alert" || e.attr["role"] == "status" || e.attr["aria-live"] != ""; live && e.within(func(p *element) bool { return p.attr["id"] == "live" && p.attr["hx-get"] != "" }) != nil {
			fault("%.40q is announced with every update", e.text)
		}
	}
	for name, n := range map[string]int{"h1": 1, "main": 1, "header": 1, "title": 1} {
		if count[name] != n {
			fault("%d %s, want %d", count[name], name, n)
		}
	}
	if !ids["said"] {
		fault("no region announces what changes")
	}
	return faults
}

// People who do not see the page, or no colours, or use no mouse, can work with all pages in all
// situations.
func TestAccess(t *testing.T) {
	t.Parallel()
	full := relaytest.Covered(t)
	full.Exec(`INSERT INTO outbox_relay (name, version, heartbeat_at, reload_error, reload_failed_at) VALUES ('b', 'v', now() + interval '1 hour', 'no url', now())`)
	full.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, related_reference, headers) SELECT 't', '{"a": 1}', i, 'o', 'r', '{"x-a": "b"}' FROM generate_series(1, 4) i`)
	full.Settled("failed", "event_id = 1")
	full.Exec(`INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay_id, destination, outcome, reason, http_status, error)
		SELECT i, 1, now() + make_interval(mins => i), 12, 1, 1, 'default', 'retry', 'unauthorized', 401, '401 Unauthorized' FROM generate_series(1, 3) i`)
	full.Exec(`INSERT INTO outbox_destination (destination, paused, paused_at, breaker, breaker_opened_at, breaker_until, breaker_error)
		VALUES ('default', true, now(), 'open', now(), now() + interval '1 hour', '401 Unauthorized')`)
	full.Exec(`DELETE FROM outbox_route; INSERT INTO outbox_route (pattern, destination) VALUES ('t', 'default')`)
	full.Insert(1, "parked")
	full.Exec(`INSERT INTO outbox_alert (rule, subject) VALUES ('lag', 'default'); INSERT INTO outbox_alert (rule, subject) VALUES ('lag', 'other')`)
	full.Exec(`INSERT INTO outbox_audit (actor, origin, action, state, selection, matched, done) VALUES ('rob', 'page', 'replay', 'interrupted', '{"destination": "default", "seen_at": "2100-01-01T00:00:00Z", "seen_event": 1000}', 9, 3)`)
	none, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none?connect_timeout=2")
	relaytest.Must(t, err)
	t.Cleanup(none.Close)
	reader := serve(t, full.Pool)
	reader.token = readToken
	stranger := serve(t, full.Pool)
	stranger.token = "wrong"
	var l link
	away := serve(t, l.pool(t, full.DSN))
	for _, path := range pages() {
		away.get(path)
	}
	l.state.Store(linkBroken)
	away.forget()
	more := []string{"/nowhere", "/events/77", "/find?q=nothing", "/events?status=delivered", "/operations/new?action=discard&parked=1", "/operations/new?action=retry&destination=default", "/events?since=never", "/?done=paused"}
	for name, s := range map[string]*site{"full": serve(t, full.Pool), "reader": reader, "stranger": stranger, "empty": serve(t, relaytest.Covered(t).Pool), "no database": serve(t, none), "away": away} {
		for _, path := range append(pages(), more...) {
			_, body := s.get(path)
			for _, fault := range checkAccess(elements(t, body)) {
				t.Errorf("%s, %s: %s", name, path, fault)
			}
		}
	}
	_, body := serve(t, full.Pool).post("/events/1/reveal", nil)
	for _, fault := range checkAccess(elements(t, body)) {
		t.Errorf("a payload: %s", fault)
	}
}

// Nothing but the target of the skip link hides its focus, and no text is made paler than the
// palette that TestContrast checks.
func TestSheetHidesNothing(t *testing.T) {
	t.Parallel()
	sheet, err := staticFiles.ReadFile("static/app.css")
	relaytest.Must(t, err)
	for _, rule := range regexp.MustCompile(`(?m)^.*outline: (?:none|0).*$`).FindAllString(string(sheet), -1) {
		if !strings.HasPrefix(rule, "main {") {
			t.Errorf("the focus is hidden: %s", rule)
		}
	}
	for _, rule := range regexp.MustCompile(`(?m)^.*[^-]opacity: 0?\.\d.*$`).FindAllString(string(sheet), -1) {
		if !strings.HasPrefix(rule, "@keyframes pulse") { // of a dot
			t.Errorf("text is paler than its colour: %s", rule)
		}
	}
	testkit.Contains(t, "the focus cannot be seen", string(sheet), ":focus-visible { outline: 2px solid")
}
