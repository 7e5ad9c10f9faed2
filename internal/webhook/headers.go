package webhook

import "strings"

// Headers of one POST. The names are part of the wire contract.
const (
	// IdempotencyKey carries the event's key: the same on every attempt, relay and replay.
	IdempotencyKey = "X-Idempotency-Key"

	// OutboxPrefix is what every header about the event itself starts with; all of them are signed by x1.
	OutboxPrefix     = "X-Outbox-"
	EventType        = OutboxPrefix + "Event-Type"
	EventVersion     = OutboxPrefix + "Event-Version"
	EventID          = OutboxPrefix + "Event-Id"
	CreatedAt        = OutboxPrefix + "Created-At" // RFC 3339 with microseconds, UTC
	RelatedReference = OutboxPrefix + "Related-Reference"
	OrderingKey      = OutboxPrefix + "Ordering-Key"
	Sequence         = OutboxPrefix + "Sequence"    // grows within an ordering key
	Attempt          = OutboxPrefix + "Attempt"     // 1 for the first POST
	DeliveryID       = OutboxPrefix + "Delivery-Id" // unique per attempt
	NotAfter         = OutboxPrefix + "Not-After"   // latest possible redelivery, RFC 3339, UTC
	Replay           = OutboxPrefix + "Replay"      // "true" on a replay, otherwise absent

	// The three headers of Standard Webhooks 1.0.0.
	ID        = "Webhook-Id"
	Timestamp = "Webhook-Timestamp" // Unix seconds of the attempt
	Signature = "Webhook-Signature" // space-separated "v1,<base64>" and "x1,<base64>"

	TraceParent = "Traceparent"
	TraceState  = "Tracestate"
)

// Reserved reports whether a header belongs to this contract or to HTTP itself, so that neither the configuration of a
// destination nor an event may set it. Upper and lower case make no difference, nor do '-' and '_', which are the same to
// a receiver behind CGI, WSGI or PHP.
func Reserved(name string) bool {
	folded := fold(name)
	switch folded {
	case "connection", "content-encoding", "content-length", "content-type", "expect", "host", "keep-alive", "te", "trailer",
		"transfer-encoding", "upgrade", "x-idempotency-key":
		return true
	}
	return hasPrefix(folded, "proxy-", "webhook-", "x-outbox-")
}

// ReservedForEvents reports whether an event may not bring a header: it is [Reserved], or would speak for the relay or
// for a proxy between it and the receiver. The constraint on the column outbox.headers has the same list.
func ReservedForEvents(name string) bool {
	folded := fold(name)
	switch folded {
	case "authorization", "cookie", "forwarded", "true-client-ip", "user-agent", "x-client-ip", "x-http-method",
		"x-http-method-override", "x-method-override", "x-real-ip", "x-rewrite-url":
		return true
	}
	return Reserved(name) || hasPrefix(folded, "x-forwarded-", "x-original-")
}

func fold(name string) string { return strings.ReplaceAll(strings.ToLower(name), "_", "-") }

func hasPrefix(s string, prefixes ...string) bool {
	for _, prefix := range prefixes {
		if strings.HasPrefix(s, prefix) {
			return true
		}
	}
	return false
}
