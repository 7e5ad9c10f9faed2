package consumer

import (
	"errors"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
	"github.com/outbox-relay/outbox-relay/consumer/internal/verdict"
)

// ErrMiddlewareCommits is returned by Commit and Rollback of a handler's transaction, and by a
// statement that begins with COMMIT, ROLLBACK (but not TO a savepoint), BEGIN or another word that
// ends or begins a transaction. This package ends the transaction, after the handler. After a call
// of Rollback, or such a ROLLBACK, it rolls back whatever the handler answers.
var ErrMiddlewareCommits = memory.ErrMiddlewareCommits

// Permanent marks an error that no repetition will fix: a payload that cannot be read, a reference
// to nothing. It is answered with 422, on which a relay fails the delivery and alerts. An inbox
// marks the event failed. A nil err stays nil.
func Permanent(err error) error {
	return verdict.Verdict{Action: verdict.Fail}.Mark(err)
}

// RetryAfter marks an error that will have passed after d at the earliest. It is answered with 503
// and Retry-After, in whole seconds rounded up. An inbox waits that long, which spends an attempt
// all the same. A nil err stays nil; a d that is not positive means as soon as possible.
//
// To a relay a 503 says that the whole receiver is not available. After five of them for three
// events or more it holds all that it has for this receiver. Where only this event is too early,
// return an ordinary error behind a middleware.
func RetryAfter(err error, d time.Duration) error {
	return verdict.Verdict{Action: verdict.Retry, After: max(d, 0), Timed: true, Down: true}.Mark(err)
}

// DependencyDown marks an error that says nothing about the event: what the handler depends on,
// such as another service, is down. It is answered with 503, and an inbox tries again on its
// schedule. [Config].Breaker counts it, as it counts an error of [RetryAfter]. A nil err stays nil.
func DependencyDown(err error) error {
	return verdict.Verdict{Action: verdict.Retry, Down: true}.Mark(err)
}

// Ignore returns an error that says that an event does not concern this receiver. What the handler
// has written is committed, the event counts as known, and its state is "ignored", with reason
// beside it for review.
func Ignore(reason string) error {
	return verdict.Verdict{Action: verdict.Ignore}.Mark(errors.New(reason))
}

// errNoAnswer is the cause for a handler that answered nothing. A framework whose handlers return
// errors writes the answer to an error only after the middleware has returned.
var errNoAnswer = errors.New("the handler returned without writing a status, so that its writes were rolled back: before it returns, " +
	"write 2xx to the ResponseWriter that the middleware passes to it; what is written to another one, or later, does not count")
