package consumer

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"runtime/debug"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// New returns the http.Handler that receives events by handle, and lets each take effect once: it verifies the request, begins a
// transaction on pool, records the event in processed_events, calls handle, commits, and only then answers. Requests are
// processed concurrently, each on one connection of pool, for which it waits as long as its client does. It fails when pool or
// handle is nil or cfg cannot work.
//
// What handle returns decides about the transaction and the answer:
//
//	nil                               committed: 204
//	Ignore                            committed: 204, and the event is remembered as "ignored", with the reason
//	Permanent                         422, permanent-failure
//	ErrUnknownEvent                   422, event-unknown
//	RetryAfter, DependencyDown        503, retry-later, with Retry-After in whole seconds, rounded up; 1 for the latter
//	a conflict of transactions        503, serialization-failure, with Retry-After: 1
//	any other                         500, handler-failed
//
// The refusals are problems whose detail is the error's text, redacted (see [Config].Redact). The error itself is in the
// Report for [Config].Observe.
//
// Of the names that the pool's AfterConnect gives prepared statements, none may begin with a keyword of SQL: pgx takes a
// text for a name wherever it can. One called commit fails every request; one called "select again" that ends the handler's
// transaction passes for a SELECT. What a handler prepares is not trusted, and needs no such care.
func New(pool *pgxpool.Pool, cfg Config, handle Handler[pgx.Tx]) (http.Handler, error) {
	m, err := cfg.onPool("New", pool)
	if err != nil {
		return nil, err
	}
	return newReceiver("New", m, handle, Tx)
}

// MustNew is [New]. It panics with the error's text.
func MustNew(pool *pgxpool.Pool, cfg Config, handle Handler[pgx.Tx]) http.Handler {
	return must(New(pool, cfg, handle))
}

// NewSQL is [New] for a *sql.DB of any PostgreSQL driver. It spends two round trips a request more, because database/sql
// cannot send statements together. A *sql.Tx cannot refuse Commit and Rollback: see [TxSQL].
func NewSQL(db *sql.DB, cfg Config, handle Handler[*sql.Tx]) (http.Handler, error) {
	m, err := cfg.onSQL("NewSQL", db)
	if err != nil {
		return nil, err
	}
	return newReceiver("NewSQL", m, handle, TxSQL)
}

// MustNewSQL is [NewSQL]. It panics with the error's text.
func MustNewSQL(db *sql.DB, cfg Config, handle Handler[*sql.Tx]) http.Handler {
	return must(NewSQL(db, cfg, handle))
}

// Middleware is [New] for handlers of net/http, which find their transaction by [Tx] and their event by [EventFrom]. A response
// with a status of 2xx commits, and is sent afterwards; any other is sent after the rollback. A handler that has written nothing
// when it returns is answered 500 (no-answer) and rolled back: frameworks whose handlers return errors write the answer to an
// error only when the middleware has returned.
func Middleware(pool *pgxpool.Pool, cfg Config) (func(http.Handler) http.Handler, error) {
	m, err := cfg.onPool("Middleware", pool)
	if err != nil {
		return nil, err
	}
	return middleware(m.settings, m), nil
}

// MustMiddleware is [Middleware]. It panics with the error's text.
func MustMiddleware(pool *pgxpool.Pool, cfg Config) func(http.Handler) http.Handler {
	return must(Middleware(pool, cfg))
}

// MiddlewareSQL is [Middleware] for a *sql.DB, as [NewSQL] is New. The handler finds its transaction by [TxSQL].
func MiddlewareSQL(db *sql.DB, cfg Config) (func(http.Handler) http.Handler, error) {
	m, err := cfg.onSQL("MiddlewareSQL", db)
	if err != nil {
		return nil, err
	}
	return middleware(m.settings, m), nil
}

// MustMiddlewareSQL is [MiddlewareSQL]. It panics with the error's text.
func MustMiddlewareSQL(db *sql.DB, cfg Config) func(http.Handler) http.Handler {
	return must(MiddlewareSQL(db, cfg))
}

// onPool returns the memory of the constructor that is named.
func (c Config) onPool(constructor string, pool *pgxpool.Pool) (*databaseMemory, error) {
	s, err := c.complete()
	switch {
	case err != nil:
		return nil, err
	case pool == nil:
		return nil, fmt.Errorf("consumer: %s needs a pool", constructor)
	}
	return &databaseMemory{settings: s, db: &pgxDatabase{pool: pool, options: s.txOptions(), timeout: s.CommitTimeout}}, nil
}

func (s *settings) txOptions() pgx.TxOptions {
	if s.Isolation == sql.LevelDefault {
		return pgx.TxOptions{}
	}
	return pgx.TxOptions{IsoLevel: pgx.TxIsoLevel(strings.ToLower(s.Isolation.String()))}
}

func (c Config) onSQL(constructor string, db *sql.DB) (*databaseMemory, error) {
	s, err := c.complete()
	switch {
	case err != nil:
		return nil, err
	case db == nil:
		return nil, fmt.Errorf("consumer: %s needs a database", constructor)
	}
	return &databaseMemory{settings: s, db: &sqlDatabase{db: db, isolation: s.Isolation, timeout: s.CommitTimeout}}, nil
}

// receiver verifies requests, remembers their events and answers.
type receiver struct {
	*settings
	memory memory
	handle func(ctx context.Context, r *http.Request, rq *request) *answer // calls the application's handler, in its scope
}

// newReceiver returns a receiver that calls handle. tx finds its transaction.
func newReceiver[T any](constructor string, m *databaseMemory, handle Handler[T], tx func(context.Context) T) (http.Handler, error) {
	if handle == nil {
		return nil, fmt.Errorf("consumer: %s needs a handler", constructor)
	}
	return &receiver{settings: m.settings, memory: m, handle: func(ctx context.Context, _ *http.Request, _ *request) *answer {
		event := EventFrom(ctx)
		return m.settings.answerTo(&event, handle(ctx, tx(ctx), event))
	}}, nil
}

func middleware(s *settings, m memory) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return &receiver{settings: s, memory: m, handle: func(ctx context.Context, r *http.Request, rq *request) *answer {
			response := newBuffer()
			next.ServeHTTP(response, rq.forHandler(r.WithContext(ctx)))
			return response.result()
		}}
	}
}

// ServeHTTP takes one request through its steps: check, admit, run, remember, answer.
func (rc *receiver) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	rq, refusal := rc.check(w, r)
	if refusal != nil {
		rc.finish(w, r, &rq, Report{Result: ResultRejected, Err: refusal}, refusal.answer())
		return
	}
	var wait time.Duration
	var ok bool
	if rq.pass, wait, ok = rc.Breaker.Enter(time.Now()); !ok {
		rc.finish(w, r, &rq, Report{Result: ResultBreakerOpen, Event: rq.event}, dependencyUnavailable(spread(wait)).answer())
		return
	}
	taken, found, status, err := rc.memory.admit(r.Context(), &rq)
	switch report := (Report{Event: rq.event, Err: err}); {
	case err != nil:
		report.Result = ResultUnavailable
		refusal = unavailable()
		if isConflict(err) {
			refusal = conflict()
		}
		rc.finish(w, r, &rq, report, refusal.answer())
	case found == busy:
		report.Result = ResultInFlight
		rc.finish(w, r, &rq, report, inFlight().answer())
	case found == reused:
		report.Result = ResultKeyReused
		rc.finish(w, r, &rq, report, keyReused().answer())
	case found == diverted:
		report.Result, report.Err = ResultOtherDestination, rc.diverted(&rq.event)
		rc.finish(w, r, &rq, report, otherDestination().answer())
	case found == forgotten:
		report.Result = ResultForgotten
		rc.finish(w, r, &rq, report, tooOld().answer())
	case found == duplicate:
		report.Result = ResultDuplicate
		rc.finish(w, r, &rq, report, duplicateAnswer(status))
	default:
		rc.run(w, r, taken, &rq)
	}
}

// diverted says what to set when an event comes from a second destination of its sender.
func (s *settings) diverted(event *Event) error {
	return fmt.Errorf("the event was received before, as another destination than %q, by a receiver that has the same Config.Receiver (%q) and "+
		"Source (%q): give the receiver of each destination a Receiver of its own", event.destination(), s.Receiver, s.Source)
}

// run lets the handler work on an event, and has it remembered or given up before it answers.
func (rc *receiver) run(w http.ResponseWriter, r *http.Request, taken held, rq *request) {
	returned := false
	began := time.Now()
	defer func() {
		if !returned {
			rq.handled = time.Since(began)
			rc.unwind(w, r, taken, rq, recover())
		}
	}()
	ctx, cancel := context.WithTimeoutCause(r.Context(), rc.HandlerTimeout, errTimeout)
	defer cancel()
	answer := rc.handle(inScope(ctx, rq.event, rq.body, taken), r, rq)
	returned, rq.handled = true, time.Since(began)

	report := Report{Result: ResultProcessed, Event: rq.event, Err: answer.cause, Final: answer.final}
	if !answer.success() {
		taken.rollback()
		report.Result = ResultFailed
		rc.finish(w, r, rq, report, answer)
		return
	}
	if answer.ignored != "" {
		report.Result = ResultIgnored
	}
	// Not under the request's context: when the client has gone by now, the work is done all the same.
	lasting, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), rc.CommitTimeout)
	defer cancel()
	if err := taken.remember(lasting, rq, answer); err != nil {
		report.Result, report.Err = ResultCommitFailed, err
		answer = unremembered(err).answer()
	}
	rc.finish(w, r, rq, report, answer)
}

// unwind gives the event up after a handler that did not return. cause is nil when it called runtime.Goexit, as t.FailNow does:
// net/http then closes the connection, and the client sees no answer.
func (rc *receiver) unwind(w http.ResponseWriter, r *http.Request, taken held, rq *request, cause any) {
	taken.rollback()
	report := Report{Result: ResultFailed, Event: rq.event}
	switch cause {
	case nil:
		report.Err = errors.New("the handler ended its goroutine")
		rc.finish(w, r, rq, report, nil)
	case http.ErrAbortHandler:
		report.Err = http.ErrAbortHandler
		rc.finish(w, r, rq, report, nil)
		panic(cause)
	default:
		report.Err = &panicError{cause: cause, stack: debug.Stack()}
		rc.finish(w, r, rq, report, handlerPanicked().answer())
	}
}

// forHandler returns r, a copy of the request, with its body unread. What a foreign sender's signature does not cover of a relay's headers is left out:
// a handler would take it for proven.
func (rq *request) forHandler(r *http.Request) *http.Request {
	r.Body = io.NopCloser(bytes.NewReader(rq.body))
	r.ContentLength = int64(len(rq.body))
	r.TransferEncoding = nil
	if rq.event.Foreign {
		r.Header = r.Header.Clone()
		maps.DeleteFunc(r.Header, func(name string, _ []string) bool {
			return name == webhook.IdempotencyKey || strings.HasPrefix(name, webhook.OutboxPrefix)
		})
	}
	return r
}

// finish logs, reports and answers. Without an answer the connection is about to be closed.
func (rc *receiver) finish(w http.ResponseWriter, r *http.Request, rq *request, report Report, a *answer) {
	if a != nil {
		report.Status = a.status
	}
	report.Receiver, report.Source = rc.Receiver, rc.Source
	rc.reportHealth(r.Context(), rq, report)
	rc.log(r.Context(), report)
	if rc.Observe != nil {
		report.Duration, report.HandlerDuration = time.Since(rq.began), rq.handled
		rc.Observe(r.Context(), report)
	}
	if a != nil {
		a.send(w)
	}
}

// log tells an operator what only an operator can mend. What a handler answers is its own to log.
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
		_, panicked := errors.AsType[*panicError](report.Err)
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
	logger := rc.logger()
	if !logger.Enabled(ctx, level) {
		return // most requests; their attributes would be made for nobody
	}
	attrs := []slog.Attr{
		slog.String("result", string(report.Result)),
		slog.Int("status", report.Status),
		slog.String("receiver", rc.Receiver), slog.String("source", rc.Source),
		slog.String("key", report.Event.Key),
		slog.String("event_type", report.Event.Type),
	}
	if report.Err != nil {
		attrs = append(attrs, slog.String("error", rc.redacted(report.Err)))
	}
	if panicked, ok := errors.AsType[*panicError](report.Err); ok {
		attrs = append(attrs, slog.String("stack", string(panicked.stack)))
	}
	logger.LogAttrs(ctx, level, "consumer: request "+string(report.Result), attrs...)
}
