package consumer

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"
)

// answerTo returns the answer that the error of an event's handler asks for. [New] has the table.
func (s *settings) answerTo(event *Event, err error) *answer {
	if err == nil {
		return &answer{status: http.StatusNoContent, header: http.Header{}}
	}
	examine(err)
	why := s.redacted(err)
	told := why
	if event.Foreign { // a third party: internals such as a table's name are none of its business
		told = "The receiver's log says why."
	}
	var refusal *problem
	final := false
	switch verdict := judge(err); {
	case !isMarked(err) && errors.Is(err, ErrUnknownEvent):
		refusal, final = eventUnknown(told), true
	case verdict.action == actIgnore:
		return &answer{status: http.StatusNoContent, header: http.Header{}, ignored: reason(why), cause: err}
	case verdict.action == actFail:
		refusal, final = permanentFailure(told), true
	case verdict.timed, verdict.down:
		refusal = retryLater(told)
		refusal.wait = verdict.after
	case isConflict(err):
		refusal = conflict()
	default:
		refusal = handlerFailed(told)
	}
	answer := refusal.answer()
	answer.cause, answer.final = err, final
	return answer
}

// wholeSeconds rounds up, and never to 0, which some senders take for no answer.
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
