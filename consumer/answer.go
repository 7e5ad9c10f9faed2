package consumer

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
	"github.com/outbox-relay/outbox-relay/consumer/internal/sqlstate"
	"github.com/outbox-relay/outbox-relay/consumer/internal/verdict"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// answer is a complete response. None of it is sent before the transaction has ended.
type answer struct {
	status  int
	header  http.Header
	body    []byte
	ignored string // why the handler wants the event ignored; empty: it does not

	cause error // the handler's, for the report
	final bool  // neither sender nor worker tries again
}

func (a *answer) send(w http.ResponseWriter) {
	maps.Copy(w.Header(), a.header)
	if bodyAllowed(a.status) {
		// Whatever length the handler declared, this is the one that follows.
		w.Header().Set("Content-Length", strconv.Itoa(len(a.body)))
	}
	w.WriteHeader(a.status)
	if len(a.body) > 0 && bodyAllowed(a.status) {
		_, _ = w.Write(a.body) // the client has gone: its retry gets the stored status
	}
}

// success reports whether the handler asked for a commit.
func (a *answer) success() bool { return 200 <= a.status && a.status <= 299 }

func bodyAllowed(status int) bool {
	return status != http.StatusNoContent && status != http.StatusNotModified && status >= 200
}

// foundAnswer returns the answer for an event that is known or recorded: the status of the first
// answer, or the state of an inbox's event.
func foundAnswer(found memory.Found) *answer {
	a := &answer{status: found.Status, header: http.Header{}}
	if found.State != "" {
		a.header.Set("Content-Type", "application/json")
		a.body = []byte(`{"state":"` + found.State + `"}` + "\n")
	}
	return a
}

func (a *answer) replayed() *answer {
	a.header.Set(webhook.Replayed, "true")
	return a
}

// answerTo returns the answer for the error of an event's handler. [New] has the table.
func (s *settings) answerTo(event *headers.Event, err error) *answer {
	if err == nil {
		return &answer{status: http.StatusNoContent, header: http.Header{}}
	}
	verdict.Examine(err)
	why := s.shared.Redacted(err)
	detail := why
	if event.Foreign || s.Verify.AllowUnsigned { // a third party: internals such as a table's name are none of its business
		detail = "The receiver's log says why."
	}
	var refusal *problem
	final := false
	switch v := verdict.Of(err); {
	case !verdict.IsMarked(err) && errors.Is(err, ErrUnknownEvent):
		refusal, final = eventUnknown(detail), true
	case v.Action == verdict.Ignore:
		return &answer{status: http.StatusNoContent, header: http.Header{}, ignored: reason(why), cause: err}
	case v.Action == verdict.Fail:
		refusal, final = permanentFailure(detail), true
	case v.Timed, v.Down:
		refusal = retryLater(detail)
		refusal.wait = v.After
	case sqlstate.IsConflict(err):
		refusal = conflict()
	default:
		refusal = handlerFailed(detail)
	}
	answer := refusal.answer()
	answer.cause, answer.final = err, final
	return answer
}

// wholeSeconds rounds up. It never returns 0, which some senders treat as a missing header.
func wholeSeconds(d time.Duration) int64 {
	seconds := int64(d / time.Second)
	if d%time.Second > 0 {
		seconds++
	}
	return max(seconds, retrySeconds)
}

func eventUnknown(why string) *problem {
	return newProblem(http.StatusUnprocessableEntity, "event-unknown", "No handler takes the event",
		fmt.Sprintf("Nothing was changed: %s. Replay the event when the receiver has one.", strings.TrimSuffix(why, ".")))
}

func permanentFailure(why string) *problem {
	return newProblem(http.StatusUnprocessableEntity, "permanent-failure", "The handler refused the event for good",
		reason(why))
}

func retryLater(why string) *problem {
	return newProblem(http.StatusServiceUnavailable, "retry-later", "The handler cannot work the event now", reason(why))
}

func handlerFailed(why string) *problem {
	return newProblem(http.StatusInternalServerError, "handler-failed", "The handler did not succeed", reason(why))
}

func reason(why string) string {
	if why == "" {
		return "The handler gave no reason."
	}
	return why
}
