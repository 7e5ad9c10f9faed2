package consumer

import (
	"context"
	"net/http"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/internal/handlerctx"
	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// Event is what the sender says about the event of a request. With a relay's signature all of it is
// proven, except the two trace fields, which no signature covers. From a foreign sender only
// IdempotencyKey is known (see [Verify].AcceptForeign), or what [Verify].Custom says.
type Event struct {
	Receiver         string    // whose event this is, [Config].Receiver
	Source           string    // the receiver's name for the sender, [Config].Source
	IdempotencyKey   string    // names one event, however often it is sent
	Type             string    // "invoice.created"
	Version          int       // of the type's payload; 1 unless the producer says otherwise
	ID               int64     // in the producer's outbox
	CreatedAt        time.Time // when the producer wrote it
	RelatedReference string    // the producer's own reference, such as an invoice number; may be empty
	OrderingKey      string    // events with one ordering key arrive in order; empty: no order
	Sequence         int64     // grows within an ordering key
	Attempt          int       // the sender's, 1 for the first POST; in an inbox that of the POST that was recorded
	DeliveryID       string    // of that POST; opaque
	Destination      string    // the sender's name for where it sent the event, as in [Config].Destinations; empty: it does not say
	NotAfter         time.Time // when the relay stops sending the event by itself; zero: unknown
	Replay           bool      // an operator sent it again
	Foreign          bool      // not of a relay: a plain Standard Webhooks sender, or proven by Verify.Custom
	TraceParent      string    // W3C trace context as captured at enqueue; not signed
	TraceState       string

	// Payload is the request's body, byte for byte. It must not be changed. It is nil in a
	// [Report], because what is logged and measured gets no payloads.
	Payload []byte
}

// EventFrom returns the verified event of the handler that got ctx. It returns the zero Event for
// any other context.
func EventFrom(ctx context.Context) Event { return Event(handlerctx.From(ctx).Event) }

// eventOf reads the headers of a relay's request.
func eventOf(header http.Header, key string) (headers.Event, *problem) {
	if !headers.Printable(key) {
		return headers.Event{}, keyInvalid(webhook.IdempotencyKey)
	}
	event, malformed := headers.Read(header, key)
	if malformed != "" {
		return event, newProblem(http.StatusBadRequest, "header-invalid", "A header about the event is malformed",
			malformed+" is repeated or not what it should be: text of 1 to 255 printable ASCII characters, a whole number, or an RFC 3339 time.")
	}
	return event, nil
}

// unsignedEvent trusts every header. A webhook-id beside the key must still match it: a request
// that contradicts itself is a mistake, not an event.
func unsignedEvent(header http.Header) (headers.Event, *problem) {
	key, id := header.Get(webhook.IdempotencyKey), header.Get(webhook.ID)
	if key == "" {
		if !headers.Printable(id) {
			return headers.Event{}, keyInvalid(webhook.ID)
		}
		return headers.Event{IdempotencyKey: id, Version: 1, Foreign: true}, nil
	}
	if id != "" && id != key && id != webhook.DeriveID(key) {
		return headers.Event{}, newProblem(http.StatusBadRequest, "key-conflict", "The request names two different keys",
			"webhook-id belongs to another "+webhook.IdempotencyKey+". Send one of them, or both of one event.")
	}
	return eventOf(header, key)
}
