package outbox_test

import (
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/outbox"
	"github.com/outbox-relay/outbox-relay/relay"
)

func TestNewEvent(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		payload any
		want    string
	}{
		{"struct", struct{ Note string }{"<&>"}, `{"Note":"<&>"}`},
		{"raw message is left alone", json.RawMessage(" {\"b\":1e3,\n\"a\":1,\"a\":2} "), " {\"b\":1e3,\n\"a\":1,\"a\":2} "},
		{"nil", nil, `null`},
	} {
		got, err := outbox.NewEvent("note.written", "note-1", c.payload)
		pgtest.Must(t, err)
		testkit.Equal(t, c.name, got, outbox.Event{Type: "note.written", IdempotencyKey: "note-1", Payload: json.RawMessage(c.want)})
	}

	_, err := outbox.NewEvent("note.written", "note-1", math.NaN())
	testkit.Equal(t, "error", err.Error(), `outbox: encode payload of "note-1": json: unsupported value: NaN`)
}

func TestValidationErrorNamesEventFieldRuleAndLimit(t *testing.T) {
	t.Parallel()
	with := func(edit func(*outbox.Event)) outbox.Event {
		e := event("inv-7")
		edit(&e)
		return e
	}
	for _, c := range []struct {
		event outbox.Event
		want  string
	}{
		{
			with(func(e *outbox.Event) { e.IdempotencyKey = strings.Repeat("k", 300) }),
			`("` + strings.Repeat("k", 64) + `"…): IdempotencyKey: 300 bytes, at most 255`,
		},
		{with(func(e *outbox.Event) { e.IdempotencyKey = "" }), `(""): IdempotencyKey: empty, at least 1 byte`},
		{with(func(e *outbox.Event) { e.IdempotencyKey = "a\r\nb" }), `("a\r\nb"): IdempotencyKey: byte 0x0d at 1, only printable ASCII`},
		{with(func(e *outbox.Event) { e.Type = "a b" }), `("inv-7"): Type: contains a blank`},
		{with(func(e *outbox.Event) { e.Version = -1 }), `("inv-7"): Version: -1, not between 1 and 2147483647`},
		{with(func(e *outbox.Event) { e.OrderingKey = " x" }), `("inv-7"): OrderingKey: starts or ends with a blank`},
		{with(func(e *outbox.Event) { e.RelatedReference = "é" }), `("inv-7"): RelatedReference: byte 0xc3 at 0, only printable ASCII`},
		{with(func(e *outbox.Event) { e.Payload = nil }), `("inv-7"): Payload: empty, must be one JSON value`},
		{
			with(func(e *outbox.Event) { e.Payload = json.RawMessage(`{"a":}`) }),
			`("inv-7"): Payload: not valid JSON: invalid character '}' looking for beginning of value`,
		},
		{
			with(func(e *outbox.Event) {
				e.Payload = json.RawMessage(strings.Repeat("[", 10001) + strings.Repeat("]", 10001))
			}),
			`("inv-7"): Payload: not valid JSON: invalid character '[' exceeded max depth`,
		},
		{
			with(func(e *outbox.Event) { e.Payload = json.RawMessage(strings.Repeat(" ", 1<<20) + "1") }),
			`("inv-7"): Payload: 1048577 bytes, at most 1048576`,
		},
		{
			with(func(e *outbox.Event) { e.AvailableAt = time.Date(9999, 1, 1, 1, 0, 0, 0, time.FixedZone("", 3600)) }),
			`("inv-7"): AvailableAt: 9999-01-01 00:00:00Z, at most 365 days from now; insert the event when it is nearer`,
		},
		{
			with(func(e *outbox.Event) { e.AvailableAt = time.Date(-1, 1, 1, 0, 0, 0, 0, time.UTC) }),
			`("inv-7"): AvailableAt: year -1, at least 1`,
		},
		{
			with(func(e *outbox.Event) { e.Headers = map[string]string{"X-Api-Key": "x"} }),
			`("inv-7"): Headers: name "X-Api-Key" is not one of content-*, traceparent, tracestate, baggage, ce-*, x-event-*; destinations drop it unless their event_headers name it, as Producer.EventHeaders must`,
		},
		{with(func(e *outbox.Event) { e.Headers = map[string]string{"a b": "x"} }), `("inv-7"): Headers: name "a b" is not an HTTP token`},
		{
			with(func(e *outbox.Event) { e.Headers = map[string]string{"X-Event-A": "1", "x-event-a": "2"} }),
			`("inv-7"): Headers: name "x-event-a" occurs twice, differing only in case`,
		},
		{
			with(func(e *outbox.Event) { e.Headers = map[string]string{"ce-a": "1\n"} }),
			`("inv-7"): Headers: value of "ce-a": byte 0x0a at 1, only printable ASCII`,
		},
		{
			with(func(e *outbox.Event) { e.Headers = map[string]string{"ce-a": strings.Repeat("x", 8192)} }),
			`("inv-7"): Headers: 8204 bytes as JSON, at most 8192`,
		},
	} {
		// A nil transaction: nothing may reach the database.
		_, err := outbox.Enqueue(t.Context(), nil, event("first"), c.event)
		if err == nil {
			t.Errorf("accepted, want %s", c.want)
			continue
		}
		testkit.Equal(t, "error", err.Error(), "outbox: event 1 "+c.want)
	}
}

func TestValidationReportsEveryProblem(t *testing.T) {
	t.Parallel()
	bad := event("inv-7")
	bad.Type, bad.Version = "", -5
	_, err := outbox.Enqueue(t.Context(), nil, bad, event("fine"), outbox.Event{Type: "t", IdempotencyKey: "k"})
	testkit.Equal(t, "error", err.Error(), `outbox: event 0 ("inv-7"): Type: empty, at least 1 byte
outbox: event 0 ("inv-7"): Version: -5, not between 1 and 2147483647
outbox: event 2 ("k"): Payload: empty, must be one JSON value`)

	var first *outbox.ValidationError
	if !errors.As(err, &first) {
		t.Fatalf("not a ValidationError: %v", err)
	}
	testkit.Equal(t, "first", *first, outbox.ValidationError{Index: 0, IdempotencyKey: "inv-7", Field: "Type", Problem: "empty, at least 1 byte"})
}

func TestReservedHeadersAreRefused(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		"Connection", "Keep-Alive", "Proxy-Authorization", "Proxy-Connection", "TE", "Trailer", "Transfer-Encoding", "Upgrade",
		"Expect", "Host", "Content-Length", "Content-Type", "Content-Encoding", "cOnTeNt-TyPe",
		webhook.IdempotencyKey, webhook.EventType, webhook.EventVersion, webhook.EventID, webhook.CreatedAt,
		webhook.RelatedReference, webhook.OrderingKey, webhook.Sequence, webhook.Attempt, webhook.DeliveryID, webhook.Destination,
		webhook.NotAfter, webhook.Replay, webhook.ID, webhook.Timestamp, webhook.Signature, webhook.OutboxPrefix + "Future",
		"Authorization", "Cookie", "X-Forwarded-For", "X_Forwarded_For", "x_forwarded_proto", "X.Real.Ip", "X-Original-Url", "X-Http-Method-Override", "Proxy",
	} {
		e := event("inv-7")
		e.Headers = map[string]string{name: "x", "X-Event-Tenant": "fine"}
		_, err := outbox.Enqueue(t.Context(), nil, e)
		if err == nil {
			t.Errorf("%s was accepted", name)
			continue
		}
		testkit.Equal(t, "error", err.Error(), `outbox: event 0 ("inv-7"): Headers: name "`+name+`" is reserved`)
	}
}

// What the relay would not send, and fail when its turn comes, is refused at once.
func TestHeadersTheRelayRefusesAreRefused(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		"Accept", "Accept-Encoding", "Authorization", "Cache-Control", "Connection", "Content-Length", "Content-Type", "Cookie",
		"Date", "Expect", "expect", "Host", "Idempotency-Key", "If-Match", "Keep-Alive", "Max-Forwards", "Origin", "Prefer",
		"Proxy-Authorization", "Range", "TE", "Te", "Trailer", "Transfer-Encoding", "Upgrade", "User-Agent", "Via",
		"Webhook-Id", "webhook-future", "X-Idempotency-Key", "X-Outbox-Future", "X-Event-Tenant", "x_tenant", "x!#$%&'*+.^_`|~", "a b",
		"ä", "",
	} {
		config := relay.Config{Destinations: []relay.Destination{
			{Name: "default", URL: "https://receiver.example/", Headers: map[string]string{name: "x"}},
		}}
		refused := false
		for _, problem := range config.Validate() {
			refused = refused || strings.Contains(problem.Path, ".headers.")
		}
		e := event("inv-7")
		e.Type, e.Headers = "", map[string]string{name: "x"} // without a type, nothing reaches the database
		_, err := outbox.Enqueue(t.Context(), nil, e)
		if refused && !strings.Contains(err.Error(), "Headers: name ") {
			t.Errorf("%q was accepted, and the relay would fail it", name)
		}
	}
}
