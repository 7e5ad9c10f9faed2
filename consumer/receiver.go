package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
	"github.com/outbox-relay/outbox-relay/consumer/internal/sqlstate"
	"github.com/outbox-relay/outbox-relay/consumer/internal/verdict"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// New returns an http.Handler that calls handle for each event, and lets each take effect once. It
// verifies the request, begins a transaction on pool, records the event in processed_events, calls
// handle, commits, and only then answers. It may be called concurrently: each request takes one
// connection of pool, and waits for it as long as its client does. New fails when pool or handle is
// nil or cfg cannot work.
//
// What handle returns decides about the transaction and the answer:
//
//	nil                               committed: 204
//	Ignore                            committed: 204; the event is "ignored", with the reason
//	Permanent                         422, permanent-failure
//	ErrUnknownEvent                   422, event-unknown
//	RetryAfter                        503, retry-later, with Retry-After in seconds, rounded up
//	DependencyDown                    503, retry-later, with Retry-After: 1
//	a conflict of transactions        503, serialization-failure, with Retry-After: 1
//	any other                         500, handler-failed
//
// A refusal of a relay's signed request is a problem whose detail is the error's text, redacted
// (see [Config].Redact). [Config].Observe gets the error itself, in the Report.
//
// No name that the pool's AfterConnect gives to a prepared statement may begin with a keyword of
// SQL, because pgx takes a text for a name wherever it can. A statement named commit fails every
// request. One named "select again" that ends the handler's transaction passes for a SELECT. What a
// handler prepares is not trusted, and needs no such care.
func New(pool *pgxpool.Pool, cfg Config, handle Handler[pgx.Tx]) (http.Handler, error) {
	receive, err := cfg.onPool("New", pool)
	switch {
	case err != nil:
		return nil, err
	case handle == nil:
		return nil, errors.New("consumer: New needs a handler")
	}
	return receive.Handler(func(ctx context.Context) error { return handle(ctx, Tx(ctx), EventFrom(ctx)) }), nil
}

// onPool returns the receiver of the constructor that is named.
func (c Config) onPool(constructor string, pool *pgxpool.Pool) (memory.Receiver, error) {
	return newReceiver(c, func(s memory.Settings) (memory.Memory, error) {
		if pool == nil {
			return nil, fmt.Errorf("consumer: %s needs a pool", constructor)
		}
		return memory.InDatabase(s, &memory.PgxDatabase{Pool: pool, Options: s.TxOptions(), Timeout: s.CommitTimeout}), nil
	})
}

// Packages sqlconsumer, store and inbox take requests as this one does, and remember them
// elsewhere.
var _ = memory.Provide(func(cfg any, open func(memory.Settings) (memory.Memory, error)) (memory.Receiver, error) {
	return newReceiver(cfg.(Config), open)
})

// newReceiver returns the receiver whose memory open returns, for cfg with its defaults.
func newReceiver(cfg Config, open func(memory.Settings) (memory.Memory, error)) (memory.Receiver, error) {
	s, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	m, err := open(s.shared)
	if err != nil {
		return nil, err
	}
	rc := &receiver{settings: s, memory: m}
	if b, ok := m.(memory.Batcher); ok && b.Batch() != nil && s.Verify.Custom == nil && s.Limits.MaxBodyBytes >= webhook.MaxBatchBytes {
		rc.batches = b
	}
	return rc, nil
}

// receiver verifies requests, remembers their events and answers.
type receiver struct {
	*settings
	memory  memory.Memory
	batches memory.Batcher                                                  // nil: batches are refused, as by a receiver that does not know them
	handle  func(ctx context.Context, r *http.Request, rq *request) *answer // calls the application's handler, in its scope
}

// Handler returns a receiver that has work done.
func (rc receiver) Handler(work func(ctx context.Context) error) http.Handler {
	rc.handle = func(ctx context.Context, _ *http.Request, rq *request) *answer {
		return rc.answerTo(&rq.Event, work(ctx))
	}
	return &rc
}

// ServeHTTP takes one request through its steps: check, admit, run, remember, answer.
func (rc *receiver) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if rc.batches != nil && webhook.IsBatch(r.Header) {
		rc.serveBatch(w, r)
		return
	}
	rq, refusal := rc.check(w, r)
	if refusal != nil {
		rc.finish(w, r, &rq, Report{Result: ResultRejected, Err: refusal}, refusal.answer())
		return
	}
	rc.work(w, r, &rq)
}

// work takes a request that is verified through the other steps.
func (rc *receiver) work(w http.ResponseWriter, r *http.Request, rq *request) {
	report := Report{Event: Event(rq.Event)}
	if r.Context().Err() != nil { // as for the rest of a batch that its client has given up
		report.Result, report.Err = ResultUnavailable, context.Cause(r.Context())
		rc.finish(w, r, rq, report, unavailable().answer())
		return
	}
	now := time.Now()
	pass, wait, ok := rc.Breaker.Enter(now)
	if !ok {
		report.Result = ResultBreakerOpen
		rc.finish(w, r, rq, report, dependencyUnavailable(spread(wait)).answer())
		return
	}
	rq.pass, rq.entered = pass, now
	found, err := rc.memory.Admit(r.Context(), &rq.Request)
	if err == nil && found.Admission == memory.Admitted {
		rc.run(w, r, found.Held, rq)
		return
	}
	report.Err = err
	rc.finish(w, r, rq, report, rc.answerFound(rq, found, &report))
	if found.Answered != nil {
		found.Answered(func() { _ = http.NewResponseController(w).Flush() })
	}
}

// answerFound returns the answer for a request whose event gets no handler, and completes its
// report.
func (rc *receiver) answerFound(rq *request, found memory.Found, report *Report) *answer {
	switch {
	case report.Err != nil:
		report.Result = ResultUnavailable
		if sqlstate.IsConflict(report.Err) {
			return conflict().answer()
		}
		return unavailable().answer()
	case found.Admission == memory.Busy:
		report.Result = ResultInFlight
		return inFlight().answer()
	case found.Admission == memory.Locked:
		report.Result = ResultInFlight
		return locked().answer()
	case found.Admission == memory.Reused:
		report.Result = ResultKeyReused
		return keyReused().answer()
	case found.Admission == memory.Diverted:
		report.Result, report.Err = ResultOtherDestination, rc.diverted(&rq.Event)
		return otherDestination().answer()
	case found.Admission == memory.Forgotten:
		report.Result = ResultForgotten
		return tooOld().answer()
	case found.Admission == memory.Recorded:
		report.Result = ResultRecorded
		return foundAnswer(found)
	}
	report.Result = ResultDuplicate
	return foundAnswer(found).replayed()
}

// diverted returns the error for an event that comes from a second destination of its sender. It
// says what to set.
func (s *settings) diverted(event *headers.Event) error {
	return fmt.Errorf("the event was received before, as another destination than %q, by a receiver that has the same Config.Receiver (%q) and "+
		"Source (%q): give the receiver of each destination its own Receiver, or name both in Config.Destinations if they are one", event.Destination, s.Receiver, s.Source)
}

// run calls the handler for an event. It commits or rolls back before it answers.
func (rc *receiver) run(w http.ResponseWriter, r *http.Request, taken memory.Held, rq *request) {
	returned := false
	began := time.Now()
	defer func() {
		if !returned {
			rq.handled = time.Since(began)
			rc.unwind(w, r, taken, rq, recover())
		}
	}()
	ctx, cancel := context.WithTimeoutCause(r.Context(), rc.Limits.HandlerTimeout, memory.ErrTimeout)
	defer cancel()
	event := rq.Event
	event.Payload = rq.Body
	ctx, end := taken.Lend(ctx, event)
	defer end()
	answer := rc.handle(ctx, r, rq)
	returned, rq.handled = true, time.Since(began)

	report := Report{Result: ResultProcessed, Event: Event(rq.Event), Err: answer.cause, Final: answer.final}
	if !answer.success() {
		report.Result = ResultFailed
		if !report.rollBack(taken) {
			answer = transactionEnded().answer()
		}
		rc.finish(w, r, rq, report, answer)
		return
	}
	if answer.ignored != "" {
		report.Result = ResultIgnored
	}
	// The request's context must not cancel this: if the client has gone by now, the work is done
	// all the same.
	lasting, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), rc.Limits.CommitTimeout)
	defer cancel()
	if err := taken.Remember(lasting, answer.status, answer.ignored); err != nil {
		report.Result, report.Err = ResultCommitFailed, err
		answer = unremembered(err).answer()
	}
	rc.finish(w, r, rq, report, answer)
}

// rollBack rolls the event back. It reports false, and completes the report, when the handler has
// committed by itself.
func (report *Report) rollBack(taken memory.Held) bool {
	if taken.Rollback() {
		return true
	}
	report.Result, report.Final = ResultCommitFailed, false
	report.Err = errors.Join(memory.ErrEnded, report.Err)
	return false
}

// unwind rolls the event back after a handler that did not return. cause is nil when the handler
// called runtime.Goexit, as t.FailNow does. net/http then closes the connection without an answer.
func (rc *receiver) unwind(w http.ResponseWriter, r *http.Request, taken memory.Held, rq *request, cause any) {
	report := Report{Result: ResultFailed, Event: Event(rq.Event)}
	switch cause {
	case nil:
		report.Err = errors.New("the handler ended its goroutine")
		report.rollBack(taken)
		rc.finish(w, r, rq, report, nil)
	case http.ErrAbortHandler:
		report.Err = http.ErrAbortHandler
		report.rollBack(taken)
		rc.finish(w, r, rq, report, nil)
		panic(cause)
	default:
		report.Err = &verdict.Panic{Cause: cause, Stack: debug.Stack()}
		report.rollBack(taken)
		rc.finish(w, r, rq, report, handlerPanicked().answer())
	}
}

// finish logs, reports and answers. A nil answer means that the connection is about to be closed.
func (rc *receiver) finish(w http.ResponseWriter, r *http.Request, rq *request, report Report, a *answer) {
	rq.took, rq.ended = time.Since(rq.entered), context.Cause(r.Context())
	if rq.inBatch != nil {
		rq.inBatch.report, rq.inBatch.answer = report, a // until the batch has ended
		return
	}
	rc.conclude(r, rq, report, a)
	if a != nil {
		if rc.batches != nil && a.success() {
			w.Header().Set(webhook.AcceptPost, webhook.BatchType)
		}
		a.send(w)
	}
}

// conclude logs and reports what became of a request.
func (rc *receiver) conclude(r *http.Request, rq *request, report Report, a *answer) {
	if a != nil {
		report.Status = a.status
	}
	report.Receiver, report.Source = rc.Receiver, rc.Source
	rc.reportHealth(rq, report)
	rc.log(r.Context(), report)
	if rc.Observe != nil {
		report.Duration, report.HandlerDuration = time.Since(rq.Began), rq.handled
		rc.Observe(r.Context(), report)
	}
}

// log writes what only an operator can fix at a higher level than the rest.
func (rc *receiver) log(ctx context.Context, report Report) {
	level := slog.LevelDebug
	switch report.Result {
	case ResultUnavailable, ResultCommitFailed, ResultOtherDestination:
		level = slog.LevelError
	case ResultKeyReused, ResultForgotten:
		level = slog.LevelWarn
	case ResultRejected, ResultIgnored:
		level = slog.LevelInfo
	case ResultFailed:
		_, panicked := errors.AsType[*verdict.Panic](report.Err)
		switch {
		case report.Final, panicked, report.Status == 0:
			level = slog.LevelError
		case report.Err != nil:
			level = slog.LevelWarn // the sender tries again
		}
	}
	if report.Result == ResultUnavailable && ctx.Err() != nil {
		level = slog.LevelDebug // the client went away first
	}
	rc.shared.LogOutcome(ctx, level, "consumer: request "+string(report.Result), report.Event.IdempotencyKey, report.Event.Type, report.Err,
		slog.String("result", string(report.Result)), slog.Int("http_status", report.Status))
}
