package outbox

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// Limits of an event. For rows that arrive by plain SQL, the table refuses a type and a key beyond
// them, and relays check the others.
const (
	maxTextBytes    = 255     // Type, IdempotencyKey, OrderingKey, RelatedReference
	maxPayloadBytes = 1 << 20 // Payload
	maxHeadersBytes = 8192    // Headers, as PostgreSQL prints them

	// maxDelay bounds AvailableAt by this process's clock. Relays allow a day more after
	// created_at, by the database's clock, so that what Enqueue accepts does not fail there because
	// the clocks differ.
	maxDelay = 365 * 24 * time.Hour
)

// An Event is what a producer tells the world: written once, inside the business transaction, and
// never changed.
//
// Type, Payload and IdempotencyKey are required; the zero value of every other field is a working
// default. Type, IdempotencyKey, OrderingKey and RelatedReference travel as HTTP headers: at most
// 255 bytes of printable ASCII, neither starting nor ending with a blank, and Type without any
// blank.
type Event struct {
	// Type says what happened, as "invoice.issued" does. Routes match it, with '*' as the wildcard,
	// and so decide the destinations. A type that no route matches is no error: the event is parked
	// until an operator routes it.
	Type string

	// Version is the version of the payload's schema, so that a receiver can tell old from new.
	// Zero means 1.
	Version int

	// Payload is the body of the POST, byte for byte: whitespace, key order, duplicate keys and 1e3
	// arrive as they are. One JSON value of at most 1 MiB, in UTF-8, nested at most 10,000 deep.
	// Empty is refused; JSON null is not.
	Payload json.RawMessage

	// IdempotencyKey names the event for ever; receivers use it to ignore a second delivery. Derive
	// it from the business fact ("invoice-4711-issued"), so that a repeated business operation
	// repeats the key, never from a clock or a random number. The key is unique among all events of
	// the database.
	IdempotencyKey string

	// OrderingKey keeps events in order: at each destination, those that share it are delivered in
	// the order in which they become due, then in that of their inserts. One that fails or waits
	// holds up the ones behind it. Empty: no order, full parallelism.
	OrderingKey string

	// RelatedReference names the business object for the people who search for it ("INV-4711").
	// Empty: none.
	RelatedReference string

	// Headers are further HTTP headers of the POST: content-*, traceparent, tracestate, baggage,
	// ce-*, x-event-*, and what [Producer.EventHeaders] adds. Of these ce-* and x-event-* are
	// signed. Values are printable ASCII; all together take at most 8192 bytes as the JSON object
	// that the table stores. Names that belong to HTTP (Content-Type), to the relay (X-Outbox-…,
	// Webhook-…), to a destination's credentials (Authorization, Cookie) or to proxies
	// (X-Forwarded-…) are refused in every spelling (x_real_ip), since the relay would not send
	// them.
	Headers map[string]string

	// AvailableAt is the earliest moment of delivery by the database's clock, to the microsecond:
	// at most 365 days from now. The zero value, like any moment in the past, means at once. With
	// an OrderingKey, the event joins its key when it is due: until then it holds no other event of
	// the key.
	AvailableAt time.Time
}

// NewEvent returns an event whose payload is v as [json.Marshal] encodes it, but with <, > and &
// left as they are. A [json.RawMessage] becomes the payload untouched.
//
// Encode what the repetition of a business operation would encode again: a payload that holds the
// current time makes the second attempt another content under the same key, which [Enqueue] refuses
// with [ErrKeyReused].
func NewEvent(eventType, idempotencyKey string, v any) (Event, error) {
	event := Event{Type: eventType, IdempotencyKey: idempotencyKey}
	if raw, ok := v.(json.RawMessage); ok {
		event.Payload = raw
		return event, nil
	}
	var payload bytes.Buffer
	encoder := json.NewEncoder(&payload)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(v); err != nil {
		return Event{}, fmt.Errorf("outbox: encode payload of %s: %w", quote(idempotencyKey), err)
	}
	event.Payload = bytes.TrimSuffix(payload.Bytes(), []byte("\n"))
	return event, nil
}

// A ValidationError says which field of which event breaks which rule. [Enqueue] reports all of
// them joined, before it touches the database: the transaction is still usable.
type ValidationError struct {
	Index          int    // the event's position among the arguments, from 0
	IdempotencyKey string // of the event, as given
	Field          string // the field of Event
	Problem        string // what is wrong and what would be right
}

// Error names the event, the field, the value's flaw and the limit.
func (e *ValidationError) Error() string {
	return fmt.Sprintf("outbox: event %d (%s): %s: %s", e.Index, quote(e.IdempotencyKey), e.Field, e.Problem)
}

// validate returns everything that is wrong with the event, joined, or nil.
func (e *Event) validate(index int, now time.Time, headers []string) error {
	var problems []error
	check := func(field, problem string) {
		if problem != "" {
			problems = append(problems, &ValidationError{Index: index, IdempotencyKey: e.IdempotencyKey, Field: field, Problem: problem})
		}
	}
	check("Type", textProblem(e.Type))
	if strings.Contains(e.Type, " ") {
		check("Type", "contains a blank")
	}
	if e.Version < 0 || e.Version > math.MaxInt32 {
		check("Version", fmt.Sprintf("%d, not between 1 and %d", e.Version, math.MaxInt32))
	}
	check("Payload", payloadProblem(e.Payload))
	check("IdempotencyKey", textProblem(e.IdempotencyKey))
	if e.OrderingKey != "" {
		check("OrderingKey", textProblem(e.OrderingKey))
	}
	if e.RelatedReference != "" {
		check("RelatedReference", textProblem(e.RelatedReference))
	}
	for _, problem := range headerProblems(e.Headers, headers) {
		check("Headers", problem)
	}
	check("AvailableAt", momentProblem(e.AvailableAt, now))
	return errors.Join(problems...)
}

func momentProblem(at, now time.Time) string {
	switch at = at.UTC(); {
	case at.Year() < 1:
		return fmt.Sprintf("year %d, at least 1", at.Year())
	case at.After(now.Add(maxDelay)):
		return fmt.Sprintf("%s, at most 365 days from now; insert the event when it is nearer", at.Format("2006-01-02 15:04:05Z"))
	}
	return ""
}

func textProblem(s string) string {
	switch at := strings.IndexFunc(s, notPrintable); {
	case s == "":
		return "empty, at least 1 byte"
	case len(s) > maxTextBytes:
		return fmt.Sprintf("%d bytes, at most %d", len(s), maxTextBytes)
	case at >= 0:
		return fmt.Sprintf("byte 0x%02x at %d, only printable ASCII", s[at], at)
	case s[0] == ' ' || s[len(s)-1] == ' ':
		return "starts or ends with a blank"
	}
	return ""
}

func notPrintable(r rune) bool { return r < ' ' || r > '~' }

func payloadProblem(payload json.RawMessage) string {
	switch {
	case len(payload) == 0:
		return "empty, must be one JSON value"
	case len(payload) > maxPayloadBytes:
		return fmt.Sprintf("%d bytes, at most %d", len(payload), maxPayloadBytes)
	case !utf8.Valid(payload): // encoding/json lets it pass, PostgreSQL does not
		return "not valid UTF-8"
	case !json.Valid(payload):
		var value json.RawMessage
		return fmt.Sprintf("not valid JSON: %v", json.Unmarshal(payload, &value))
	}
	return ""
}

func headerProblems(headers map[string]string, allowed []string) []string {
	var problems []string
	seen := make(map[string]bool, len(headers))
	for _, name := range slices.Sorted(maps.Keys(headers)) {
		value := headers[name]
		switch folded := strings.ToLower(name); {
		case name == "" || strings.ContainsFunc(name, notToken):
			problems = append(problems, fmt.Sprintf("name %s is not an HTTP token", quote(name)))
		case webhook.ReservedForEvents(name):
			problems = append(problems, fmt.Sprintf("name %s is reserved", quote(name)))
		case !webhook.EventMaySet(allowed, name):
			problems = append(problems, fmt.Sprintf("name %s is not one of %s; destinations drop it unless their event_headers name it, as Producer.EventHeaders must", quote(name), strings.Join(allowed, ", ")))
		case seen[folded]:
			problems = append(problems, fmt.Sprintf("name %s occurs twice, differing only in case", quote(folded)))
		default:
			seen[folded] = true
		}
		if at := strings.IndexFunc(value, notPrintable); at >= 0 {
			problems = append(problems, fmt.Sprintf("value of %s: byte 0x%02x at %d, only printable ASCII", quote(name), value[at], at))
		}
	}
	if size := len(headersText(headers)); size > maxHeadersBytes {
		problems = append(problems, fmt.Sprintf("%d bytes as JSON, at most %d", size, maxHeadersBytes))
	}
	return problems
}

func notToken(r rune) bool {
	alphanumeric := 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9'
	return !alphanumeric && !strings.ContainsRune("!#$%&'*+-.^_`|~", r)
}

// headersText returns the headers as jsonb prints them, {"a": "1", "b": "2"}: relays measure that.
func headersText(headers map[string]string) string {
	text := []byte{'{'}
	for i, name := range slices.Sorted(maps.Keys(headers)) {
		if i > 0 {
			text = append(text, ", "...)
		}
		text = appendQuoted(text, name)
		text = append(text, ": "...)
		text = appendQuoted(text, headers[name])
	}
	return string(append(text, '}'))
}

// appendQuoted quotes a string as PostgreSQL's array literals want it and, as long as it is
// printable, JSON does.
func appendQuoted[S string | json.RawMessage](text []byte, s S) []byte {
	text = append(text, '"')
	for i := range len(s) {
		if s[i] == '"' || s[i] == '\\' {
			text = append(text, '\\')
		}
		text = append(text, s[i])
	}
	return append(text, '"')
}

// contentDiffers returns the fields in which two events of one key differ. AvailableAt is no
// content: when to deliver may be decided again. Neither is the trace context, since a repeated
// operation has another trace.
func (e *Event) contentDiffers(other *Event) []string {
	var fields []string
	differs := func(field string, different bool) {
		if different {
			fields = append(fields, field)
		}
	}
	differs("Type", e.Type != other.Type)
	differs("Version", e.version() != other.version())
	differs("Payload", !bytes.Equal(e.Payload, other.Payload))
	differs("OrderingKey", e.OrderingKey != other.OrderingKey)
	differs("RelatedReference", e.RelatedReference != other.RelatedReference)
	differs("Headers", !maps.Equal(withoutTrace(e.Headers), withoutTrace(other.Headers)))
	return fields
}

func (e *Event) version() int { return max(e.Version, 1) }

// quote prints a key or a name, shortened: at this point it may be anything, of any length.
func quote(s string) string {
	const enough = 64
	if len(s) > enough {
		return fmt.Sprintf("%q…", s[:enough])
	}
	return fmt.Sprintf("%q", s)
}
