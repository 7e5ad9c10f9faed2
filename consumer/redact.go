package consumer

import "github.com/outbox-relay/outbox-relay/consumer/internal/redact"

// redacted returns the text of a handler's error as it may be stored, logged and answered. Neither the error nor
// Config.Redact is this package's code: one that panics must not take the event's outcome with it.
func (s *settings) redacted(err error) (text string) {
	defer func() {
		if recover() != nil {
			text = "the error has no text: reading it, or Config.Redact, panicked"
		}
	}()
	text = err.Error()
	if s.Redact != nil {
		text = s.Redact(text)
	}
	return redact.Text(text)
}

// redactedError is an error whose text may be logged.
type redactedError struct {
	text string
	err  error
}

func (e *redactedError) Error() string { return e.text }
func (e *redactedError) Unwrap() error { return e.err }
