package consumer

import "time"

// Result is the outcome of one request, or of one attempt of an inbox's worker. The set of results
// is closed, so it can be a metric label.
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

// Report describes one request, or one attempt of an inbox's worker.
type Report struct {
	Result Result
	// Receiver and Source are those of the Config, set even when the event is unknown.
	Receiver, Source string
	// Event is the event without its Payload. It is zero for ResultRejected, which proves nothing.
	Event Event
	// Inbox is true for a worker of an inbox and false for a request.
	Inbox bool
	// Status is the status that the client gets. It is 0 when the handler aborted the connection,
	// and for workers.
	Status int
	// Final is true for a ResultFailed that neither the sender nor a worker retries: the error was
	// permanent, or no attempts are left.
	Final bool
	// Err is the error or panic behind the result; nil if there was none.
	Err error
	// Duration is the time of the whole request or attempt. HandlerDuration is the handler's part
	// of it, 0 if the handler did not run.
	Duration, HandlerDuration time.Duration
}
