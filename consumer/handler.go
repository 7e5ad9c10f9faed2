package consumer

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer/internal/handlerctx"
)

// A Handler works one event in tx, a pgx.Tx ([New], inbox.Config) or a *sql.Tx (sqlconsumer.New).
// It is called concurrently. tx is as [Tx] describes it, or sqlconsumer.Tx.
//
// When it returns nil, what it wrote through tx commits together with the memory that the event was
// processed. When it returns an error, both are rolled back. A write through another connection
// commits by itself.
//
// The error decides what happens next. After one of [Permanent] the event fails. After one of
// [RetryAfter] it is tried again, not before its time. After any other, [DependencyDown] among
// them, it is tried again on the usual schedule. An error of [Ignore] commits. The outermost of
// these marks counts. [ErrUnknownEvent] without a mark, as [Router.Dispatch] returns it, fails the
// event for good in a handler of New: 422, and the relay alerts. An inbox keeps the event as
// ignored, as after Ignore, until it is replayed. [New] has the table of answers.
type Handler[Tx any] func(ctx context.Context, tx Tx, event Event) error

// Tx returns the transaction of a handler behind [Middleware]. A [Handler] has the same as its
// parameter. What is written through it commits or rolls back together with the memory that the
// event was processed. What is written through another connection does not.
//
// Begin makes savepoints as usual. Commit and Rollback return [ErrMiddlewareCommits], and so do
// statements that would do the same. Like every pgx.Tx it is for one goroutine at a time. It is
// closed when the handler returns. After a call of LargeObjects or Conn the connection is closed
// with it, and another one is opened for the next event.
//
// It panics when ctx is not that of such a handler.
func Tx(ctx context.Context) pgx.Tx {
	switch scope := handlerctx.From(ctx); {
	case scope.Tx != nil:
		return scope.Tx
	case scope.SQLTx != nil:
		panic("consumer: Tx is called behind sqlconsumer.Middleware, whose transaction is sqlconsumer.Tx's")
	case scope.Store:
		panic("consumer: Tx is called behind store.Middleware, which has no transaction: use Middleware where the effect is in PostgreSQL")
	}
	panic("consumer: Tx needs the context of a request that came through Middleware")
}
