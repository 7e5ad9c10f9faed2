package post

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// TimeFormat is RFC 3339 in UTC with microseconds, as exact as the database.
const TimeFormat = "2006-01-02T15:04:05.000000Z"

// A Message is what one request tells its receiver.
type Message struct {
	EventID     int64
	Destination string
	Fence       int64
	Attempt     int       // from 1
	NotAfter    time.Time // no request is under way any more; zero: unknown
	Replay      bool      // made pending again by an operator
	Trace       TraceContext
	Event
}

// TraceContext is what takes the place of the event's own trace context, as the headers traceparent
// and tracestate. The zero value leaves the event's own.
type TraceContext struct{ Parent, State string }

// An Event is the immutable half of a delivery. Nullable columns are pointers: the row may be gone
// from outbox.
type Event struct {
	// The columns of its row.
	EventType        *string
	Version          *int
	Key              *string
	OrderingKey      *string
	RelatedReference *string
	Headers          []byte // JSON object; nil when empty
	CreatedAt        pgtype.Timestamptz
	Payload          []byte // nil when larger than what a claim brings along: loaded when its turn comes
}

// A Request is one delivery as the message of the wire contract, without its body. No header name
// occurs twice. Every carrier sends it.
type Request struct {
	to     *Endpoint
	header []field
	room   [20]field // for header, which rarely needs more
	// dropped counts the headers of the event that the destination does not let through.
	dropped int
}

// A field is one header, by its canonical name.
type field struct{ name, value string }

// NewRequest expresses a delivery as the request of the wire contract. It fails for an event that
// no table constraint should have let in.
func NewRequest(to *Endpoint, d Message, now time.Time) (*Request, error) {
	r := &Request{}
	if err := r.express(to, &d, now); err != nil {
		return nil, err
	}
	return r, nil
}

// express makes r the request of a delivery.
func (r *Request) express(to *Endpoint, d *Message, now time.Time) (err error) {
	text := to.texts.get()
	defer to.texts.pool.Put(text)
	if *text, err = r.describe((*text)[:0], to, d, true); err != nil {
		return err
	}
	signed := to.signer.Sign(*d.Key, *text, d.Payload, now)
	r.header = append(r.header, field{webhook.ID, signed.ID}, field{webhook.Timestamp, signed.Timestamp})
	if signed.Signature != "" {
		r.header = append(r.header, field{webhook.Signature, signed.Signature})
	}
	return nil
}

// describe sets the headers of a delivery, and returns them behind text as far as a signature
// covers them. Without own they lack what all requests of the destination share, except for the
// type of the payload.
func (r *Request) describe(text []byte, to *Endpoint, d *Message, own bool) (covered []byte, err error) {
	e := &d.Event
	if limit := to.Destination.Wire.MaxPayloadBytes; limit > 0 && int64(len(e.Payload)) > limit {
		return text, fmt.Errorf("%w: it has %d bytes, and max_payload_bytes of %s is %d; raise it and replay the event, or send less",
			errTooLarge, len(e.Payload), to.Destination.Name, limit)
	}
	if e.EventType == nil || e.Version == nil || !e.CreatedAt.Valid {
		return text, errors.New("the event's type, version or created_at is missing")
	}
	r.to, r.header, r.dropped = to, r.room[:0], 0
	if err := r.setOwnHeaders(e.Headers); err != nil {
		return text, err
	}
	for _, f := range to.header {
		r.deleteSpellings(f.name)
	}
	for _, f := range to.header {
		if own || f.name == "Content-Type" {
			r.header = append(r.header, f)
		}
	}
	if authorization := to.authorization; authorization != nil && own {
		r.set("Authorization", authorization())
	}
	if to.Destination.Wire.Format == FormatCloudEvents {
		r.setAttributes(to.Destination.Wire.Source, d)
	}
	// Covered names have letters, digits and hyphens alone, so their order is that in lower case.
	// All of them come before those of the contract.
	slices.SortFunc(r.header, func(a, b field) int { return strings.Compare(a.name, b.name) })
	if text, err = r.setContract(appendCovered(text, r.header), d); err != nil {
		return text, err
	}
	if d.Trace.Parent != "" {
		r.setTrace(d.Trace)
	}
	return text, nil
}

// appendCovered appends what a signature covers of headers in the order of their names.
func appendCovered(text []byte, header []field) []byte {
	for _, f := range header {
		if webhook.Covered(f.name) {
			text = webhook.AppendCovered(text, f.name, f.value)
		}
	}
	return text
}

// HTTP returns the request for net/http.
//
// Made by hand and without GetBody: with it, and with an X-Idempotency-Key header, net/http would
// send a POST again by itself when a reused connection breaks, and one attempt would be two
// requests.
func (r *Request) HTTP(payload []byte) *http.Request {
	return &http.Request{
		Method:        http.MethodPost,
		URL:           r.to.URL,
		Host:          r.to.URL.Host,
		Header:        r.Header(),
		Body:          newBody(payload),
		ContentLength: int64(len(payload)),
		Proto:         "HTTP/1.1",
		ProtoMajor:    1,
		ProtoMinor:    1,
	}
}

// Header returns the headers of the request.
func (r *Request) Header() http.Header {
	header := make(http.Header, len(r.header))
	for _, f := range r.header {
		header[f.name] = []string{f.value}
	}
	return header
}

// appendTo appends the request with its payload as it goes over a connection of HTTP/1.1.
func (r *Request) appendTo(b, payload []byte) []byte {
	b = append(b, r.to.requestLine...)
	for i := range r.header {
		f := &r.header[i]
		b = append(b, f.name...)
		b = append(b, ": "...)
		b = append(b, f.value...)
		b = append(b, "\r\n"...)
	}
	b = append(b, "Content-Length: "...)
	b = strconv.AppendInt(b, int64(len(payload)), 10)
	b = append(b, "\r\n\r\n"...)
	return append(b, payload...)
}

// set sets a header in place of one that has the name already.
func (r *Request) set(name, value string) {
	for i := range r.header {
		if r.header[i].name == name {
			r.header[i].value = value
			return
		}
	}
	r.header = append(r.header, field{name, value})
}

// setContract adds the headers by which a receiver knows the event and the delivery, as
// docs/wire.md lists them. It returns them behind text as what the signature covers: by their names
// in lower case, in order.
func (r *Request) setContract(text []byte, d *Message) (covered []byte, err error) {
	e := &d.Event
	if e.CreatedAt.InfinityModifier != pgtype.Finite {
		return text, errors.New("the event's created_at is infinite")
	}
	id := strconv.FormatInt(d.EventID, 10)
	var notAfter, sequence, replay string
	if !d.NotAfter.IsZero() {
		notAfter = formatTime(d.NotAfter)
	}
	if e.OrderingKey != nil {
		// Ids grow in the order of inserts, and so does the order in which the deliveries of one
		// key are sent.
		sequence = id
	}
	if d.Replay {
		replay = "true"
	}
	covered = text
	for _, h := range [...]field{
		{webhook.IdempotencyKey, *e.Key},
		{webhook.Attempt, strconv.Itoa(d.Attempt)},
		{webhook.CreatedAt, formatTime(e.CreatedAt.Time)},
		{webhook.DeliveryID, id + "-" + d.Destination + "-" + strconv.FormatInt(d.Fence, 10)},
		{webhook.Destination, d.Destination},
		{webhook.EventID, id},
		{webhook.EventType, *e.EventType},
		{webhook.EventVersion, strconv.Itoa(*e.Version)},
		{webhook.NotAfter, notAfter},
		{webhook.OrderingKey, valueOrEmpty(e.OrderingKey)},
		{webhook.RelatedReference, valueOrEmpty(e.RelatedReference)},
		{webhook.Replay, replay},
		{webhook.Sequence, sequence},
	} {
		if h.value == "" {
			continue
		}
		if len(h.value) > 255 { // of a longer one a claim reads the beginning
			return text, fmt.Errorf("%s would hold more than 255 characters", h.name)
		}
		if !plain.IsASCII(h.value) {
			return text, fmt.Errorf("%s would hold characters beyond printable ASCII", h.name)
		}
		if h.value[0] == ' ' || h.value[len(h.value)-1] == ' ' { // HTTP drops them, so that the receiver would see another key
			return text, fmt.Errorf("%s would hold surrounding blanks", h.name)
		}
		r.header = append(r.header, h)
		covered = webhook.AppendCovered(covered, h.name, h.value)
	}
	return covered, nil
}

// setTrace replaces the trace context of an event by that of the attempt.
func (r *Request) setTrace(t TraceContext) {
	r.deleteSpellings(webhook.TraceParent)
	r.deleteSpellings(webhook.TraceState)
	r.header = append(r.header, field{webhook.TraceParent, t.Parent})
	if t.State != "" {
		r.header = append(r.header, field{webhook.TraceState, t.State})
	}
}

// setOwnHeaders adds the headers that an event brings along, a JSON object or nothing, as far as
// the destination lets them through.
func (r *Request) setOwnHeaders(object []byte) error {
	if object == nil {
		return nil
	}
	var own map[string]string
	if err := json.Unmarshal(object, &own); err != nil {
		return errors.New("the event's headers are not an object of strings")
	}
	for _, name := range slices.Sorted(maps.Keys(own)) {
		if !webhook.EventMaySet(r.to.Destination.Wire.EventHeaders, name) {
			r.dropped++
			continue
		}
		if problem := headerProblem(name, own[name]); problem != "" {
			return fmt.Errorf("the event's header %.64q %s", name, problem)
		}
		canonical := webhook.SentName(name)
		for _, f := range r.header {
			if f.name == canonical && f.value != own[name] {
				return fmt.Errorf("the event's header %.64q stands twice, with different values; upper and lower case make no difference", name)
			}
		}
		r.set(canonical, own[name])
	}
	return nil
}

// deleteSpellings removes the headers of an event that a receiver may take for the named one, which
// is not the event's: to X-Api-Key of a destination, X_Api_Key of an event would be a second value.
func (r *Request) deleteSpellings(name string) {
	r.header = slices.DeleteFunc(r.header, func(f field) bool { return webhook.SameName(f.name, name) })
}

var errTooLarge = errors.New("the payload is too large for this destination")

// Refused decides on an event for which [NewRequest] has failed, or which a carrier cannot express:
// it is the event's own fault, so that every later attempt would fail like this one.
func Refused(err error) policy.Result {
	v := policy.Result{Reason: policy.ReasonInvalidEvent, Message: plain.Clip(err.Error())}
	if errors.Is(err, errTooLarge) {
		v.Reason = policy.ReasonTooLarge
	}
	return v
}

// formatTime formats a time as TimeFormat says, in half the time: package time reads a layout of
// its own again for each time.
func formatTime(at time.Time) string {
	var room [len(TimeFormat)]byte
	text := at.UTC().AppendFormat(room[:0], time.RFC3339)
	text = append(text[:len(text)-1], '.')
	for micros, unit := at.Nanosecond()/1000, 100_000; unit > 0; unit /= 10 {
		text = append(text, byte('0'+micros/unit%10))
	}
	return string(append(text, 'Z'))
}

func valueOrEmpty(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}
