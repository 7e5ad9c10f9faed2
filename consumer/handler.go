package consumer

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer/internal/handlerctx"
)

// A Handler works one event in tx, a pgx.Tx ([New], inbox.Config) or a *sql.Tx (sqlconsumer.New). What it writes through tx commits
// together with the memory that the event was processed when it returns nil, and is rolled back when it returns an error. A
// write through another connection commits on its own. The error decides what happens next: the
// event fails after one of [Permanent], is tried again not before the time of one of [RetryAfter], and on the usual schedule
// after any other ([DependencyDown] among them); an error of [Ignore] commits. The outermost of these marks counts.
//
// tx is as [Tx] describes it, or sqlconsumer.Tx. A handler is called concurrently.
type Handler[Tx any] func(ctx context.Context, tx Tx, event Event) error

// Tx returns the transaction in which a handler works behind [Middleware]; that of a [Handler] is its parameter, and the same.
// Whatever it writes commits or rolls back together with the memory that the event was processed; what it writes by any other
// connection does not. Begin makes savepoints as usual. Commit and Rollback return [ErrMiddlewareCommits], and so do statements
// that would do the same. Like every pgx.Tx it is for one goroutine at a time, and it is closed when the handler returns; after a
// call of LargeObjects or Conn the connection is closed with it, and another one opened for the next event.
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

// EventFrom returns the verified event whose handler got ctx, and the zero Event for any other context.
func EventFrom(ctx context.Context) Event { return Event(handlerctx.From(ctx).Event) }
