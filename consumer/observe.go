package consumer

import (
	"context"
	"time"
)

// An Observer hears what becomes of every event: count and measure here. Its methods are called on the goroutine that
// serves the request or works the inbox, concurrently, and must not block. There is one adapter, for Prometheus, in the
// module consumer/promobserver; [ObserverFunc] makes an Observer of a function.
type Observer interface {
	// Received is called for every request that has proven itself, before the database is touched. ctx is the request's.
	Received(ctx context.Context, event Event)

	// Finished is called once for every request, when its outcome is final and before the answer is written, and once for
	// every attempt of an inbox's worker, when its outcome is committed.
	Finished(ctx context.Context, report Report)
}

// ObserverFunc is an [Observer] that hears of outcomes only.
type ObserverFunc func(ctx context.Context, report Report)

// Received does nothing.
func (f ObserverFunc) Received(context.Context, Event) {}

// Finished calls f.
func (f ObserverFunc) Finished(ctx context.Context, report Report) { f(ctx, report) }

// Result is the outcome of one request, or of one attempt of an inbox's worker: a closed set, fit for a metric label.
type Result string

const (
	ResultProcessed        Result = "processed"         // the handler's work is committed
	ResultIgnored          Result = "ignored"           // recorded as of no concern to this receiver
	ResultRecorded         Result = "recorded"          // 202: the inbox holds the event, a worker will run the handler
	ResultDuplicate        Result = "duplicate"         // known already; answered from memory
	ResultInFlight         Result = "in_flight"         // 409: another request with this key is being processed
	ResultKeyReused        Result = "key_reused"        // 422: the key is known with another body
	ResultOtherDestination Result = "other_destination" // 421: the event is known from another destination of its sender
	ResultForgotten        Result = "forgotten"         // 422: so old that it may have been processed and forgotten
	ResultRejected         Result = "rejected"          // 4xx: unsigned, forged, stale, malformed or too large
	ResultBreakerOpen      Result = "breaker_open"      // 503: what the handler depends on is down; the handler did not run
	ResultUnavailable      Result = "unavailable"       // 503: the database did not let the transaction begin, or the store did not answer
	ResultFailed           Result = "failed"            // the handler did not succeed; its transaction is rolled back, its claim released
	ResultCommitFailed     Result = "commit_failed"     // the handler succeeded, but did not commit, or its store may not remember it
)

// Report is what became of one request, or of one attempt of an inbox's worker.
type Report struct {
	Result Result
	// Receiver and Source are the Config's, also where the event is not known.
	Receiver, Source string
	// Event is the event; zero for ResultRejected, of which nothing is proven.
	Event Event
	// Inbox says that a worker of an inbox reports; otherwise a request does.
	Inbox bool
	// Status is what the client is answered; 0 when the handler aborted the connection, and for workers.
	Status int
	// Final says of ResultFailed that nobody will try again by himself: the error was permanent, or attempts are used up.
	Final bool
	// Err is why, where an error or a panic was the reason.
	Err error
	// Duration is how long the request or the attempt took, and HandlerDuration the handler's part of it: 0 if it did
	// not run.
	Duration, HandlerDuration time.Duration
}
