package consumer

import (
	"errors"
	"fmt"
	"math"
	"net/http"
	"time"
)

// A VerifyFunc proves a request of a sender that signs in a way of its own, and returns the event it carries. now is this
// machine's clock, for a scheme whose signature covers a timestamp; to refuse what is too old is part of the proof. It
// must compare signatures in constant time (hmac.Equal), must not change header or body, and is called concurrently.
//
// Event.Key is required: what stays the same when the sender repeats itself, such as the id of the event in the body. The
// other fields are as optional as they are in a relay's request, and must keep to the same rules: text of at most 255
// printable ASCII characters, numbers that are not negative. Set Type to let a [Router] choose by it, and CreatedAt to
// have an event refused that is older than what is remembered. Receiver, Source, Foreign and Payload are filled in afterwards,
// and Version when it is 0.
//
// An error is answered with 401, without its text: that goes to the log, with credentials masked, and to [Config].Observe.
type VerifyFunc func(header http.Header, body []byte, now time.Time) (Event, error)

// verifyOwn asks Config.Verify and holds what it returns to the rules of a relay's headers.
func (s *settings) verifyOwn(header http.Header, body []byte) (Event, *problem) {
	event, err := s.Verify(header, body, time.Now())
	if err != nil {
		refusal := signatureInvalid("The receiver did not verify the request by its sender's scheme; its log says why.")
		refusal.cause = err
		return Event{}, refusal
	}
	event.Source, event.Foreign = s.Source, true
	if event.Version == 0 {
		event.Version = 1
	}
	if field, rule := event.invalid(); field != "" {
		refusal := newProblem(http.StatusBadRequest, "event-invalid", "The event is not one that can be remembered",
			fmt.Sprintf("The event's %s, as this receiver reads the request, is not %s.", field, rule))
		refusal.cause = errors.New("check the event of Config.Verify: " + field + " is not " + rule)
		return Event{}, refusal
	}
	return event, nil
}

// invalid names the first field that breaks a rule, and the rule.
func (e *Event) invalid() (field, rule string) {
	if !printable(e.Key) {
		return "Key", fmt.Sprintf("1 to %d printable ASCII characters", maxTextBytes)
	}
	for _, text := range []struct{ field, value string }{
		{"Type", e.Type},
		{"RelatedReference", e.RelatedReference},
		{"OrderingKey", e.OrderingKey},
		{"DeliveryID", e.DeliveryID},
		{"TraceParent", e.TraceParent},
	} {
		if text.value != "" && !printable(text.value) {
			return text.field, fmt.Sprintf("empty or 1 to %d printable ASCII characters", maxTextBytes)
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

// maxTraceState is how much of tracestate the W3C asks everybody to pass on.
const maxTraceState = 512
