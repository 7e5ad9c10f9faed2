package relay

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// newRequest expresses a delivery as the request of the wire contract. It fails for an event that no table constraint
// should have let in.
func newRequest(to *endpoint, d *delivery, now time.Time) (*http.Request, error) {
	e := &d.event
	header := make(http.Header, 20)
	if e.headers != nil {
		var own map[string]string
		if err := json.Unmarshal(e.headers, &own); err != nil {
			return nil, errors.New("the event's headers are not an object of strings")
		}
		for name, value := range own {
			canonical := http.CanonicalHeaderKey(name)
			if problem := headerProblem(name, value); problem != "" {
				return nil, fmt.Errorf("the event's header %q %s", name, problem)
			}
			header[canonical] = []string{value}
		}
	}
	for name, values := range to.header {
		header[name] = values
	}
	if e.eventType == nil || e.version == nil || !e.createdAt.Valid {
		return nil, errors.New("the event's type, version or created_at is missing")
	}
	if e.createdAt.InfinityModifier != pgtype.Finite {
		return nil, errors.New("the event's created_at is infinite")
	}
	id := strconv.FormatInt(d.eventID, 10)
	contract := [...]struct{ name, value string }{
		{webhook.IdempotencyKey, *e.key},
		{webhook.EventType, *e.eventType},
		{webhook.EventVersion, strconv.Itoa(*e.version)},
		{webhook.EventID, id},
		{webhook.CreatedAt, e.createdAt.Time.UTC().Format("2006-01-02T15:04:05.000000Z")},
		{webhook.Attempt, strconv.Itoa(d.attempts + 1)},
		{webhook.DeliveryID, id + "-" + d.destination + "-" + strconv.FormatInt(d.fence, 10)},
		{webhook.RelatedReference, valueOrEmpty(e.relatedReference)},
		{webhook.OrderingKey, valueOrEmpty(e.orderingKey)},
		{webhook.Sequence, ""},
	}
	if e.orderingKey != nil {
		// Ids grow in the order of inserts, and so does the order in which the deliveries of one key are sent.
		contract[len(contract)-1].value = id
	}
	values := make([]string, len(contract)) // one allocation for all
	for i, h := range contract {
		if !printableASCII(h.value) {
			return nil, fmt.Errorf("%s would hold characters beyond printable ASCII", h.name)
		}
		if h.value != "" {
			values[i] = h.value
			header[h.name] = values[i : i+1 : i+1]
		}
	}
	webhook.Sign(header, e.payload, now, to.destination.SigningSecrets...)

	// Made by hand and without GetBody: with it, and with an X-Idempotency-Key header, net/http would send a POST again
	// by itself when a reused connection breaks, and one attempt would be two requests.
	return &http.Request{
		Method:        http.MethodPost,
		URL:           to.url,
		Host:          to.url.Host,
		Header:        header,
		Body:          io.NopCloser(bytes.NewReader(e.payload)),
		ContentLength: int64(len(e.payload)),
		Proto:         "HTTP/1.1",
		ProtoMajor:    1,
		ProtoMinor:    1,
	}, nil
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
