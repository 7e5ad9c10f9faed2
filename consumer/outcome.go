package consumer

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// ErrorHandler makes a handler for behind [Middleware] and [MiddlewareSQL] of a function that returns an error instead of
// answering it, and what the function has written is then dropped:
//
//	nil                               what was written; 204 if nothing was
//	Ignore                            204: committed, and the event is remembered as "ignored", with the reason
//	Permanent                         422, permanent-failure
//	ErrUnknownEvent                   422, event-unknown
//	RetryAfter, DependencyDown        503, retry-later, with Retry-After in whole seconds, rounded up; 1 for the latter
//	a conflict of transactions        503, serialization-failure, with Retry-After: 1
//	any other                         500, handler-failed
//
// The refusals are problems whose detail is the error's text, redacted (see [Config].Redact). The error itself is in the
// Report for [Config].Observe.
func ErrorHandler(handle func(w http.ResponseWriter, r *http.Request) error) http.Handler {
	if handle == nil {
		panic("consumer: ErrorHandler needs a handler")
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		response := &buffer{header: w.Header().Clone()}
		err := handle(response, r)
		if err != nil || response.answer.status == 0 {
			if err == nil {
				setHeader(w, response.header)
			}
			conclude(w, r, err)
			return
		}
		setHeader(w, response.answer.header)
		w.WriteHeader(response.answer.status)
		if len(response.answer.body) > 0 {
			_, _ = w.Write(response.answer.body) // into the middleware's buffer
		}
	})
}

func setHeader(w http.ResponseWriter, header http.Header) {
	clear(w.Header())
	maps.Copy(w.Header(), header)
}

// outcome is what a handler's error made of its event, for the middleware to record and report. The status alone decides
// about the transaction, because what stands between may have changed it.
type outcome struct {
	err     error
	ignored bool // commit, as of no concern
	final   bool // nobody tries again by himself
}

// conclude answers as err asks for, and leaves the outcome where the middleware finds it.
func conclude(w http.ResponseWriter, r *http.Request, err error) {
	if err == nil {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	examine(err)
	sc := scopeOf(r.Context())
	why := sc.redacted(err)
	if sc.event.Foreign { // a third party: internals such as a table's name are none of its business
		why = "The receiver's log says why."
	}
	verdict, marked := judge(err), isMarked(err)
	said := &outcome{err: err}
	var refusal *problem
	switch {
	case !marked && errors.Is(err, ErrUnknownEvent):
		said.final = true
		refusal = eventUnknown(why)
	case verdict.action == actIgnore:
		said.ignored = true
	case verdict.action == actFail:
		said.final = true
		refusal = permanentFailure(why)
	case verdict.timed, verdict.down:
		refusal = retryLater(why)
	case isConflict(err):
		refusal = conflict()
	default:
		refusal = handlerFailed(why)
	}
	sc.outcome.Store(said)
	if refusal == nil {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	answer := refusal.answer()
	if verdict.timed {
		answer.header.Set("Retry-After", strconv.FormatInt(wholeSeconds(verdict.after), 10))
	}
	setHeader(w, answer.header)
	w.WriteHeader(answer.status)
	_, _ = w.Write(answer.body) // into the middleware's buffer
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
