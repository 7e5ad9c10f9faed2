package consumer

import (
	"context"
	"database/sql"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer/internal/handlerctx"
)

// A Handler works one event in tx, a pgx.Tx ([New], [InboxConfig]) or a *sql.Tx ([NewSQL]). What it writes through tx commits
// together with the memory that the event was processed when it returns nil, and is rolled back when it returns an error. A
// write through another connection commits on its own. The error decides what happens next: the
// event fails after one of [Permanent], is tried again not before the time of one of [RetryAfter], and on the usual schedule
// after any other ([DependencyDown] among them); an error of [Ignore] commits. The outermost of these marks counts.
//
// tx is as [Tx] and [TxSQL] describe it. A handler is called concurrently.
type Handler[Tx any] func(ctx context.Context, tx Tx, event Event) error

// scope is what a handler's context carries.
type scope struct {
	event Event
	tx    *handlerTx // of New, Middleware and inboxes
	sqlTx *sql.Tx    // of NewSQL and MiddlewareSQL
	lease *lease     // of MiddlewareStore
}

// inScope returns the context of a handler for an event and its payload, which finds what it works with in taken.
func inScope(ctx context.Context, event Event, payload []byte, taken interface{ attach(sc *scope) }) context.Context {
	event.Payload = payload
	sc := &scope{event: event}
	taken.attach(sc)
	return handlerctx.With(ctx, sc)
}

func scopeOf(ctx context.Context) *scope {
	switch value := handlerctx.Value(ctx).(type) {
	case *scope:
		return value
	case handlerctx.Tested[Event]: // of consumertest
		sc := &scope{event: value.Event, sqlTx: value.SQLTx}
		if value.Tx != nil {
			sc.tx = &handlerTx{inner: value.Tx, ending: &ending{}}
		}
		return sc
	}
	return &scope{}
}

// Tx returns the transaction in which a handler works behind [Middleware]; that of a [Handler] is its parameter, and the same.
// Whatever it writes commits or rolls back together with the memory that the event was processed; what it writes by any other
// connection does not. Begin makes savepoints as usual. Commit and Rollback return [ErrMiddlewareCommits], and so do statements
// that would do the same. Like every pgx.Tx it is for one goroutine at a time, and it is closed when the handler returns; after a
// call of LargeObjects or Conn the connection is closed with it, and another one opened for the next event.
//
// It panics when ctx is not that of such a handler.
func Tx(ctx context.Context) pgx.Tx {
	sc := scopeOf(ctx)
	if sc.tx == nil {
		if sc.sqlTx != nil {
			panic("consumer: Tx is called behind MiddlewareSQL, whose transaction is TxSQL's")
		}
		if sc.lease != nil {
			panic(noTransaction)
		}
		panic("consumer: Tx needs the context of a request that came through Middleware")
	}
	return sc.tx
}

// TxSQL is [Tx] for handlers behind [MiddlewareSQL]. A *sql.Tx cannot refuse Commit and Rollback: a handler that calls one
// of them is found out afterwards, and answered with 500 however well it did. What it committed stays, once.
func TxSQL(ctx context.Context) *sql.Tx {
	sc := scopeOf(ctx)
	if sc.sqlTx == nil {
		if sc.tx != nil {
			panic("consumer: TxSQL is called behind Middleware, whose transaction is Tx's")
		}
		if sc.lease != nil {
			panic(noTransaction)
		}
		panic("consumer: TxSQL needs the context of a request that came through MiddlewareSQL")
	}
	return sc.sqlTx
}

const noTransaction = "consumer: there is no transaction behind MiddlewareStore: use Middleware or MiddlewareSQL where the effect is in PostgreSQL"

// EventFrom returns the verified event whose handler got ctx, and the zero Event for any other context.
func EventFrom(ctx context.Context) Event { return scopeOf(ctx).event }

// handlerTx lends the middleware's transaction, or a savepoint in it, to the handler. It does not let the handler end the
// transaction, and closes when the handler returns, lest a goroutine left behind writes into the transaction of the
// connection's next user.
type handlerTx struct {
	inner     pgx.Tx
	savepoint bool
	*ending
}

// ending is shared by a transaction and its savepoints.
type ending struct {
	calls      sync.RWMutex // read-locked by calls of the handler's, for close
	over       atomic.Bool  // the handler has returned
	rolledBack atomic.Bool  // the handler asked to roll back
	spoiled    atomic.Bool  // nobody else may get the connection
}

// lend makes a transaction of conn one that a handler can be given.
func lend(conn *pgxpool.Conn, tx pgx.Tx, timeout time.Duration) *pgxTransaction {
	return &pgxTransaction{conn: conn, tx: tx, handler: &handlerTx{inner: tx, ending: &ending{}}, timeout: timeout, tidy: true}
}

// close closes the transaction to its handler. It reports false while a call is under way all the same, of a goroutine that
// the handler has left behind.
func (e *ending) close() (idle bool) {
	e.over.Store(true)
	if !e.calls.TryLock() {
		return false
	}
	e.calls.Unlock()
	return true
}

// current returns what the calls go to: a closed transaction once the handler has returned.
func (t *handlerTx) current() pgx.Tx {
	if t.over.Load() {
		batch := &pgx.Batch{}
		batch.BeginTx(pgx.TxOptions{})
		return pgx.FailedBatchResults(batch, pgx.ErrTxClosed).Tx()
	}
	return t.inner
}

func (t *handlerTx) Commit(ctx context.Context) error {
	if t.savepoint {
		t.calls.RLock()
		defer t.calls.RUnlock()
		return t.current().Commit(ctx)
	}
	return ErrMiddlewareCommits
}

func (t *handlerTx) Rollback(ctx context.Context) error {
	if t.savepoint {
		t.calls.RLock()
		defer t.calls.RUnlock()
		return t.current().Rollback(ctx)
	}
	t.rolledBack.Store(true) // a 2xx after this must not commit what the handler meant to undo
	return ErrMiddlewareCommits
}

func (t *handlerTx) Begin(ctx context.Context) (pgx.Tx, error) {
	t.calls.RLock()
	defer t.calls.RUnlock()
	inner, err := t.current().Begin(ctx)
	if err != nil {
		return nil, err
	}
	return &handlerTx{inner: inner, savepoint: true, ending: t.ending}, nil
}

func (t *handlerTx) Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error) {
	if t.refuses(query) {
		return refusal().Exec()
	}
	t.calls.RLock()
	defer t.calls.RUnlock()
	return t.current().Exec(ctx, query, args...)
}

func (t *handlerTx) Query(ctx context.Context, query string, args ...any) (pgx.Rows, error) {
	if t.refuses(query) {
		return refusal().Query() //nolint:sqlclosecheck // nothing is opened
	}
	t.calls.RLock()
	defer t.calls.RUnlock()
	return t.current().Query(ctx, query, args...) //nolint:sqlclosecheck // the handler closes them
}

func (t *handlerTx) QueryRow(ctx context.Context, query string, args ...any) pgx.Row {
	if t.refuses(query) {
		return refusal().QueryRow()
	}
	t.calls.RLock()
	defer t.calls.RUnlock()
	return t.current().QueryRow(ctx, query, args...)
}

func (t *handlerTx) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	for _, queued := range batch.QueuedQueries {
		if t.refuses(queued.SQL) {
			return pgx.FailedBatchResults(batch, ErrMiddlewareCommits)
		}
	}
	t.calls.RLock()
	defer t.calls.RUnlock()
	return t.current().SendBatch(ctx, batch)
}

func (t *handlerTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error) {
	t.calls.RLock()
	defer t.calls.RUnlock()
	return t.current().CopyFrom(ctx, table, columns, rows)
}

func (t *handlerTx) Prepare(ctx context.Context, name, query string) (*pgconn.StatementDescription, error) {
	if t.refuses(name) || t.refuses(query) {
		return nil, ErrMiddlewareCommits // as a name it would take the place of the statement, on this connection, for every event
	}
	t.calls.RLock()
	defer t.calls.RUnlock()
	return t.current().Prepare(ctx, name, query)
}

func (t *handlerTx) LargeObjects() pgx.LargeObjects {
	t.spoiled.Store(true) // they go on as long as the connection does, whoever has it by then
	return t.current().LargeObjects()
}

func (t *handlerTx) Conn() *pgx.Conn {
	t.spoiled.Store(true) // as above
	return t.current().Conn()
}
