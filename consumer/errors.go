package consumer

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
)

// ErrMiddlewareCommits is what Commit and Rollback of a handler's transaction return: the middleware ends it, after the
// handler. After a call of Rollback it rolls back whatever the handler answers.
var ErrMiddlewareCommits = errors.New("consumer: the middleware commits: answer 2xx to commit, anything else to roll back")

// Result is the outcome of one request: a closed set, fit for a metric label.
type Result string

const (
	ResultProcessed    Result = "processed"     // the handler's work is committed
	ResultDuplicate    Result = "duplicate"     // processed earlier; answered from memory
	ResultInFlight     Result = "in_flight"     // 409: another request with this key is being processed
	ResultKeyReused    Result = "key_reused"    // 422: the key was processed with another body
	ResultRejected     Result = "rejected"      // 4xx: unsigned, forged, stale, malformed or too large
	ResultUnavailable  Result = "unavailable"   // 503: the database did not let the transaction begin
	ResultFailed       Result = "failed"        // the handler answered other than 2xx or panicked; rolled back
	ResultCommitFailed Result = "commit_failed" // 5xx: the handler succeeded, its transaction did not commit
)

// Report is what [Config].OnResult receives.
type Report struct {
	Result Result
	// Event is the event of the request; zero for ResultRejected, of which nothing is proven.
	Event Event
	// Status is what the client is answered; 0 when the handler aborted the connection.
	Status int
	// Err is why, where an error or a panic was the reason.
	Err error
}

// problem is a refusal as RFC 9457 has it.
type problem struct {
	Type   string `json:"type"` // stable: callers may branch on it
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail"` // says what to do; never repeats secrets, payloads or database errors
}

const problemPrefix = "urn:outbox-relay:problem:"

// retrySeconds is the Retry-After of refusals that pass by themselves.
const retrySeconds = 1

func newProblem(status int, name, title, detail string) *problem {
	return &problem{Type: problemPrefix + name, Title: title, Status: status, Detail: detail}
}

func (p *problem) Error() string { return p.Title + ": " + p.Detail }

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
		header.Set("Retry-After", strconv.Itoa(retrySeconds))
	}
	return &answer{status: p.Status, header: header, body: append(body, '\n')}
}

func keyReused() *problem {
	return newProblem(http.StatusUnprocessableEntity, "key-reused", "The idempotency key was used for another body",
		"An event with this key was processed with other content, and nothing was changed now. Send new content under a new key.")
}

func inFlight() *problem {
	return newProblem(http.StatusConflict, "in-flight", "The same event is being processed",
		"Another request with this key has not ended yet. Send it again later: it will get that request's response, or run.")
}

func unavailable() *problem {
	return newProblem(http.StatusServiceUnavailable, "database-unavailable", "The receiver's database did not take the request",
		"Nothing was changed. Send the request again later; the receiver's log names the cause.")
}

func conflict() *problem {
	return newProblem(http.StatusServiceUnavailable, "serialization-failure", "A concurrent transaction was in the way",
		"The transaction was rolled back by the database to keep its isolation. Send the request again.")
}

func commitFailed() *problem {
	return newProblem(http.StatusInternalServerError, "commit-failed", "The handler's work was not committed",
		"The handler succeeded, but its transaction did not commit, or nobody knows. Send the request again: it runs once in either case.")
}

func transactionEnded() *problem {
	return newProblem(http.StatusInternalServerError, "handler-ended-transaction", "The handler ended the middleware's transaction",
		"The handler must not commit or roll back: it answers 2xx to commit and anything else to roll back. Mend the handler.")
}

func handlerPanicked() *problem {
	return newProblem(http.StatusInternalServerError, "handler-panicked", "The handler panicked",
		"Its work was rolled back. Send the request again once the handler is mended; the receiver's log has the stack.")
}

// Outcomes of a transaction that are not errors of the database.
var (
	// errEnded: the row that this transaction inserted is not its own any more.
	errEnded = errors.New("the handler committed or rolled back the transaction itself")
	// errAborted: PostgreSQL answers COMMIT of an aborted transaction with ROLLBACK.
	errAborted = errors.New("a statement of the handler failed and the handler answered 2xx all the same")
)

// panicError is what a handler panicked with.
type panicError struct {
	cause any
	stack []byte
}

func (e *panicError) Error() string { return fmt.Sprintf("the handler panicked: %v", e.cause) }

// SQLSTATEs on which a decision depends.
const (
	stateSerializationFailure = "40001"
	stateDeadlockDetected     = "40P01"
	stateLockNotAvailable     = "55P03"
	stateInFailedTransaction  = "25P02"
)

// sqlState returns the SQLSTATE of an error of pgx or of any database/sql driver that tells it; otherwise "".
func sqlState(err error) string {
	if stated, ok := errors.AsType[interface {
		error
		SQLState() string
	}](err); ok {
		return stated.SQLState()
	}
	return ""
}

// isConflict reports whether the same transaction may well succeed when it is run again.
func isConflict(err error) bool {
	switch sqlState(err) {
	case stateSerializationFailure, stateDeadlockDetected:
		return true
	}
	return false
}
