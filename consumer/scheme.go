package consumer

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
)

// A VerifyFunc proves a request of a sender that signs in a way of its own, and returns the event it carries. now is this
// machine's clock, or when a log took the message, for a scheme whose signature covers a timestamp; to refuse what is too old is
// part of the proof. It
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
func (s *settings) verifyOwn(header http.Header, body []byte, arrived time.Time) (headers.Event, *problem) {
	proven, err := s.Verify(header, body, arrived)
	if err != nil {
		refusal := signatureInvalid("The receiver did not verify the request by its sender's scheme; its log says why.")
		refusal.cause = err
		return headers.Event{}, refusal
	}
	event := headers.Event(proven)
	event.Source, event.Foreign = s.Source, true
	if event.Version == 0 {
		event.Version = 1
	}
	if field, rule := event.Invalid(); field != "" {
		refusal := newProblem(http.StatusBadRequest, "event-invalid", "The event is not one that can be remembered",
			fmt.Sprintf("The event's %s, as this receiver reads the request, is not %s.", field, rule))
		refusal.cause = errors.New("check the event of Config.Verify: " + field + " is not " + rule)
		return headers.Event{}, refusal
	}
	return event, nil
}
