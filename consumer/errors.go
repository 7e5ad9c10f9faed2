package consumer

import (
	"errors"
	"fmt"
	"time"
)

// ErrMiddlewareCommits is what Commit and Rollback of a handler's transaction return, and what comes of a statement that
// begins with COMMIT, ROLLBACK (but not TO a savepoint), BEGIN or another word that ends a transaction or begins one: this
// package ends it, after the handler. After a call of Rollback, or such a ROLLBACK, it rolls back whatever the handler answers.
var ErrMiddlewareCommits = errors.New("consumer: the transaction ends after the handler: return nil, or answer 2xx, to commit, and anything else to roll back")

// Permanent marks an error that no repetition will mend: a payload that cannot be read, a reference to nothing. The
// middleware answers 422, on which a relay fails the delivery and alerts; an inbox marks the event failed. A nil err stays
// nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &controlError{verdict: verdict{action: actFail}, err: err}
}

// RetryAfter marks an error that will have passed after d at the earliest: the middleware answers 503 with Retry-After, in
// whole seconds rounded up, and an inbox waits that long, which spends an attempt all the same. To a relay a 503 says that the
// whole receiver is not available: after five for three events or more it holds all that it has for it. Where only this event is too early,
// return an ordinary error behind a middleware. A nil err stays nil; a d that is not positive means as soon as possible.
func RetryAfter(err error, d time.Duration) error {
	if err == nil {
		return nil
	}
	return &controlError{verdict: verdict{action: actRetry, after: max(d, 0), timed: true, down: true}, err: err}
}

// DependencyDown marks an error that says nothing about the event: what the handler depends on, such as another service, is
// down. The middleware answers 503, an inbox tries again on its schedule, and [Config].Breaker counts it, as it does
// an error of [RetryAfter]. A nil err stays nil.
func DependencyDown(err error) error {
	if err == nil {
		return nil
	}
	return &controlError{verdict: verdict{action: actRetry, down: true}, err: err}
}

// Ignore says that an event is of no concern to this receiver. What the handler has written is committed, the event counts
// as known, and its state is "ignored" with reason beside it, for somebody to review.
func Ignore(reason string) error {
	return &controlError{verdict: verdict{action: actIgnore}, err: errors.New(reason)}
}

// controlError carries a verdict to whoever called the handler.
type controlError struct {
	verdict verdict
	err     error
}

func (e *controlError) Error() string { return e.err.Error() }
func (e *controlError) Unwrap() error { return e.err }

// action is what an error of a handler asks for: a closed set.
type action int

const (
	actCommit action = iota // no error
	actIgnore               // commit, and mark the event ignored
	actRetry                // roll back, try again
	actFail                 // roll back, give up
)

// verdict is what an error of a handler means.
type verdict struct {
	action action
	timed  bool          // after counts, instead of the schedule
	after  time.Duration // not before it
	down   bool          // what the handler depends on is down
}

// judge returns what an error of a handler means. The outermost mark counts.
func judge(err error) verdict {
	if err == nil {
		return verdict{action: actCommit}
	}
	if control, ok := errors.AsType[*controlError](err); ok {
		return control.verdict
	}
	if errors.Is(err, ErrUnknownEvent) {
		return verdict{action: actIgnore} // an old receiver meets new events; a crash loop would help nobody
	}
	return verdict{action: actRetry}
}

// isMarked reports whether a handler has said itself what its error means.
func isMarked(err error) bool {
	_, ok := errors.AsType[*controlError](err)
	return ok
}

// examine asks an error of a handler everything that its event's outcome will depend on. Its methods are the application's: one
// that panics, as those of a nil pointer in an error may, must do so where a panic of the handler would be caught.
func examine(err error) {
	if err != nil {
		_, _ = judge(err), isConflict(err)
	}
}

// ErrLeaseLost is what [Store].Complete returns when another claim holds the event by now, or has completed it.
var ErrLeaseLost = errors.New("consumer: the lease ended and another request took the event over")

// errNotRemembered: the handler's effect has happened, and no transaction takes it back.
var errNotRemembered = errors.New("the handler's effect has happened, but the store may not remember it: it happens again when the event is sent again")

// errRecorded: the handler of an event calls Once for it.
var errRecorded = errors.New("consumer: Once is called for the event whose handler calls it: that is recorded already, and is the handler's to work")

// errNoAnswer: frameworks whose handlers return errors write the answer to an error after the middleware has returned.
var errNoAnswer = errors.New("the handler returned without an answer: write a status, 2xx to commit")

// Outcomes of a transaction that are not errors of the database.
var (
	// errEnded: the row that this transaction inserted is not its own any more, or gone.
	errEnded = errors.New("the handler committed or rolled back the transaction itself")
	// errTemporary: what would be remembered there ends with the connection.
	errTemporary = errors.New("a temporary table hides the receiver's own: a handler has left one of that name on the connection")
	// errOutOfReach: what is asked last cannot be asked.
	errOutOfReach = errors.New("processed_events is out of reach; a handler that has set a role must put it back")
	// errNotCommit: something else ran in the place of a COMMIT.
	errNotCommit = errors.New("COMMIT did not commit: a prepared statement of the connection has its name")
	// errRowsOpen: the connection is in use, so nothing can be sent over it.
	errRowsOpen = errors.New("the handler left rows of a query open: close them before it returns")
	// errAborted: PostgreSQL answers COMMIT of an aborted transaction with ROLLBACK.
	errAborted = errors.New("a statement of the handler failed and the handler answered 2xx all the same")
)

// errNoPayload: somebody has removed what a handler would get, such as for what is personal in it.
var errNoPayload = errors.New("the event's payload was removed, so there is nothing to work")

// errDropped is errAborted for a handler of an inbox.
var errDropped = errors.New("a statement of the handler failed and the handler returned nil all the same")

// panicError is what a handler panicked with.
type panicError struct {
	cause any
	stack []byte
}

func (e *panicError) Error() string { return fmt.Sprintf("the handler panicked: %v", e.cause) }

// SQLSTATEs on which a decision depends.
const (
	stateSerializationFailure  = "40001"
	stateDeadlockDetected      = "40P01"
	stateCheckViolation        = "23514"
	stateLockNotAvailable      = "55P03"
	stateInFailedTransaction   = "25P02"
	stateQueryCanceled         = "57014"
	stateDivisionByZero        = "22012"
	stateUndefinedTable        = "42P01"
	stateUndefinedColumn       = "42703"
	stateInsufficientPrivilege = "42501"
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

// hinted adds what an operator can do about an error of the first statement; other errors stay as they are.
func hinted(err error) error {
	switch sqlState(err) {
	case stateUndefinedTable, stateUndefinedColumn:
		return fmt.Errorf("%w; the receiver's tables are missing or of another version: run outbox-relay migrate up --set inbox", err)
	case stateInsufficientPrivilege:
		return fmt.Errorf("%w; run migrations/roles.sql and grant the login inbox_receiver", err)
	}
	return err
}

// isConflict reports whether the same transaction may well succeed when it is run again.
func isConflict(err error) bool {
	switch sqlState(err) {
	case stateSerializationFailure, stateDeadlockDetected:
		return true
	}
	return false
}
