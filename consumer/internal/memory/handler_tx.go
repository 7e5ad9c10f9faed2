package memory

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// ForHandler returns the view of tx that a handler gets: it can neither commit nor roll back. It is
// nil for nil.
func ForHandler(tx pgx.Tx) pgx.Tx {
	if tx == nil {
		return nil
	}
	return &handlerTx{inner: tx, ending: &ending{}}
}

// handlerTx lends the middleware's transaction, or a savepoint in it, to the handler. It does not
// let the handler end the transaction, and closes when the handler returns, lest a goroutine left
// behind writes into the transaction of the connection's next user.
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
	spoiled    atomic.Bool  // no other event may get the connection
	declared   atomic.Bool  // the handler has opened a cursor
}

// close closes the transaction to its handler. It reports false while a call is under way all the
// same, of a goroutine that the handler has left behind.
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
	tag, err := t.current().Exec(ctx, query, args...)
	if tag.String() == "DECLARE CURSOR" {
		t.declared.Store(true)
	}
	return tag, err
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
	t.spoiled.Store(true) // they live as long as the connection does, whichever event has it by then
	return t.current().LargeObjects()
}

func (t *handlerTx) Conn() *pgx.Conn {
	t.spoiled.Store(true) // as above
	return t.current().Conn()
}
