package consumer

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
)

// A VerifyFunc proves a request of a sender that signs in its own way, and returns the event that
// the request carries. It is called concurrently.
//
// header and body are the request's; it must not change them. now is this machine's clock, or the
// time at which a log took the message. A scheme whose signature covers a timestamp must refuse
// what is too old. Compare signatures in constant time (hmac.Equal).
//
// Event.IdempotencyKey is required: what stays the same when the sender repeats itself, such as the
// event's id in the body. The other fields are optional and keep to the rules of a relay's request:
// text is at most 255 printable ASCII characters, and numbers are not negative. Set Type to let a
// [Router] choose by it. Set CreatedAt to have an event refused that is older than what is
// remembered.
// Receiver, Source, Foreign and Payload are filled in afterwards, and so is Version if it is 0.
//
// An error is answered with 401, without its text. The text goes to the log, with credentials
// masked, and the error to [Config].Observe.
type VerifyFunc func(header http.Header, body []byte, now time.Time) (Event, error)

// verifyOwn calls Config.Verify.Custom and checks its event against the rules of a relay's headers.
func (s *settings) verifyOwn(header http.Header, body []byte, arrived time.Time) (headers.Event, *problem) {
	proven, err := s.Verify.Custom(header, body, arrived)
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
		refusal.cause = errors.New("check the event of Config.Verify.Custom: " + field + " is not " + rule)
		return headers.Event{}, refusal
	}
	return event, nil
}
