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
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/relay/policy"
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
	Event
}

// An Event is the immutable half of a delivery. Nullable columns are pointers: the row may be gone from outbox.
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

// newHeader returns the headers of the wire contract for a delivery, signed, as every carrier sends them. It fails for an event that
// no table constraint should have let in.
func newHeader(to *Endpoint, d *Message, now time.Time) (http.Header, error) {
	e := &d.Event
	header := make(http.Header, 20)
	if limit := to.Destination.Wire.MaxPayloadBytes; limit > 0 && int64(len(e.Payload)) > limit {
		return nil, fmt.Errorf("%w: it has %d bytes, and max_payload_bytes of %s is %d; raise it and replay the event, or send less",
			errTooLarge, len(e.Payload), to.Destination.Name, limit)
	}
	if err := setOwnHeaders(header, e.Headers); err != nil {
		return nil, err
	}
	for name := range to.header {
		deleteSpellings(header, name)
	}
	maps.Copy(header, to.header)
	if err := setContract(header, d); err != nil {
		return nil, err
	}
	if to.Destination.Wire.Format == FormatCloudEvents {
		setAttributes(header, to.Destination.Wire.Source, d)
	}
	webhook.Sign(header, e.Payload, now, to.Destination.SigningSecrets...)
	return header, nil
}

// NewRequest expresses a delivery as a request over HTTP. It fails as newHeader does.
func NewRequest(to *Endpoint, d Message, now time.Time) (*http.Request, error) {
	header, err := newHeader(to, &d, now)
	if err != nil {
		return nil, err
	}
	if authorization := to.Destination.Wire.Authorization; authorization != nil {
		header["Authorization"] = []string{authorization()}
	}
	// Made by hand and without GetBody: with it, and with an X-Idempotency-Key header, net/http would send a POST again
	// by itself when a reused connection breaks, and one attempt would be two requests.
	return &http.Request{
		Method:        http.MethodPost,
		URL:           to.URL,
		Host:          to.URL.Host,
		Header:        header,
		Body:          newBody(d.Payload),
		ContentLength: int64(len(d.Payload)),
		Proto:         "HTTP/1.1",
		ProtoMajor:    1,
		ProtoMinor:    1,
	}, nil
}

// setContract adds the headers by which a receiver knows the event and the delivery, as docs/wire.md lists them.
func setContract(header http.Header, d *Message) error {
	e := &d.Event
	if e.EventType == nil || e.Version == nil || !e.CreatedAt.Valid {
		return errors.New("the event's type, version or created_at is missing")
	}
	if e.CreatedAt.InfinityModifier != pgtype.Finite {
		return errors.New("the event's created_at is infinite")
	}
	id := strconv.FormatInt(d.EventID, 10)
	var notAfter, sequence, replay string
	if !d.NotAfter.IsZero() {
		notAfter = d.NotAfter.UTC().Format(TimeFormat)
	}
	if e.OrderingKey != nil {
		// Ids grow in the order of inserts, and so does the order in which the deliveries of one key are sent.
		sequence = id
	}
	if d.Replay {
		replay = "true"
	}
	contract := [...]struct{ name, value string }{
		{webhook.IdempotencyKey, *e.Key},
		{webhook.EventType, *e.EventType},
		{webhook.EventVersion, strconv.Itoa(*e.Version)},
		{webhook.EventID, id},
		{webhook.CreatedAt, e.CreatedAt.Time.UTC().Format(TimeFormat)},
		{webhook.Attempt, strconv.Itoa(d.Attempt)},
		{webhook.DeliveryID, id + "-" + d.Destination + "-" + strconv.FormatInt(d.Fence, 10)},
		{webhook.NotAfter, notAfter},
		{webhook.RelatedReference, valueOrEmpty(e.RelatedReference)},
		{webhook.OrderingKey, valueOrEmpty(e.OrderingKey)},
		{webhook.Sequence, sequence},
		{webhook.Replay, replay},
	}
	values := make([]string, len(contract)) // one allocation for all
	for i, h := range contract {
		if !plain.IsASCII(h.value) {
			return fmt.Errorf("%s would hold characters beyond printable ASCII", h.name)
		}
		if strings.Trim(h.value, " ") != h.value { // HTTP drops them, so that the receiver would see another key
			return fmt.Errorf("%s would hold surrounding blanks", h.name)
		}
		if h.value != "" {
			values[i] = h.value
			header[h.name] = values[i : i+1 : i+1]
		}
	}
	return nil
}

// setOwnHeaders adds the headers that an event brings along, a JSON object or nothing. Reserved ones are left out: the
// table refuses them, but may hold events from before it did, and one of those is no reason to fail its delivery.
func setOwnHeaders(header http.Header, object []byte) error {
	if object == nil {
		return nil
	}
	var own map[string]string
	if err := json.Unmarshal(object, &own); err != nil {
		return errors.New("the event's headers are not an object of strings")
	}
	for _, name := range slices.Sorted(maps.Keys(own)) {
		if webhook.ReservedForEvents(name) {
			continue
		}
		if problem := headerProblem(name, own[name]); problem != "" {
			return fmt.Errorf("the event's header %.64q %s", name, problem)
		}
		canonical := http.CanonicalHeaderKey(name)
		if other, twice := header[canonical]; twice && other[0] != own[name] {
			return fmt.Errorf("the event's header %.64q stands twice, with different values; upper and lower case make no difference", name)
		}
		header[canonical] = []string{own[name]}
	}
	return nil
}

// deleteSpellings removes the headers of an event that a receiver may take for the named one, which is not the event's: to
// X-Api-Key of a destination, X_Api_Key of an event would be a second value.
func deleteSpellings(header http.Header, name string) {
	for other := range header {
		if webhook.SameName(other, name) {
			delete(header, other)
		}
	}
}

var errTooLarge = errors.New("the payload is too large for this destination")

// Refused decides on an event that cannot be expressed as what is sent: it is the event's own fault, so that every later attempt
// would fail like this one.
func Refused(err error) policy.Result {
	v := policy.Result{Reason: policy.ReasonInvalidEvent, Message: plain.Clip(err.Error())}
	if errors.Is(err, errTooLarge) {
		v.Reason = policy.ReasonTooLarge
	}
	return v
}

func valueOrEmpty(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}
