package relay

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

// timeFormat is RFC 3339 in UTC with microseconds, as exact as the database.
const timeFormat = "2006-01-02T15:04:05.000000Z"

// newRequest expresses a delivery as the request of the wire contract. It fails for an event that no table constraint
// should have let in.
func newRequest(to *endpoint, d *delivery, now time.Time) (*http.Request, error) {
	e := &d.event
	header := make(http.Header, 20)
	if limit := to.destination.Wire.MaxPayloadBytes; limit > 0 && int64(len(e.payload)) > limit {
		return nil, fmt.Errorf("%w: it has %d bytes, and max_payload_bytes of %s is %d; raise it and replay the event, or send less",
			errTooLarge, len(e.payload), to.destination.Name, limit)
	}
	if err := setOwnHeaders(header, e.headers); err != nil {
		return nil, err
	}
	for name := range to.header {
		deleteSpellings(header, name)
	}
	maps.Copy(header, to.header)
	if authorization := to.destination.Wire.Authorization; authorization != nil {
		header["Authorization"] = []string{authorization()}
	}
	if err := setContract(header, d); err != nil {
		return nil, err
	}
	if to.destination.Wire.Format == FormatCloudEvents {
		setAttributes(header, to.destination.Wire.Source, d)
	}
	webhook.Sign(header, e.payload, now, to.destination.SigningSecrets...)

	// Made by hand and without GetBody: with it, and with an X-Idempotency-Key header, net/http would send a POST again
	// by itself when a reused connection breaks, and one attempt would be two requests.
	return &http.Request{
		Method:        http.MethodPost,
		URL:           to.url,
		Host:          to.url.Host,
		Header:        header,
		Body:          newBody(e.payload),
		ContentLength: int64(len(e.payload)),
		Proto:         "HTTP/1.1",
		ProtoMajor:    1,
		ProtoMinor:    1,
	}, nil
}

// setContract adds the headers by which a receiver knows the event and the delivery, as docs/wire.md lists them.
func setContract(header http.Header, d *delivery) error {
	e := &d.event
	if e.eventType == nil || e.version == nil || !e.createdAt.Valid {
		return errors.New("the event's type, version or created_at is missing")
	}
	if e.createdAt.InfinityModifier != pgtype.Finite {
		return errors.New("the event's created_at is infinite")
	}
	id := strconv.FormatInt(d.eventID, 10)
	var notAfter, sequence, replay string
	if !d.notAfter.IsZero() {
		notAfter = d.notAfter.UTC().Format(timeFormat)
	}
	if e.orderingKey != nil {
		// Ids grow in the order of inserts, and so does the order in which the deliveries of one key are sent.
		sequence = id
	}
	if d.replay {
		replay = "true"
	}
	contract := [...]struct{ name, value string }{
		{webhook.IdempotencyKey, *e.key},
		{webhook.EventType, *e.eventType},
		{webhook.EventVersion, strconv.Itoa(*e.version)},
		{webhook.EventID, id},
		{webhook.CreatedAt, e.createdAt.Time.UTC().Format(timeFormat)},
		{webhook.Attempt, strconv.Itoa(d.attempts + 1)},
		{webhook.DeliveryID, id + "-" + d.destination + "-" + strconv.FormatInt(d.fence, 10)},
		{webhook.NotAfter, notAfter},
		{webhook.RelatedReference, valueOrEmpty(e.relatedReference)},
		{webhook.OrderingKey, valueOrEmpty(e.orderingKey)},
		{webhook.Sequence, sequence},
		{webhook.Replay, replay},
	}
	values := make([]string, len(contract)) // one allocation for all
	for i, h := range contract {
		if !printableASCII(h.value) {
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

// refuse decides on an event for which newRequest has failed: it is the event's own fault, so that every later attempt
// would fail like this one.
func refuse(err error) policy.Result {
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

// printableASCII reports whether s can travel in a header and arrive unchanged.
func printableASCII(s string) bool {
	for i := range len(s) {
		if s[i] < 0x20 || s[i] > 0x7e {
			return false
		}
	}
	return true
}
