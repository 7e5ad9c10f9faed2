package headers_test

import (
	"math"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// full is an event of which everything is known that headers say.
func full() headers.Event {
	return headers.Event{
		IdempotencyKey: "k", Type: "invoice.created", Version: 2, ID: 4711, CreatedAt: time.Date(9999, 12, 31, 23, 59, 59, 1000, time.UTC),
		RelatedReference: "customer 42", OrderingKey: "o", Sequence: 3, Attempt: 4, DeliveryID: "4711-shop-eu-1", Destination: "shop",
		NotAfter: time.Date(1, 1, 1, 0, 0, 0, 1000, time.UTC), Replay: true, TraceParent: "00-1-2-01", TraceState: "a=b",
	}
}

// What Write says Read understands, whatever the zone of a time is.
func TestReadIsTheInverseOfWrite(t *testing.T) {
	t.Parallel()
	for name, e := range map[string]headers.Event{"full": full(), "least": {IdempotencyKey: "k", Version: 1}} {
		header := http.Header{}
		written := e
		written.CreatedAt = e.CreatedAt.In(time.FixedZone("", 7200))
		headers.Write(header, &written)
		got, malformed := headers.Read(header, "k")
		if malformed != "" || !reflect.DeepEqual(got, e) {
			t.Errorf("%s: read %+v, malformed %q, want %+v", name, got, malformed, e)
		}
	}
}

// A header that is there stays as it is.
func TestWriteKeepsWhatIsThere(t *testing.T) {
	t.Parallel()
	header := http.Header{webhook.EventType: {"sent"}}
	e := full()
	headers.Write(header, &e)
	if got := header.Get(webhook.EventType); got != "sent" || header.Get(webhook.IdempotencyKey) != "" {
		t.Errorf("type %q, headers %v", got, header)
	}
}

// An event with a header that breaks a rule is refused as a whole, and the first such header is
// named.
func TestReadNamesWhatIsMalformed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		key, name string
		values    []string
		malformed bool
	}{
		{"", "", nil, true},
		{"k\n", "", nil, true},
		{"k", webhook.EventType, []string{"a", "b"}, true},
		{"k", webhook.EventType, []string{strings.Repeat("a", 256)}, true},
		{"k", webhook.EventType, []string{"größe"}, true},
		{"k", webhook.EventType, []string{""}, false},
		{"k", webhook.Destination, []string{"shop", "shop"}, true},
		{"k", webhook.EventVersion, []string{"2147483648"}, true},
		{"k", webhook.EventID, []string{"-1"}, true},
		{"k", webhook.Sequence, []string{"9223372036854775807"}, false},
		{"k", webhook.CreatedAt, []string{"yesterday"}, true},
		{"k", webhook.NotAfter, []string{"2026-01-01 00:00:00"}, true},
		{"k", webhook.NotAfter, []string{"2026-01-01T00:00:00.5+02:00"}, false},
	} {
		header := http.Header{}
		want := ""
		if c.name != "" {
			header[c.name] = c.values
		}
		if c.malformed {
			want = c.name
			if want == "" {
				want = webhook.IdempotencyKey
			}
		}
		event, got := headers.Read(header, c.key)
		if got != want || (got != "") != reflect.DeepEqual(event, headers.Event{}) {
			t.Errorf("key %q, %s: %q: malformed %q, want %q; event %+v", c.key, c.name, c.values, got, want, event)
		}
	}
}

// What a Verify of the application returns is held to the same rules.
func TestInvalid(t *testing.T) {
	t.Parallel()
	type change = func(e *headers.Event)
	for want, changes := range map[string][]change{
		"": {func(*headers.Event) {}, func(e *headers.Event) { e.Version, e.TraceState = math.MaxInt32, strings.Repeat("a", 512) }},
		"IdempotencyKey": {
			func(e *headers.Event) { e.IdempotencyKey = "" }, func(e *headers.Event) { e.IdempotencyKey = strings.Repeat("a", 256) }, func(e *headers.Event) { e.IdempotencyKey = "a\nb" },
		},
		"Type":             {func(e *headers.Event) { e.Type = "a\x00b" }},
		"RelatedReference": {func(e *headers.Event) { e.RelatedReference = strings.Repeat("a", 256) }},
		"OrderingKey":      {func(e *headers.Event) { e.OrderingKey = "\n" }},
		"Destination":      {func(e *headers.Event) { e.Destination = strings.Repeat("a", 256) }},
		"DeliveryID":       {func(e *headers.Event) { e.DeliveryID = "ü" }},
		"TraceParent":      {func(e *headers.Event) { e.TraceParent = "\t" }},
		"TraceState":       {func(e *headers.Event) { e.TraceState = strings.Repeat("a", 513) }},
		"Version":          {func(e *headers.Event) { e.Version = math.MaxInt32 + 1 }, func(e *headers.Event) { e.Version = -1 }},
		"Attempt":          {func(e *headers.Event) { e.Attempt = -1 }},
		"ID":               {func(e *headers.Event) { e.ID = -1 }},
		"Sequence":         {func(e *headers.Event) { e.Sequence = -1 }},
		"CreatedAt":        {func(e *headers.Event) { e.CreatedAt = e.CreatedAt.Add(time.Second) }},
		"NotAfter":         {func(e *headers.Event) { e.NotAfter = e.NotAfter.Add(-time.Hour) }},
	} {
		for _, change := range changes {
			e := full()
			change(&e)
			if field, rule := e.Invalid(); field != want || (rule == "") != (want == "") {
				t.Errorf("%q: field %q, rule %q", want, field, rule)
			}
		}
	}
}
