// Package verdict is what an error of a handler asks for. Package consumer marks errors with it;
// the receivers act on it.
package verdict

import (
	"errors"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/internal/sqlstate"
)

// Action is what an error of a handler asks for: a closed set.
type Action int

// The actions.
const (
	Commit Action = iota // no error
	Ignore               // commit, and mark the event ignored
	Retry                // roll back, try again
	Fail                 // roll back, give up
)

// Verdict is what an error of a handler means.
type Verdict struct {
	Action Action
	Timed  bool          // After counts, instead of the schedule
	After  time.Duration // not before it
	Down   bool          // what the handler depends on is down
}

// ErrUnknownEvent is consumer.ErrUnknownEvent.
var ErrUnknownEvent = errors.New("consumer: no handler for the event")

// marked carries a verdict to the caller of the handler.
type marked struct {
	verdict Verdict
	err     error
}

func (e *marked) Error() string { return e.err.Error() }
func (e *marked) Unwrap() error { return e.err }

// Mark returns err with v, and nil for nil.
func (v Verdict) Mark(err error) error {
	if err == nil {
		return nil
	}
	return &marked{verdict: v, err: err}
}

// Of returns what an error of a handler means. The outermost mark counts.
func Of(err error) Verdict {
	if err == nil {
		return Verdict{Action: Commit}
	}
	if m, ok := errors.AsType[*marked](err); ok {
		return m.verdict
	}
	if errors.Is(err, ErrUnknownEvent) {
		return Verdict{Action: Ignore} // an old receiver meets new events; a crash loop would help no one
	}
	return Verdict{Action: Retry}
}

// IsMarked reports whether a handler has said itself what its error means.
func IsMarked(err error) bool {
	_, ok := errors.AsType[*marked](err)
	return ok
}

// Examine asks an error of a handler everything that its event's outcome will depend on. Its
// methods are the application's: one that panics, as those of a nil pointer in an error may, must
// do so where a panic of the handler would be caught.
func Examine(err error) {
	if err != nil {
		_, _ = Of(err), sqlstate.IsConflict(err)
	}
}

// Panic is what a handler panicked with.
type Panic struct {
	Cause any
	Stack []byte
}

func (e *Panic) Error() string { return fmt.Sprintf("the handler panicked: %v", e.Cause) }
