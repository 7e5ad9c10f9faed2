package webhook

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
