package relay

import (
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
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
		{"own", `{"X-Own": "o"}`, "", http.Header{"X-Own": {"o"}}},
		{"lower case", `{"x-own": "o"}`, "", http.Header{"X-Own": {"o"}}},
		{"trace context", `{"traceparent": "00-1-2-01", "tracestate": "a=b"}`, "", http.Header{"Traceparent": {"00-1-2-01"}, "Tracestate": {"a=b"}}},
		{"empty value", `{"X-Own": ""}`, "", http.Header{"X-Own": {""}}},
		{"blanks", `{"X-Own": " a b "}`, "", http.Header{"X-Own": {" a b "}}},
		{"user agent", `{"User-Agent": "me"}`, "", http.Header{"User-Agent": {"outbox-relay"}}},
		{"authorization", `{"Authorization": "Bearer e"}`, "", http.Header{"Authorization": nil}},
		{"destination's wins", `{"X-Tenant": "e"}`, "", http.Header{"X-Tenant": {"d"}}},
		{"destination's wins in any case", `{"x-TENANT": "e"}`, "", http.Header{"X-Tenant": {"d"}}},
		{"two spellings, one value", `{"x-own": "o", "X-Own": "o", "X-OWN": "o"}`, "", http.Header{"X-Own": {"o"}}},
		{"two spellings, two values", `{"x-own": "o", "X-Own": "p"}`, "stands twice, with different values", nil},
		{"two spellings, destination's wins", `{"x-tenant": "o", "X-Tenant": "p"}`, "stands twice, with different values", nil},
		{"at the limit", `{"A": "` + strings.Repeat("x", 8191) + `"}`, "", http.Header{"A": {strings.Repeat("x", 8191)}}},
		{"over the limit", `{"A": "` + strings.Repeat("x", 8192) + `"}`, "is longer than 8192 bytes", nil},
		{"name over the limit", `{"` + strings.Repeat("x", 8193) + `": ""}`, "is longer than 8192 bytes", nil},
		{"empty name", `{"": "x"}`, notName, nil},
		{"blank in a name", `{"a b": "x"}`, notName, nil},
		{"colon in a name", `{"a:b": "x"}`, notName, nil},
		{"line feed in a name", `{"a\nb": "x"}`, notName, nil},
		{"name beyond ASCII", `{"ключ": "x"}`, notName, nil},
		{"pseudo-header", `{":path": "/admin"}`, notName, nil},
		{"CRLF", `{"a": "x\r\nB: y"}`, notASCII, nil},
		{"line feed", `{"a": "x\ny"}`, notASCII, nil},
		{"carriage return", `{"a": "x\ry"}`, notASCII, nil},
		{"tab", `{"a": "x\ty"}`, notASCII, nil},
		{"DEL", `{"a": "x\u007f"}`, notASCII, nil},
		{"Latin-1", `{"a": "caf\u00e9"}`, notASCII, nil},
		{"beyond Latin-1", `{"a": "€"}`, notASCII, nil},
		{"reserved", `{"Cookie": "a=b", "x_forwarded_for": "1.2.3.4", "X-Own": "o"}`, "", http.Header{"Cookie": nil, "X_forwarded_for": nil, "X-Own": {"o"}}},
		{"reserved, and unfit to be sent", `{"Cookie": "a\u0000b"}`, "", http.Header{"Cookie": nil}},
	} {
		d := order()
		d.event.Headers = []byte(c.headers)
		req, err := requestOf(t, post.Destination{URL: "http://receiver.test/", Headers: map[string]string{"X-Tenant": "d"}}, d)
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

// A credential is asked for at every request, and neither the event nor the destination can take its place.
func TestAuthorization(t *testing.T) {
	t.Parallel()
	token := "Bearer one"
	destination := post.Destination{URL: "http://receiver.test/", Wire: post.Wire{Authorization: func() string { return token }}}
	d := order()
	d.event.Headers = []byte(`{"authorization": "Bearer event"}`)
	for _, token = range []string{"Bearer one", "Bearer two"} {
		req, err := requestOf(t, destination, d)
		must(t, err)
		if got := req.Header.Values("Authorization"); len(got) != 1 || got[0] != token {
			t.Errorf("%q, want %q", got, token)
		}
	}
}

// An event above the limit of its destination fails at once, and is not an attempt.
func TestPayloadLimit(t *testing.T) {
	t.Parallel()
	d := order() // of 9 bytes
	for limit, sent := range map[int64]bool{0: true, 10: true, 9: true, 8: false, 1: false} {
		rc := newReceiver(t, nil)
		destination := destinationOf(rc.URL, post.Wire{MaxPayloadBytes: limit}, post.Egress{})
		v := exchangeWith(t, destination)
		switch {
		case sent && v.Outcome != policy.Delivered, !sent && (v.Outcome != policy.Fail || v.Reason != policy.ReasonTooLarge || v.Posted), (rc.total() == 1) != sent:
			t.Errorf("limit %d, %d bytes: %+v", limit, len(d.event.Payload), v)
		case !sent && !strings.Contains(v.Message, "it has 9 bytes, and max_payload_bytes of "+destination.Name+" is "):
			t.Errorf("%q", v.Message)
		}
	}
}

// Binary mode of CloudEvents 1.0, beside everything else.
func TestCloudEvents(t *testing.T) {
	t.Parallel()
	destination := post.Destination{
		URL: "http://receiver.test/", SigningSecrets: []webhook.Secret{secret(t, testSecret)},
		Wire: post.Wire{Format: post.FormatCloudEvents, Source: "https://finance.internal/outbox?a=%20b"},
	}
	d := order()
	d.event.Headers = []byte(`{"ce-id": "event", "CE-Subject": "event", "ce-sequence": "event", "ce-tenant": "extension", "traceparent": "t"}`)
	req, err := requestOf(t, destination, d)
	must(t, err)
	want := http.Header{
		"Ce-Specversion": {"1.0"}, "Ce-Id": {"inv-1.paid"}, "Ce-Source": {"https://finance.internal/outbox?a=%2520b"}, "Ce-Type": {"invoice.paid"},
		"Ce-Time": {"2026-03-01T12:00:00.123456Z"}, "Ce-Subject": {"INV/2026/1"}, "Ce-Partitionkey": {"customer-7"}, "Ce-Sequence": {"00000000000000000042"},
		"Ce-Tenant": {"extension"}, "Traceparent": {"t"},
	}
	raw := order()
	raw.event.Headers = []byte(`{"traceparent": "t"}`)
	plain := destination
	plain.Wire = post.Wire{Format: post.FormatRaw}
	rest, err := requestOf(t, plain, raw)
	must(t, err)
	maps.Copy(want, rest.Header) // signature and all: what is covered has not changed
	if !maps.EqualFunc(req.Header, want, slices.Equal) {
		t.Errorf("headers\n%v, want\n%v", req.Header, want)
	}
	if by, err := webhook.Verify(req.Header, d.event.Payload, time.Unix(1_700_000_000, 0), time.Minute, secret(t, testSecret)); err != nil || by != webhook.VerifiedX1 {
		t.Errorf("verified %d, %v", by, err)
	}

	d.event.OrderingKey, d.event.RelatedReference = nil, nil
	req, err = requestOf(t, destination, d)
	must(t, err)
	for _, name := range []string{"Ce-Subject", "Ce-Partitionkey", "Ce-Sequence"} {
		if value, sent := req.Header[name]; sent {
			t.Errorf("%s: %q", name, value)
		}
	}
	key, created := `a b"c%d~é`, pgtype.Timestamptz{Time: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), Valid: true}
	if got := post.PercentEncode(key); got != "a%20b%22c%25d~%C3%A9" {
		t.Errorf("%q is encoded as %s", key, got)
	}
	key = `inv 1 "x" 5%`
	d.event.Key, d.event.CreatedAt = &key, created
	req, err = requestOf(t, destination, d)
	must(t, err)
	if got := req.Header.Get("Ce-Id"); got != "inv%201%20%22x%22%205%25" || req.Header.Get("X-Idempotency-Key") != key {
		t.Errorf("id %s, key %s", got, req.Header.Get("X-Idempotency-Key"))
	}
	if got := req.Header.Get("Ce-Time"); got != "2026-03-01T12:00:00Z" {
		t.Errorf("time %s", got)
	}

	// With format raw, the headers of a producer that speaks CloudEvents itself arrive as they are.
	d.event.Headers = []byte(`{"ce-id": "event"}`)
	req, err = requestOf(t, plain, d)
	must(t, err)
	if req.Header.Get("Ce-Id") != "event" || req.Header.Get("Ce-Type") != "" {
		t.Errorf("%v", req.Header)
	}
}

// The sequence of CloudEvents is compared as a text, so a later event's is the greater one.
func TestCloudEventsSequenceGrows(t *testing.T) {
	t.Parallel()
	last := ""
	for _, id := range []int64{1, 9, 10, 99, 100, 1 << 40, 1<<63 - 1} {
		d := order()
		d.eventID = id
		req, err := requestOf(t, post.Destination{URL: "http://receiver.test/", Wire: post.Wire{Format: post.FormatCloudEvents, Source: "/s"}}, d)
		must(t, err)
		got := req.Header.Get("Ce-Sequence")
		if got <= last {
			t.Errorf("%s does not follow %s", got, last)
		}
		last = got
	}
}

// A URL never comes from an event, and holds no template that one could fill.
func TestSecurityURLsAreFixed(t *testing.T) {
	t.Parallel()
	for _, url := range []string{
		"http://receiver.test/{event_type}", "http://{host}/", "http://receiver.test/?k={{key}}", "http://receiver.test/${TYPE}",
	} {
		problems := Config{Destinations: []post.Destination{to(url)}}.Validate()
		if len(problems) == 0 || !strings.Contains(problems[0].Text, "template") && !strings.Contains(problems[0].Text, "parse") && !strings.Contains(problems[0].Text, "host") {
			t.Errorf("%s: %v", url, problems)
		}
	}
	d := order()
	headers, err := json.Marshal(map[string]string{"Location": "http://169.254.169.254/", "X-Forwarded-Host": "elsewhere", "X-Original-Url": "/admin"})
	must(t, err)
	d.event.Headers = headers
	req, err := requestOf(t, post.Destination{URL: "http://receiver.test/hooks"}, d)
	must(t, err)
	if req.URL.String() != "http://receiver.test/hooks" || req.Host != "receiver.test" || req.Header.Get("X-Forwarded-Host")+req.Header.Get("X-Original-Url") != "" {
		t.Errorf("%s at %s: %v", req.URL, req.Host, req.Header)
	}
}
