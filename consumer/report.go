package consumer

import "time"

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
	ResultCommitFailed     Result = "commit_failed"     // the handler succeeded, but did not commit, or its store may not remember it; or it ended the transaction itself
)

// Report is what became of one request, or of one attempt of an inbox's worker.
type Report struct {
	Result Result
	// Receiver and Source are the Config's, also where the event is not known.
	Receiver, Source string
	// Event is the event without its Payload; zero for ResultRejected, of which nothing is proven.
	Event Event
	// Inbox says that a worker of an inbox reports; otherwise a request does.
	Inbox bool
	// Status is what the client is answered; 0 when the handler aborted the connection, and for workers.
	Status int
	// Final says of ResultFailed that neither sender nor worker tries again: the error was permanent, or attempts are used up.
	Final bool
	// Err is why, where an error or a panic was the reason.
	Err error
	// Duration is how long the request or the attempt took, and HandlerDuration the handler's part of it: 0 if it did
	// not run.
	Duration, HandlerDuration time.Duration
}
