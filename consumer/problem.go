package consumer

import (
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
	"github.com/outbox-relay/outbox-relay/consumer/internal/sqlstate"
)

// problem is a refusal in the form of RFC 9457.
type problem struct {
	Type   string `json:"type"` // stable: callers may branch on it
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail"` // says what to do, or what the handler said; never repeats secrets or payloads

	cause error         // for the receiver's own log and Config.Observe; nil if the detail says it all
	wait  time.Duration // of Retry-After, where it is known
}

const problemPrefix = "urn:outbox-relay:problem:"

// retrySeconds is the smallest Retry-After of a refusal that time resolves.
const retrySeconds = 1

func newProblem(status int, name, title, detail string) *problem {
	return &problem{Type: problemPrefix + name, Title: title, Status: status, Detail: detail}
}

func (p *problem) Error() string {
	text := p.Title + ": " + p.Detail
	if p.cause != nil {
		text += " (" + p.cause.Error() + ")"
	}
	return text
}

func (p *problem) Unwrap() error { return p.cause }

func (p *problem) answer() *answer {
	body, err := json.Marshal(p)
	if err != nil {
		panic(err) // four plain fields always encode
	}
	header := http.Header{
		"Content-Type":           {"application/problem+json"},
		"X-Content-Type-Options": {"nosniff"},
	}
	if p.Status == http.StatusConflict || p.Status == http.StatusServiceUnavailable {
		header.Set("Retry-After", strconv.FormatInt(wholeSeconds(p.wait), 10))
	}
	return &answer{status: p.Status, header: header, body: append(body, '\n')}
}

func keyReused() *problem {
	return newProblem(http.StatusUnprocessableEntity, "key-reused", "The idempotency key was used for another body",
		"An event with this key was processed with other content, and nothing was changed now. Send new content under a new key.")
}

func otherDestination() *problem {
	return newProblem(http.StatusMisdirectedRequest, "other-destination", "The event is known from another destination",
		"This receiver has had the event already, as another of its sender's destinations, and nothing was changed now. "+
			"Two destinations need two receivers with their own names: see the receiver's log.")
}

func inFlight() *problem {
	return heldByAnother("Another request with this key has not ended yet. Send it again later: it will get that request's status, or run.")
}

// locked is for a request that waited in vain for another transaction, mostly one that has the key
// without its lock, as [Once] has.
func locked() *problem {
	return heldByAnother("In the receiver's database another transaction has held this event, or a lock that its row needs, for " + memory.LockTimeout +
		". Nothing was changed. Send it again later.")
}

func heldByAnother(detail string) *problem {
	return newProblem(http.StatusConflict, "in-flight", "The same event is being processed", detail)
}

func tooOld() *problem {
	return newProblem(http.StatusUnprocessableEntity, "forgotten", "The event may have been processed and forgotten",
		"It is not known, but older than this receiver's memory, or later than its sender said it would come. Nothing was changed. "+
			"Find out whether its effect is there; if not, send it as a new event, with a new key.")
}

func unavailable() *problem {
	return newProblem(http.StatusServiceUnavailable, "database-unavailable", "The receiver's database did not take the request",
		"Nothing was changed. Send the request again later; the receiver's log names the cause.")
}

func dependencyUnavailable(wait time.Duration) *problem {
	p := newProblem(http.StatusServiceUnavailable, "dependency-unavailable", "What the receiver depends on is down",
		"Nothing was tried and nothing was changed. Send the request again after the time that Retry-After names.")
	p.wait = wait
	return p
}

func conflict() *problem {
	return newProblem(http.StatusServiceUnavailable, "serialization-failure", "A concurrent transaction was in the way",
		"The transaction was rolled back by the database to keep its isolation. Send the request again.")
}

func commitFailed() *problem {
	return newProblem(http.StatusInternalServerError, "commit-failed", "The handler's work was not committed",
		"The handler succeeded, but COMMIT failed, or its outcome is unknown. Send the request again: the effect happens once in either case.")
}

func transactionEnded() *problem {
	return newProblem(http.StatusInternalServerError, "handler-ended-transaction", "The handler ended the middleware's transaction",
		"The handler must not commit or roll back: it returns nil, or answers 2xx, to commit, and anything else to roll back. Correct the handler.")
}

func handlerPanicked() *problem {
	return newProblem(http.StatusInternalServerError, "handler-panicked", "The handler panicked",
		"The event does not count as processed. Send the request again once the handler is corrected; the receiver's log has the stack.")
}

func notRemembered() *problem {
	return newProblem(http.StatusInternalServerError, "not-remembered", "The handler succeeded, but its event may be forgotten",
		"The effect has happened, and whether the receiver's store knows of it is not known. Send the request again: it is answered "+
			"from memory, or the handler runs once more.")
}

func leaseLost() *problem {
	return newProblem(http.StatusInternalServerError, "lease-lost", "The handler succeeded after its lease had ended",
		"Another request has taken the event over meanwhile, so that the effect may happen twice. Send the request again for the other's "+
			"response; make the handler faster or the lease longer (store.Config.Lease).")
}

func noAnswer() *problem {
	return newProblem(http.StatusInternalServerError, "no-answer", "The handler answered nothing",
		"The handler returned without writing a status, so that its writes were rolled back. To commit, write 2xx before the handler "+
			"returns, and to the ResponseWriter that the middleware passes to it.")
}

// unremembered returns the refusal for an event whose handler succeeded and that is not known to be
// remembered.
func unremembered(err error) *problem {
	switch {
	case sqlstate.IsConflict(err):
		return conflict()
	case errors.Is(err, memory.ErrEnded):
		return transactionEnded()
	case errors.Is(err, memory.ErrLeaseLost):
		return leaseLost()
	case errors.Is(err, memory.ErrNotRemembered):
		return notRemembered()
	}
	return commitFailed()
}
