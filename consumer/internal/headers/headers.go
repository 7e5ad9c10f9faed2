// Package headers reads and writes what the headers of a relay's request say of its event.
package headers

import (
	"fmt"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// Event is consumer.Event, field by field: the one converts to the other.
type Event struct {
	Receiver         string // this and the others are documented there
	Source           string
	IdempotencyKey   string
	Type             string
	Version          int
	ID               int64
	CreatedAt        time.Time
	RelatedReference string
	OrderingKey      string
	Sequence         int64
	Attempt          int
	DeliveryID       string
	Destination      string
	NotAfter         time.Time
	Replay           bool
	Foreign          bool
	TraceParent      string
	TraceState       string
	Payload          []byte
}

const (
	// MaxTextBytes bounds a key and every text about an event, as the producer's schema does.
	MaxTextBytes = 255
	// maxTraceState is how much of tracestate the W3C asks all to pass on.
	maxTraceState = 512
)

// Printable reports whether text is 1 to 255 printable ASCII characters, the rule of the producer's
// schema.
func Printable(text string) bool { return 1 <= len(text) && len(text) <= MaxTextBytes && ascii(text) }

func ascii(text string) bool {
	for i := range len(text) {
		if text[i] < ' ' || text[i] > '~' {
			return false
		}
	}
	return true
}

// Invalid names the first field that breaks a rule, and the rule.
func (e *Event) Invalid() (field, rule string) {
	if !Printable(e.IdempotencyKey) {
		return "IdempotencyKey", fmt.Sprintf("1 to %d printable ASCII characters", MaxTextBytes)
	}
	for _, text := range []struct{ field, value string }{
		{"Type", e.Type},
		{"RelatedReference", e.RelatedReference},
		{"OrderingKey", e.OrderingKey},
		{"DeliveryID", e.DeliveryID},
		{"Destination", e.Destination},
		{"TraceParent", e.TraceParent},
	} {
		if text.value != "" && !Printable(text.value) {
			return text.field, fmt.Sprintf("empty or 1 to %d printable ASCII characters", MaxTextBytes)
		}
	}
	if len(e.TraceState) > maxTraceState || !ascii(e.TraceState) {
		return "TraceState", fmt.Sprintf("at most %d printable ASCII characters", maxTraceState)
	}
	for _, number := range []struct {
		field      string
		value, max int64
	}{
		{"Version", int64(e.Version), math.MaxInt32},
		{"Attempt", int64(e.Attempt), math.MaxInt32},
		{"ID", e.ID, math.MaxInt64},
		{"Sequence", e.Sequence, math.MaxInt64},
	} {
		if number.value < 0 || number.value > number.max {
			return number.field, fmt.Sprintf("a number from 0 to %d", number.max)
		}
	}
	for _, moment := range []struct {
		field string
		value time.Time
	}{{"CreatedAt", e.CreatedAt}, {"NotAfter", e.NotAfter}} {
		if year := moment.value.UTC().Year(); year < 1 || year > 9999 {
			return moment.field, "a time of the years 1 to 9999"
		}
	}
	return "", ""
}

// Read returns the event of a relay's headers, whose key is given. malformed names a header that
// breaks a rule, and then there is no event.
func Read(header http.Header, key string) (event Event, malformed string) {
	in := fields{header: header}
	if !Printable(key) {
		in.fail(webhook.IdempotencyKey)
	}
	event = Event{
		IdempotencyKey:   key,
		Type:             in.text(webhook.EventType),
		Version:          max(int(in.number(webhook.EventVersion, 32)), 1),
		ID:               in.number(webhook.EventID, 64),
		CreatedAt:        in.time(webhook.CreatedAt),
		RelatedReference: in.text(webhook.RelatedReference),
		OrderingKey:      in.text(webhook.OrderingKey),
		Sequence:         in.number(webhook.Sequence, 64),
		Attempt:          int(in.number(webhook.Attempt, 32)),
		DeliveryID:       in.text(webhook.DeliveryID),
		Destination:      in.text(webhook.Destination),
		NotAfter:         in.time(webhook.NotAfter),
		Replay:           in.text(webhook.Replay) == "true",
		TraceParent:      header.Get(webhook.TraceParent),
		TraceState:       header.Get(webhook.TraceState),
	}
	if in.bad != "" {
		return Event{}, in.bad
	}
	return event, ""
}

// fields reads headers and keeps the name of the first one that is malformed.
type fields struct {
	header http.Header
	bad    string
}

func (f *fields) text(name string) string {
	values := f.header[name]
	if len(values) == 0 || len(values) == 1 && values[0] == "" {
		return ""
	}
	if len(values) > 1 || !Printable(values[0]) {
		f.fail(name)
		return ""
	}
	return values[0]
}

func (f *fields) number(name string, bits int) int64 {
	text := f.text(name)
	if text == "" {
		return 0
	}
	n, err := strconv.ParseInt(text, 10, bits)
	if err != nil || n < 0 {
		f.fail(name)
	}
	return n
}

func (f *fields) time(name string) time.Time {
	text := f.text(name)
	if text == "" {
		return time.Time{}
	}
	t, err := time.Parse(time.RFC3339, text)
	if err != nil {
		f.fail(name)
	}
	return t
}

func (f *fields) fail(name string) {
	if f.bad == "" {
		f.bad = name
	}
}

// Write adds what is known of an event, except its key, where header does not say it already.
func Write(header http.Header, e *Event) {
	set := func(name, value string) {
		if value != "" && header.Get(name) == "" {
			header.Set(name, value)
		}
	}
	number := func(name string, n int64) {
		if n != 0 {
			set(name, strconv.FormatInt(n, 10))
		}
	}
	moment := func(name string, t time.Time) {
		if !t.IsZero() {
			set(name, t.UTC().Format(time.RFC3339Nano)) // in another zone the year 9999 may be over
		}
	}
	set(webhook.EventType, e.Type)
	number(webhook.EventVersion, int64(e.Version))
	number(webhook.EventID, e.ID)
	moment(webhook.CreatedAt, e.CreatedAt)
	set(webhook.RelatedReference, e.RelatedReference)
	set(webhook.OrderingKey, e.OrderingKey)
	number(webhook.Sequence, e.Sequence)
	number(webhook.Attempt, int64(e.Attempt))
	set(webhook.DeliveryID, e.DeliveryID)
	set(webhook.Destination, e.Destination)
	moment(webhook.NotAfter, e.NotAfter)
	if e.Replay {
		set(webhook.Replay, "true")
	}
	set(webhook.TraceParent, e.TraceParent)
	set(webhook.TraceState, e.TraceState)
}
