package post_test

import (
	"maps"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// Binary mode of CloudEvents 1.0, beside everything else.
func TestCloudEvents(t *testing.T) {
	t.Parallel()
	destination := post.Destination{
		URL: "http://receiver.test/", SigningSecrets: []webhook.Secret{secret(t, testSecret)},
		Wire: post.Wire{Format: post.FormatCloudEvents, Source: "https://finance.internal/outbox?a=%20b"},
	}
	m := order()
	m.Headers = []byte(`{"ce-id": "event", "CE-Subject": "event", "ce-sequence": "event", "ce-tenant": "extension", "traceparent": "t"}`)
	req, err := requestOf(t, destination, m)
	relaytest.Must(t, err)
	want := http.Header{
		"Ce-Specversion": {"1.0"}, "Ce-Id": {"inv-1.paid"}, "Ce-Source": {"https://finance.internal/outbox?a=%2520b"}, "Ce-Type": {"invoice.paid"},
		"Ce-Time": {"2026-03-01T12:00:00.123456Z"}, "Ce-Subject": {"INV/2026/1"}, "Ce-Partitionkey": {"customer-7"}, "Ce-Sequence": {"00000000000000000042"},
		"Ce-Tenant": {"extension"}, "Traceparent": {"t"},
	}
	raw := order()
	raw.Headers = []byte(`{"traceparent": "t"}`)
	plain := destination
	plain.Wire = post.Wire{Format: post.FormatRaw}
	rest, err := requestOf(t, plain, raw)
	relaytest.Must(t, err)
	maps.Copy(want, rest.Header)
	want[webhook.Signature] = req.Header[webhook.Signature] // which covers the attributes, too
	if !maps.EqualFunc(req.Header, want, slices.Equal) {
		t.Errorf("headers\n%v, want\n%v", req.Header, want)
	}
	if by, err := webhook.Verify(req.Header, m.Payload, time.Unix(1_700_000_000, 0), time.Minute, secret(t, testSecret)); err != nil || by != webhook.VerifiedX1 {
		t.Errorf("verified %d, %v", by, err)
	}

	m.OrderingKey, m.RelatedReference = nil, nil
	req, err = requestOf(t, destination, m)
	relaytest.Must(t, err)
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
	m.Key, m.CreatedAt = &key, created
	req, err = requestOf(t, destination, m)
	relaytest.Must(t, err)
	if got := req.Header.Get("Ce-Id"); got != "inv%201%20%22x%22%205%25" || req.Header.Get("X-Idempotency-Key") != key {
		t.Errorf("id %s, key %s", got, req.Header.Get("X-Idempotency-Key"))
	}
	testkit.Equal(t, "time", req.Header.Get("Ce-Time"), "2026-03-01T12:00:00Z")

	// With format raw, the headers of a producer that speaks CloudEvents itself arrive as they are.
	m.Headers = []byte(`{"ce-id": "event"}`)
	req, err = requestOf(t, plain, m)
	relaytest.Must(t, err)
	if req.Header.Get("Ce-Id") != "event" || req.Header.Get("Ce-Type") != "" {
		t.Errorf("%v", req.Header)
	}
}

// The sequence of CloudEvents is compared as a text, so a later event's is the greater one.
func TestCloudEventsSequenceGrows(t *testing.T) {
	t.Parallel()
	last := ""
	for _, id := range []int64{1, 9, 10, 99, 100, 1 << 40, 1<<63 - 1} {
		m := order()
		m.EventID = id
		req, err := requestOf(t, post.Destination{URL: "http://receiver.test/", Wire: post.Wire{Format: post.FormatCloudEvents, Source: "/s"}}, m)
		relaytest.Must(t, err)
		got := req.Header.Get("Ce-Sequence")
		if got <= last {
			t.Errorf("%s does not follow %s", got, last)
		}
		last = got
	}
}
