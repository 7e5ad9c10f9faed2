package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/breaker"
	"github.com/outbox-relay/outbox-relay/consumer/internal/handlerctx"
	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
	"github.com/outbox-relay/outbox-relay/consumer/internal/redact"
	"github.com/outbox-relay/outbox-relay/consumer/internal/sqlstate"
	"github.com/outbox-relay/outbox-relay/consumer/internal/verdict"
)

// work is an event that a worker holds under its lock.
type work struct {
	*ticket
	tx            *memory.PgxTransaction
	event         headers.Event
	payload       []byte
	headers       []byte // of the request that brought it, as JSON
	attempts      int    // that have ended before this one
	interruptions int
	orderingKey   string
	isolation     string // of tx
	xid           string // of tx: shows whether the handler has put another transaction in its place
	same          bool   // it certainly has not
	table         *eventsTable
	began         time.Time
	handled       time.Duration
}

// work takes one claimed event through its steps: begin, run the handler, finish or settle. A nil
// conn makes it acquire a connection. ctx ends when nothing new may begin.
func (s *runner) work(ctx context.Context, conn *pgxpool.Conn, t *ticket) {
	began := time.Now()
	conn, err := s.connection(ctx, conn)
	if err != nil {
		s.unbegun(ctx, t, err)
		return
	}
	lasting := context.WithoutCancel(ctx)
	beginning, cancel := context.WithTimeout(lasting, s.CommitTimeout)
	wk, err := s.begin(beginning, conn, t)
	cancel()
	switch {
	case err != nil:
		s.unbegun(ctx, t, err)
		return
	case wk == nil:
		return // another worker has it
	}
	wk.began = began
	report := consumer.Report{Result: consumer.ResultProcessed, Receiver: s.Receiver, Source: s.Source, Inbox: true}
	state, reason := StateSucceeded, ""
	switch wk.event, err = s.recordedEvent(t.key, wk.headers); {
	case err != nil:
		err = consumer.Permanent(err)
	case wk.payload == nil:
		err = consumer.Permanent(errNoPayload)
	default:
		err = s.handle(wk)
	}
	report.Event = consumer.Event(wk.event)
	if err != nil && verdict.Of(err).Action == verdict.Ignore {
		report.Result, report.Err = consumer.ResultIgnored, err
		state, reason = StateIgnored, s.Redacted(err)
		err = nil
	}
	if err == nil {
		finishing, cancel := context.WithTimeout(lasting, s.CommitTimeout)
		err = s.finish(finishing, wk, state, reason)
		cancel()
		if err == nil {
			s.succeeded(lasting, wk, report)
			return
		}
		report.Result = consumer.ResultCommitFailed
	} else {
		if s.exchanged(lasting, wk) {
			err = s.endedItself(err)
		}
		wk.tx.Rollback()
		report.Result = consumer.ResultFailed
	}
	if verdict.Of(err).Action != verdict.Fail && s.committedItself(lasting, wk) {
		err = s.endedItself(err)
	}
	report.Err = err
	s.unsuccessful(lasting, wk, report)
}

// connection returns conn, or acquires a connection if conn is nil. It fails if ctx has ended.
func (s *runner) connection(ctx context.Context, conn *pgxpool.Conn) (*pgxpool.Conn, error) {
	if conn == nil {
		var err error
		if conn, err = s.pool.Acquire(ctx); err != nil {
			return nil, err
		}
	}
	if ctx.Err() != nil {
		conn.Release()
		return nil, ctx.Err()
	}
	return conn, nil
}

// unbegun gives back an event whose work has not begun. If that fails, the event is rescued.
func (s *runner) unbegun(ctx context.Context, t *ticket, cause error) {
	err := s.giveBack(context.WithoutCancel(ctx), t)
	if err != nil || ctx.Err() == nil {
		s.Logger().WarnContext(ctx, "consumer: could not begin to work an event", "receiver", s.Receiver, "source", s.Source, "key", t.key, "error", s.Redacted(errors.Join(cause, err)))
	}
}

// cutOff gives back the event of a handler that was still running at the end of DrainTimeout. If
// that fails, the event is rescued.
func (s *runner) cutOff(ctx context.Context, t *ticket, cause error) {
	level, what := slog.LevelInfo, "consumer: gave an event back whose handler was cut off at the end of DrainTimeout"
	if err := s.giveBack(ctx, t); err != nil {
		level, what = slog.LevelWarn, "consumer: could not give an event back whose handler was cut off at the end of DrainTimeout"
		cause = errors.Join(cause, err)
	}
	s.Logger().Log(ctx, level, what, "receiver", s.Receiver, "source", s.Source, "key", t.key, "error", s.Redacted(cause))
}

// endedItself returns the error of a handler that ended the transaction by itself. It is permanent:
// another attempt would repeat what is committed. It keeps the handler's own error as text only.
func (s *runner) endedItself(err error) error {
	return consumer.Permanent(fmt.Errorf("%w; it ended with: %s", memory.ErrEnded, s.Redacted(err)))
}

// handle runs the handler. It returns nil or an error of Ignore when the work may be committed, and
// otherwise the reason for the rollback.
func (s *runner) handle(wk *work) (err error) {
	ctx, cancel := context.WithTimeoutCause(s.handling, s.HandlerTimeout, memory.ErrTimeout)
	defer cancel()
	event := wk.event
	event.Payload = wk.payload
	scope := &handlerctx.Scope{Event: event}
	wk.tx.Attach(scope)
	ctx = handlerctx.With(ctx, scope)

	// The handler runs in its own goroutine, so that runtime.Goexit ends nothing else.
	var running sync.WaitGroup
	handed := time.Now()
	running.Go(func() {
		err = errors.New("the handler ended its goroutine")
		defer func() {
			if cause := recover(); cause != nil {
				err = &verdict.Panic{Cause: cause, Stack: debug.Stack()}
			}
		}()
		returned := s.cfg.Handle(ctx, scope.Tx, consumer.Event(event))
		verdict.Examine(returned)
		err = returned
	})
	running.Wait()
	wk.handled = time.Since(handed)

	// From here on the handler's own error is kept as text only: its mark does not count.
	cause := context.Cause(ctx)
	switch {
	case err == nil && errors.Is(cause, memory.ErrTimeout):
		return memory.ErrTimeout // or it would depend on who was faster whether there is an effect
	case err != nil && cause != nil:
		return fmt.Errorf("%w: %s", cause, s.Redacted(err))
	case err != nil && wk.tx.Conn().Conn().IsClosed():
		return fmt.Errorf("%w: %s", errInterrupted, s.Redacted(err))
	}
	return err
}

// succeeded ends an attempt whose work is committed.
func (s *runner) succeeded(ctx context.Context, wk *work, report consumer.Report) {
	if wk.orderingKey != "" && wk.isolation != "read committed" {
		s.releaseNext(ctx, wk)
	}
	s.reportAttempt(ctx, wk, report, "consumer: event "+string(report.Result))
}

// releaseNext releases the next event of the ordering key. If it fails, a sweep does it.
func (s *runner) releaseNext(ctx context.Context, wk *work) {
	promoted, err := s.release(ctx, wk.orderingKey)
	wk.promoted = promoted
	if err != nil {
		s.Logger().WarnContext(ctx, "consumer: could not release the next event of an ordering key", "receiver", s.Receiver, "source", s.Source, "key", wk.key, "error", s.Redacted(err))
	}
}

// unsuccessful ends an attempt whose work is rolled back or may not be committed. The state in the
// database decides: a committed event is no longer processing, and stays as it is.
func (s *runner) unsuccessful(ctx context.Context, wk *work, report consumer.Report) {
	if errors.Is(report.Err, errStopping) {
		s.cutOff(ctx, wk.ticket, report.Err)
		return
	}
	o := s.cfg.settlementOf(report.Err, wk.attempts, wk.interruptions, rand.Float64())
	o.text = s.Redacted(report.Err)
	mine, err := s.settle(ctx, wk, o)
	if err != nil {
		// The row stays as it is, without its lock, and is rescued.
		report.Err = errors.Join(report.Err, err)
	}
	report.Final = o.state == StateFailed && mine
	if mine && wk.orderingKey != "" {
		s.releaseNext(ctx, wk) // what was behind a failed one, or what was replayed meanwhile and comes before this one
	}
	what := "consumer: event is tried again"
	if report.Final {
		what = "consumer: event failed"
	}
	s.reportAttempt(ctx, wk, report, what)
}

// reportAttempt logs and reports one attempt.
func (s *runner) reportAttempt(ctx context.Context, wk *work, report consumer.Report, what string) {
	proof, cause := healthOfAttempt(report), error(nil)
	if proof == breaker.Down {
		cause = s.Loggable(report.Err)
	}
	wk.reported = true
	s.cfg.Config.Breaker.Leave(wk.pass, time.Now(), proof, cause)
	level := slog.LevelDebug
	switch {
	case report.Final:
		level = slog.LevelError
	case report.Result == consumer.ResultIgnored:
		level = slog.LevelInfo
	case report.Err != nil:
		level = slog.LevelWarn
	}
	s.LogOutcome(ctx, level, what, wk.key, wk.eventType, report.Err,
		slog.String("result", string(report.Result)), slog.Int("attempt", wk.attempts+1))
	if s.cfg.Config.Observe != nil {
		report.Duration, report.HandlerDuration = time.Since(wk.began), wk.handled
		s.callObserve(ctx, report)
	}
}

// callObserve calls Config.Observe and recovers from a panic, which would end the process on this
// goroutine. The outcome is committed already.
func (s *runner) callObserve(ctx context.Context, report consumer.Report) {
	defer func() {
		if cause := recover(); cause != nil {
			s.Logger().ErrorContext(ctx, "consumer: Config.Observe panicked", "receiver", s.Receiver, "source", s.Source, "key", report.Event.IdempotencyKey,
				"panic", redact.Text(fmt.Sprint(cause)), "stack", string(debug.Stack()))
		}
	}()
	s.cfg.Config.Observe(ctx, report)
}

// healthOfAttempt classifies the outcome of a worker's attempt for the breaker.
func healthOfAttempt(report consumer.Report) breaker.Health {
	switch report.Result {
	case consumer.ResultProcessed, consumer.ResultIgnored:
		return breaker.Up
	case consumer.ResultCommitFailed:
		if !errors.Is(report.Err, errDropped) && !errors.Is(report.Err, errKeyHeld) && memory.IsDown(report.Err) {
			return breaker.Down
		}
	case consumer.ResultFailed:
		v := verdict.Of(report.Err)
		switch {
		case sqlstate.IsConflict(report.Err):
		case v.Down, errors.Is(report.Err, memory.ErrTimeout), errors.Is(report.Err, errInterrupted):
			return breaker.Down
		case v.Action == verdict.Fail:
			return breaker.Up // it had what it needed in order to refuse
		}
	}
	return breaker.Unknown
}
