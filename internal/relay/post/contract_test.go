package post_test

import (
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

func TestRequestIsTheWireContract(t *testing.T) {
	t.Parallel()
	m := order()
	m.Headers = []byte(`{"traceparent": "00-abc-def-01", "X-Event-Own": "o", "X-Event-Both": "event", "user-agent": "me"}`)
	req, err := requestOf(t, post.Destination{
		URL:            "https://receiver.test:8443/hooks?x=1",
		Headers:        map[string]string{"authorization": "Bearer b", "X-Event-Both": "destination"},
		SigningSecrets: []webhook.Secret{secret(t, testSecret)},
	}, m)
	relaytest.Must(t, err)
	want := http.Header{
		"Content-Type": {"application/json"}, "User-Agent": {"outbox-relay/1.2.3"},
		"Authorization": {"Bearer b"}, "X-Event-Both": {"destination"}, "X-Event-Own": {"o"}, "Traceparent": {"00-abc-def-01"},
		"X-Idempotency-Key": {"inv-1.paid"}, "X-Outbox-Event-Type": {"invoice.paid"}, "X-Outbox-Event-Version": {"3"},
		"X-Outbox-Event-Id": {"42"}, "X-Outbox-Created-At": {"2026-03-01T12:00:00.123456Z"}, "X-Outbox-Attempt": {"3"},
		"X-Outbox-Delivery-Id": {"42-default-9"}, "X-Outbox-Destination": {"default"}, "X-Outbox-Related-Reference": {"INV/2026/1"},
		"X-Outbox-Ordering-Key": {"customer-7"}, "X-Outbox-Sequence": {"42"},
		"Webhook-Id": {webhook.DeriveID("inv-1.paid")}, "Webhook-Timestamp": {"1700000000"},
		"Webhook-Signature": req.Header["Webhook-Signature"],
	}
	if !maps.EqualFunc(req.Header, want, slices.Equal) {
		t.Errorf("headers\n%v, want\n%v", req.Header, want)
	}
	body, err := io.ReadAll(req.Body)
	relaytest.Must(t, err)
	if string(body) != `{"a":1e3}` || req.ContentLength != 9 || req.Method != "POST" || req.Host != "receiver.test:8443" || req.URL.RequestURI() != "/hooks?x=1" {
		t.Errorf("%s %s %s, %d bytes: %s", req.Method, req.Host, req.URL.RequestURI(), req.ContentLength, body)
	}
	if req.GetBody != nil {
		t.Error("with GetBody, net/http sends a POST with X-Idempotency-Key again by itself")
	}
	got, err := webhook.Verify(req.Header, body, time.Unix(1_700_000_000, 0), time.Minute, secret(t, testSecret))
	if err != nil || got != webhook.VerifiedX1 {
		t.Errorf("verified %d, %v", got, err)
	}
}

// The signature covers X-Outbox-Replay. Otherwise a proxy could remove it, and the receiver would
// take a replay for a first delivery.
func TestReplayIsSigned(t *testing.T) {
	t.Parallel()
	m := order()
	m.Replay = true
	req, err := requestOf(t, post.Destination{URL: "http://receiver.test/", SigningSecrets: []webhook.Secret{secret(t, testSecret)}}, m)
	relaytest.Must(t, err)
	if got := req.Header.Get(webhook.Replay); got != "true" {
		t.Fatalf("%s: %q", webhook.Replay, got)
	}
	verify := func() (webhook.Verified, error) {
		return webhook.Verify(req.Header, m.Payload, time.Unix(1_700_000_000, 0), time.Minute, secret(t, testSecret))
	}
	if got, err := verify(); err != nil || got != webhook.VerifiedX1 {
		t.Errorf("verified %d, %v, with the header", got, err)
	}
	req.Header.Del(webhook.Replay)
	if got, _ := verify(); got == webhook.VerifiedX1 {
		t.Error("the signature covers a request without the header")
	}
}

// The signature covers what an event and its destination say in headers, and the attributes of
// CloudEvents. Their names are such that no receiver reads another one.
func TestSecurityOwnHeadersAreSigned(t *testing.T) {
	t.Parallel()
	for _, format := range []post.Wire{{}, {Format: post.FormatCloudEvents, Source: "/finance"}} {
		m := order()
		m.Headers = []byte(`{"x-event-tenant": "a", "X_Event_Role": " b ", "x-event-a.b": "", "ce-tenant": "c", "baggage": "d"}`)
		d := post.Destination{
			URL: "http://receiver.test/", SigningSecrets: []webhook.Secret{secret(t, testSecret)}, Wire: format,
			Headers: map[string]string{"x_event_stage": "test", "X-Zone": "e"},
		}
		req, err := requestOf(t, d, m)
		relaytest.Must(t, err)
		verify := func(h http.Header) webhook.Verified {
			by, err := webhook.Verify(h, m.Payload, time.Unix(1_700_000_000, 0), time.Minute, secret(t, testSecret))
			relaytest.Must(t, err)
			return by
		}
		if by := verify(req.Header); by != webhook.VerifiedX1 {
			t.Fatalf("%v is verified by %d", req.Header, by)
		}
		signed := []string{"X-Event-Tenant", "X-Event-Role", "X-Event-A-B", "X-Event-Stage", "Ce-Tenant", webhook.Destination}
		if format.Format == post.FormatCloudEvents {
			signed = append(signed, "Ce-Id", "Ce-Type", "Ce-Source", "Ce-Sequence")
		}
		for _, name := range signed {
			if _, sent := req.Header[name]; !sent {
				t.Errorf("%s is not sent", name)
			}
			changed, without := req.Header.Clone(), req.Header.Clone()
			changed.Set(name, "other")
			without.Del(name)
			if verify(changed) == webhook.VerifiedX1 || verify(without) == webhook.VerifiedX1 {
				t.Errorf("%s may be changed or removed", name)
			}
		}
		for _, name := range []string{"Baggage", "X-Zone"} {
			changed := req.Header.Clone()
			changed.Set(name, "other")
			if _, sent := req.Header[name]; !sent || verify(changed) != webhook.VerifiedX1 {
				t.Errorf("%s is signed, or not sent", name)
			}
		}
	}
}

func TestRequestLeavesOutWhatTheEventHasNot(t *testing.T) {
	t.Parallel()
	m := order()
	m.OrderingKey, m.RelatedReference = nil, nil
	req, err := requestOf(t, post.Destination{URL: "http://receiver.test/"}, m)
	relaytest.Must(t, err)
	for _, name := range []string{webhook.OrderingKey, webhook.Sequence, webhook.RelatedReference, webhook.Signature} {
		if value, sent := req.Header[name]; sent {
			t.Errorf("%s: %q", name, value)
		}
	}
}

func TestSecurityEventsThatNoRequestCanExpress(t *testing.T) {
	t.Parallel()
	text := func(s string) *string { return &s }
	for name, c := range map[string]struct {
		change func(*post.Event)
		want   string
	}{
		"key with line feed":      {func(e *post.Event) { e.Key = text("a\r\nX-Evil: 1") }, "X-Idempotency-Key would hold"},
		"key with NUL":            {func(e *post.Event) { e.Key = text("a\x00") }, "X-Idempotency-Key would hold"},
		"key beyond ASCII":        {func(e *post.Event) { e.Key = text("ключ") }, "X-Idempotency-Key would hold"},
		"key with a blank behind": {func(e *post.Event) { e.Key = text("a ") }, "X-Idempotency-Key would hold surrounding blanks"},
		"type with line feed":     {func(e *post.Event) { e.EventType = text("a\nb") }, "X-Outbox-Event-Type would hold"},
		"ordering key with DEL":   {func(e *post.Event) { e.OrderingKey = text("a\x7f") }, "X-Outbox-Ordering-Key would hold"},
		"reference with escape":   {func(e *post.Event) { e.RelatedReference = text("\x1b[31m") }, "X-Outbox-Related-Reference would hold"},
		"headers are an array":    {func(e *post.Event) { e.Headers = []byte(`["a"]`) }, "not an object of strings"},
		"headers are a number":    {func(e *post.Event) { e.Headers = []byte(`1`) }, "not an object of strings"},
		"headers are nested":      {func(e *post.Event) { e.Headers = []byte(`{"a": {"b": "c"}}`) }, "not an object of strings"},
		"header value is no text": {func(e *post.Event) { e.Headers = []byte(`{"a": 1}`) }, "not an object of strings"},
		"created at infinity":     {func(e *post.Event) { e.CreatedAt.InfinityModifier = pgtype.Infinity }, "created_at is infinite"},
		"created at -infinity":    {func(e *post.Event) { e.CreatedAt.InfinityModifier = pgtype.NegativeInfinity }, "created_at is infinite"},
	} {
		m := order()
		c.change(&m.Event)
		if _, err := requestOf(t, post.Destination{URL: "http://receiver.test/"}, m); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}
