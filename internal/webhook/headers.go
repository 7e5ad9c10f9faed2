package webhook

import (
	"net/http"
	"slices"
	"strings"
)

// Headers of one POST and of its answer. The names are part of the wire contract.
const (
	// IdempotencyKey carries the event's key: the same on every attempt, relay and replay.
	IdempotencyKey = "X-Idempotency-Key"

	// OutboxPrefix is what every header of the relay about an event starts with. x1 covers all of
	// them: see [Covered].
	OutboxPrefix     = "X-Outbox-"
	EventType        = OutboxPrefix + "Event-Type"
	EventVersion     = OutboxPrefix + "Event-Version"
	EventID          = OutboxPrefix + "Event-Id"
	CreatedAt        = OutboxPrefix + "Created-At" // RFC 3339 with microseconds, UTC
	RelatedReference = OutboxPrefix + "Related-Reference"
	OrderingKey      = OutboxPrefix + "Ordering-Key"
	Sequence         = OutboxPrefix + "Sequence"    // grows within an ordering key
	Attempt          = OutboxPrefix + "Attempt"     // 1 for the first POST
	DeliveryID       = OutboxPrefix + "Delivery-Id" // unique per attempt, and opaque
	Destination      = OutboxPrefix + "Destination" // the relay's name for the receiver
	NotAfter         = OutboxPrefix + "Not-After"   // latest possible redelivery, RFC 3339, UTC
	Replay           = OutboxPrefix + "Replay"      // "true" on a replay, otherwise absent

	// Reconcile is on a question of a reconciliation, never on a delivery: the destination whose
	// receiver is asked.
	Reconcile = OutboxPrefix + "Reconcile"

	// The three headers of Standard Webhooks 1.0.0.
	ID        = "Webhook-Id"
	Timestamp = "Webhook-Timestamp" // Unix seconds of the attempt
	Signature = "Webhook-Signature" // space-separated "v1,<base64>" and "x1,<base64>"

	TraceParent = "Traceparent"
	TraceState  = "Tracestate"

	// Replayed is "true" on the answer to a duplicate, which has the status of the first answer and
	// no body.
	Replayed = "Idempotency-Replayed"
)

// The reserved names, as fold writes them. An event may bring none of these headers. A
// destination's configuration may set those of the second pair, which are its owner's to decide.
// Migrations hold the same names as a pattern: a change here needs one.
var (
	reservedNames = [...]string{
		"connection", "content-encoding", "content-length", "content-type", "expect", "host", "http2-settings", "keep-alive", "te",
		"trailer", "transfer-encoding", "upgrade", "x-idempotency-key",
	}
	reservedPrefixes = [...]string{"proxy-", "webhook-", "x-outbox-"}

	// They speak for the relay, or for a proxy between it and the receiver. "proxy" becomes
	// HTTP_PROXY under CGI.
	reservedNamesForEvents = [...]string{
		"accept-encoding", "authorization", "cf-connecting-ip", "cookie", "fastly-client-ip", "forwarded", "forwarded-for", "proxy",
		"remote-user", "true-client-ip", "user-agent", "via", "x-client-ip", "x-cluster-client-ip", "x-forwarded", "x-http-method",
		"x-http-method-override", "x-method-override", "x-original", "x-real-ip", "x-rewrite-url",
	}
	reservedPrefixesForEvents = [...]string{"x-envoy-", "x-forwarded-", "x-original-", "x-originating-", "x-remote-"}
)

// Reserved reports whether a header belongs to this contract or to HTTP itself, so that neither the
// configuration of a destination nor an event may set it. Spellings make no difference: see
// [SameName].
func Reserved(name string) bool {
	return isAmong(fold(name), reservedNames[:], reservedPrefixes[:])
}

// ReservedForEvents reports whether an event may not bring a header: it is [Reserved], or would
// speak for the relay or for a proxy between it and the receiver. The constraint on the column
// outbox.headers has the same list.
func ReservedForEvents(name string) bool {
	folded := fold(name)
	return isAmong(folded, reservedNames[:], reservedPrefixes[:]) ||
		isAmong(folded, reservedNamesForEvents[:], reservedPrefixesForEvents[:])
}

var defaultEventHeaders = [...]string{"content-*", "traceparent", "tracestate", "baggage", "ce-*", "x-event-*"}

// DefaultEventHeaders returns the headers that an event may set at a destination that names no
// others: names, and prefixes that end with a star. What a proxy or an identity provider sets
// before the receiver is none of them.
func DefaultEventHeaders() []string { return slices.Clone(defaultEventHeaders[:]) }

// EventMaySet reports whether an event may set a header at a destination that lets the given
// headers through; nil: the default ones. A reserved header it may never set.
func EventMaySet(allowed []string, name string) bool {
	folded := fold(name)
	if allowed == nil {
		allowed = defaultEventHeaders[:]
	}
	return !ReservedForEvents(name) && slices.ContainsFunc(allowed, func(pattern string) bool {
		prefix, many := strings.CutSuffix(pattern, "*")
		return many && strings.HasPrefix(folded, fold(prefix)) || fold(pattern) == folded && !many
	})
}

// Covered reports whether x1 covers a header, by its canonical name: the idempotency key, and all
// that begin as those of the relay, of events and of CloudEvents do.
func Covered(name string) bool {
	return strings.HasPrefix(name, OutboxPrefix) || strings.HasPrefix(name, "X-Event-") || strings.HasPrefix(name, "Ce-") || name == IdempotencyKey
}

// SentName returns the name by which a relay sends a header of an event or of a destination: the
// canonical one. If a receiver that reads x_event_a as x-event-a would take the header as covered,
// it is sent with hyphens, because other receivers would not.
func SentName(name string) string {
	if folded := http.CanonicalHeaderKey(fold(name)); Covered(folded) {
		return folded
	}
	return http.CanonicalHeaderKey(name)
}

// SameName reports whether a receiver may take two header names for one. Upper and lower case make
// no difference. Nor does any sign that is neither letter nor digit: CGI, WSGI, PHP and others make
// '_' of '-', and some of '.' or of every such sign.
func SameName(a, b string) bool { return len(a) == len(b) && fold(a) == fold(b) }

// fold returns a header name in lower case, with '-' for every byte that is neither letter nor
// digit.
func fold(name string) string {
	folded := []byte(name)
	for i, c := range folded {
		switch {
		case 'A' <= c && c <= 'Z':
			folded[i] = c + 'a' - 'A'
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9':
		default:
			folded[i] = '-'
		}
	}
	return string(folded)
}

func isAmong(folded string, names, prefixes []string) bool {
	return slices.Contains(names, folded) ||
		slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(folded, prefix) })
}
