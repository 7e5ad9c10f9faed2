package post_test

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// What becomes of the headers that an event brings along, as plain SQL can write them.
func TestSecurityEventHeaderTable(t *testing.T) {
	t.Parallel()
	const (
		notName  = "is not a header name (letters, digits and hyphens)"
		notASCII = "has a value with characters beyond printable ASCII"
	)
	for _, c := range []struct {
		name, headers string
		problem       string // empty: sent
		sent          http.Header
	}{
		{"none", `{}`, "", http.Header{}},
		{"own", `{"X-Event-Own": "o"}`, "", http.Header{"X-Event-Own": {"o"}}},
		{"lower case", `{"x-event-own": "o"}`, "", http.Header{"X-Event-Own": {"o"}}},
		{"trace context", `{"traceparent": "00-1-2-01", "tracestate": "a=b"}`, "", http.Header{"Traceparent": {"00-1-2-01"}, "Tracestate": {"a=b"}}},
		{"empty value", `{"X-Event-Own": ""}`, "", http.Header{"X-Event-Own": {""}}},
		{"blanks", `{"X-Event-Own": " a b "}`, "", http.Header{"X-Event-Own": {" a b "}}},
		{"user agent", `{"User-Agent": "me"}`, "", http.Header{"User-Agent": {"outbox-relay"}}},
		{"authorization", `{"Authorization": "Bearer e"}`, "", http.Header{"Authorization": nil}},
		{"destination's wins", `{"X-Event-Tenant": "e"}`, "", http.Header{"X-Event-Tenant": {"d"}}},
		{"destination's wins in any case", `{"x-event-TENANT": "e"}`, "", http.Header{"X-Event-Tenant": {"d"}}},
		{"two spellings, one value", `{"x-event-own": "o", "X-Event-Own": "o", "X-EVENT-OWN": "o"}`, "", http.Header{"X-Event-Own": {"o"}}},
		{"two spellings, two values", `{"x-event-own": "o", "X-Event-Own": "p"}`, "stands twice, with different values", nil},
		{"two spellings of one sign, two values", `{"x_event_own": "o", "X-Event-Own": "p"}`, "stands twice, with different values", nil},
		{"underscores", `{"x_event_own": "o"}`, "", http.Header{"X-Event-Own": {"o"}, "X_event_own": nil}},
		{"two spellings, destination's wins", `{"x-event-tenant": "o", "X-Event-Tenant": "p"}`, "stands twice, with different values", nil},
		{"at the limit", `{"X-Event-A": "` + strings.Repeat("x", 8183) + `"}`, "", http.Header{"X-Event-A": {strings.Repeat("x", 8183)}}},
		{"over the limit", `{"X-Event-A": "` + strings.Repeat("x", 8192) + `"}`, "is longer than 8192 bytes", nil},
		{"name over the limit", `{"x-event-` + strings.Repeat("x", 8193) + `": ""}`, "is longer than 8192 bytes", nil},
		{"empty name", `{"": "x"}`, "", http.Header{"": nil}},
		{"blank in a name", `{"x-event-a b": "x"}`, notName, nil},
		{"colon in a name", `{"x-event-a:b": "x"}`, notName, nil},
		{"line feed in a name", `{"x-event-a\nb": "x"}`, notName, nil},
		{"name beyond ASCII", `{"x-event-ключ": "x"}`, notName, nil},
		{"pseudo-header", `{":path": "/admin"}`, "", http.Header{":path": nil}},
		{"CRLF", `{"x-event-a": "x\r\nB: y"}`, notASCII, nil},
		{"line feed", `{"x-event-a": "x\ny"}`, notASCII, nil},
		{"carriage return", `{"x-event-a": "x\ry"}`, notASCII, nil},
		{"tab", `{"x-event-a": "x\ty"}`, notASCII, nil},
		{"DEL", `{"x-event-a": "x\u007f"}`, notASCII, nil},
		{"Latin-1", `{"x-event-a": "caf\u00e9"}`, notASCII, nil},
		{"beyond Latin-1", `{"x-event-a": "€"}`, notASCII, nil},
		{"reserved", `{"Cookie": "a=b", "x_forwarded_for": "1.2.3.4", "X-Event-Own": "o"}`, "", http.Header{"Cookie": nil, "X_forwarded_for": nil, "X-Event-Own": {"o"}}},
		{"reserved, and unfit to be sent", `{"Cookie": "a\u0000b"}`, "", http.Header{"Cookie": nil}},
	} {
		m := order()
		m.Headers = []byte(c.headers)
		req, err := requestOf(t, post.Destination{URL: "http://receiver.test/", Headers: map[string]string{"X-Event-Tenant": "d"}}, m)
		if err != nil {
			v := first(post.Refused(err), policy.Responses{})
			t.Logf("%-34s %-9s %-14s %s", c.name, v.Outcome, v.Reason, v.Message[:min(len(v.Message), 100)])
			if c.problem == "" || v.Outcome != policy.Fail || v.Reason != policy.ReasonInvalidEvent || v.Posted || !strings.Contains(v.Message, c.problem) {
				t.Errorf("%s: %+v, want %q", c.name, v, c.problem)
			}
			continue
		}
		t.Logf("%-34s sent", c.name)
		for name, want := range c.sent {
			if got := req.Header[name]; name == "User-Agent" && !strings.HasPrefix(got[0], want[0]) || name != "User-Agent" && !slices.Equal(got, want) {
				t.Errorf("%s: %s is %q, want %q", c.name, name, got, want)
			}
		}
		if c.problem != "" {
			t.Errorf("%s: sent", c.name)
		}
	}
}

// A credential is asked for at every request, and neither the event nor the destination can take
// its place.
func TestAuthorization(t *testing.T) {
	t.Parallel()
	token := "Bearer one"
	destination := post.Destination{URL: "http://receiver.test/", Wire: post.Wire{Authorization: func() string { return token }}}
	m := order()
	m.Headers = []byte(`{"authorization": "Bearer event"}`)
	for _, token = range []string{"Bearer one", "Bearer two"} {
		req, err := requestOf(t, destination, m)
		relaytest.Must(t, err)
		if got := req.Header.Values("Authorization"); len(got) != 1 || got[0] != token {
			t.Errorf("%q, want %q", got, token)
		}
	}
}

// An event above the limit of its destination fails at once, and is not an attempt.
func TestPayloadLimit(t *testing.T) {
	t.Parallel()
	m := order() // of 9 bytes
	for limit, sent := range map[int64]bool{0: true, 10: true, 9: true, 8: false, 1: false} {
		rc := relaytest.NewReceiver(t, nil)
		destination := destinationOf(rc.URL, post.Wire{MaxPayloadBytes: limit}, post.Egress{})
		v := exchangeWith(t, destination)
		switch {
		case sent && v.Outcome != policy.Delivered, !sent && (v.Outcome != policy.Fail || v.Reason != policy.ReasonTooLarge || v.Posted), (rc.Total() == 1) != sent:
			t.Errorf("limit %d, %d bytes: %+v", limit, len(m.Payload), v)
		case !sent && !strings.Contains(v.Message, "it has 9 bytes, and max_payload_bytes of "+destination.Name+" is "):
			t.Errorf("%q", v.Message)
		}
	}
}

// A URL never comes from an event, and holds no template that one could fill.
func TestSecurityURLsAreFixed(t *testing.T) {
	t.Parallel()
	for _, url := range []string{
		"http://receiver.test/{event_type}", "http://{host}/", "http://receiver.test/?k={{key}}", "http://receiver.test/${TYPE}",
	} {
		problems := destinationOf(url, post.Wire{}, post.Egress{}).Problems("destinations.default")
		if len(problems) == 0 || !strings.Contains(problems[0].Text, "template") && !strings.Contains(problems[0].Text, "parse") && !strings.Contains(problems[0].Text, "host") {
			t.Errorf("%s: %v", url, problems)
		}
	}
	m := order()
	headers, err := json.Marshal(map[string]string{"Location": "http://169.254.169.254/", "X-Forwarded-Host": "elsewhere", "X-Original-Url": "/admin"})
	relaytest.Must(t, err)
	m.Headers = headers
	req, err := requestOf(t, post.Destination{URL: "http://receiver.test/hooks"}, m)
	relaytest.Must(t, err)
	if req.URL.String() != "http://receiver.test/hooks" || req.Host != "receiver.test" || req.Header.Get("X-Forwarded-Host")+req.Header.Get("X-Original-Url") != "" {
		t.Errorf("%s at %s: %v", req.URL, req.Host, req.Header)
	}
}

// What identity systems, gateways and other senders of webhooks set does not come from an event, in
// whatever spelling. A destination may name more, and never what is reserved.
func TestSecurityEventsForgeNoHeaders(t *testing.T) {
	t.Parallel()
	forged := []string{
		"X-WebAuth-User", "X-Amzn-Oidc-Identity", "X-Goog-Authenticated-User-Email", "X-MS-Client-Principal-Name", "Ssl-Client-Verify", "X-Api-Key", "Svix-Signature",
		"Set-Cookie", "Range", "x_webauth_user", "X.Api.Key", "If-Match", "Origin", "X-Eventual",
		// Those of the contract.
		"x-idempotency-key", "X-Outbox-Event-Type", "x-outbox-anything", "Webhook-Id", "webhook-signature", "Host", "Content-Length", "Content-Type", "Connection",
		"Transfer-Encoding", "upgrade", "TE", "Trailer", "Keep-Alive", "Expect", "Proxy-Authorization", "proxy-connection",
	}
	headers := map[string]string{"X-Event-Tenant": "a", "Baggage": "b", "Ce-Subject": "c", "Content-Language": "d"}
	for _, name := range forged {
		headers[name] = "forged"
	}
	m := order()
	text, err := json.Marshal(headers)
	relaytest.Must(t, err)
	m.Headers = text
	for _, c := range []struct{ allowed, also []string }{{nil, nil}, {[]string{"x-event-*", "baggage", "ce-*", "content-*", "x-api-key", "Auth*"}, []string{"X-Api-Key", "X.Api.Key"}}} {
		req, err := requestOf(t, post.Destination{URL: "http://receiver.test/", Wire: post.Wire{EventHeaders: c.allowed}}, m)
		relaytest.Must(t, err)
		testkit.Equal(t, "host", req.Host, "receiver.test")
		for name, value := range headers {
			want := !slices.Contains(forged, name) || slices.Contains(c.also, name)
			if sent := slices.Contains(req.Header.Values(name), value); sent != want {
				t.Errorf("%q: %s is sent: %t", c.allowed, name, sent)
			}
		}
	}
	for _, pattern := range []string{"*", "", "x y", "a*b", "authorization", "x-outbox-*", "webhook-*", "cookie", "X-Forwarded-For"} {
		d := post.Destination{Name: "a", URL: "http://receiver.test/", Wire: post.Wire{EventHeaders: []string{pattern}}}.WithDefaults(post.Egress{})
		if problems := d.Problems("a"); len(problems) != 1 || problems[0].Path != "a.event_headers[0]" {
			t.Errorf("%q: %+v", pattern, problems)
		}
	}
}
