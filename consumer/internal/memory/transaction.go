package memory

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer/internal/handlerctx"
	"github.com/outbox-relay/outbox-relay/consumer/internal/sqlstate"
)

// Database begins transactions through pgx or database/sql.
type Database interface {
	// Begin opens a transaction, runs query as its first statement and hands the row to scan. The
	// transaction, if there is one, is the caller's to end, even beside an error.
	Begin(ctx context.Context, scan func(pgx.Row) error, query string, args []any) (Transaction, error)

	// Exec runs a statement by itself and returns how many rows it has changed.
	Exec(ctx context.Context, query string, args ...any) (int64, error)
}

// Transaction is one that spans the handler.
type Transaction interface {
	QueryRow(ctx context.Context, query string, args []any) pgx.Row

	// Enter says that a handler gets the transaction next, on a connection that is as found.
	Enter(found Surroundings)

	// Attach puts the transaction where the handler finds it.
	Attach(scope *handlerctx.Scope)

	// Commit runs query as the last statement and commits, within ctx. After Enter, query ends with
	// the two arguments of the surroundings as found, which are added here. It fails with ErrEnded,
	// and does not commit, when query divides by zero, as it does in any other transaction than the
	// one that inserted the event. The transaction has ended afterwards in any case.
	Commit(ctx context.Context, query string, args []any) error

	// Rollback gives the transaction up, unless it has ended. A failure needs no report: the
	// connection is then discarded, and PostgreSQL rolls back what was not committed.
	Rollback()
}

// PgxDatabase spends two round trips a request beside the handler's own, as many as a bare BEGIN
// and COMMIT do: the first carries BEGIN and admission, the last the response and COMMIT.
type PgxDatabase struct {
	Pool    *pgxpool.Pool
	Options pgx.TxOptions
	Timeout time.Duration // of rolling back
}

// Begin opens a [PgxTransaction].
func (db *PgxDatabase) Begin(ctx context.Context, scan func(pgx.Row) error, query string, args []any) (Transaction, error) {
	conn, err := db.Pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	batch := &pgx.Batch{}
	batch.BeginTx(db.Options)
	batch.Queue(query, args...).QueryRow(scan)
	results := conn.SendBatch(ctx, batch)
	err = results.Close() // runs scan
	return Lend(conn, results.Tx(), db.Timeout), err
}

// Exec runs a statement by itself.
func (db *PgxDatabase) Exec(ctx context.Context, query string, args ...any) (int64, error) {
	tag, err := db.Pool.Exec(ctx, query, args...)
	return tag.RowsAffected(), err
}

// PgxTransaction is a transaction of pgx that a handler is given.
type PgxTransaction struct {
	conn    *pgxpool.Conn
	tx      pgx.Tx
	handler *handlerTx
	timeout time.Duration

	released bool // the connection is another's
	found    Surroundings
	tidy     bool // the connection is as it was found, since no handler has had it or since it was checked
}

// Lend makes a transaction of conn one that a handler can be given. timeout bounds its rollback.
func Lend(conn *pgxpool.Conn, tx pgx.Tx, timeout time.Duration) *PgxTransaction {
	return &PgxTransaction{conn: conn, tx: tx, handler: &handlerTx{inner: tx, ending: &ending{}}, timeout: timeout, tidy: true}
}

// Conn is the transaction's connection.
func (t *PgxTransaction) Conn() *pgxpool.Conn { return t.conn }

// Attach gives the handler its view of the transaction.
func (t *PgxTransaction) Attach(scope *handlerctx.Scope) { scope.Tx = t.handler }

// Enter says that a handler gets the transaction next.
func (t *PgxTransaction) Enter(found Surroundings) { t.found, t.tidy = found, false }

// QueryRow runs a statement of this package.
func (t *PgxTransaction) QueryRow(ctx context.Context, query string, args []any) pgx.Row {
	return t.tx.QueryRow(ctx, query, args...)
}

// Commit runs query and COMMIT in one round trip.
func (t *PgxTransaction) Commit(ctx context.Context, query string, args []any) error {
	defer t.Rollback() // what an error left open
	if err := t.Unfit(); err != nil {
		return err
	}
	asked := false
	batch := &pgx.Batch{}
	if t.tidy {
		batch.Queue(query, args...).Exec(func(pgconn.CommandTag) error { asked = true; return nil })
	} else {
		t.QueueLast(batch, query, args, func(err error) error {
			asked = err == nil
			return err
		})
	}
	err := t.SendCommit(ctx, batch, false)
	if !asked {
		return Lost(err) // PostgreSQL skips the rest of a batch, so this did not commit
	}
	return err
}

// QueueLast queues a last statement behind a handler, with the surroundings as found for its last
// two arguments. done gets the statement's error, and returns what becomes of it.
func (t *PgxTransaction) QueueLast(batch *pgx.Batch, query string, args []any, done func(error) error) {
	batch.Queue(query, append(args, t.found.SearchPath, t.found.Role)...).QueryRow(func(row pgx.Row) error {
		return done(row.Scan(&t.tidy))
	})
}

// SendCommit ends a batch with COMMIT, and sends it. With reset the session gets its own settings
// back behind that: those of the transaction hold until its last trigger has run.
func (t *PgxTransaction) SendCommit(ctx context.Context, batch *pgx.Batch, reset bool) error {
	committed := false
	batch.Queue("commit").Exec(func(tag pgconn.CommandTag) error {
		committed = tag.String() == CommitTag
		if committed {
			return nil
		}
		t.handler.spoiled.Store(true) // the word may be the name of a prepared statement, and would be so again
		if tag.String() == "ROLLBACK" {
			return ErrAborted
		}
		return ErrNotCommit
	})
	if reset {
		batch.Queue(t.found.qualified(resetSQL)).QueryRow(func(row pgx.Row) error {
			if err := row.Scan(nil); err != nil {
				t.tidy = false
			}
			return nil
		})
	}
	err := t.conn.SendBatch(ctx, batch).Close()
	if committed {
		return nil
	}
	return err
}

// Unfit closes the transaction to its handler, and returns why it cannot be committed as the
// handler left it; nil: it may be.
func (t *PgxTransaction) Unfit() error {
	idle := t.Close()
	switch conn := t.conn.Conn().PgConn(); {
	case t.handler.rolledBack.Load() || conn.TxStatus() == 'I':
		return ErrEnded
	case !idle || conn.IsBusy():
		return ErrRowsOpen
	}
	return nil
}

// CommitTag is what PostgreSQL answers to a COMMIT that has committed.
const CommitTag = "COMMIT"

// Lost returns what an error of the statement before COMMIT means: it is not in the transaction
// that inserted the event, or cannot find out.
func Lost(err error) error {
	switch sqlstate.Of(err) {
	case sqlstate.DivisionByZero:
		return fmt.Errorf("%w, or removed the event's row, or has set a role and not put it back", ErrEnded)
	case sqlstate.UndefinedTable, sqlstate.InsufficientPrivilege:
		return fmt.Errorf("%w: %w", errOutOfReach, err)
	}
	return err
}

// Rollback gives the connection back, or discards it.
func (t *PgxTransaction) Rollback() {
	if t.released {
		return
	}
	t.released = true
	defer t.conn.Release() // which destroys a connection that is not idle
	idle := t.Close()
	conn := t.conn.Conn()
	if idle && t.tidy && conn.PgConn().TxStatus() == 'I' && !t.handler.spoiled.Load() {
		return // as after most commits
	}
	ctx, cancel := context.WithTimeout(context.Background(), t.timeout)
	defer cancel()
	batch := &pgx.Batch{}
	if conn.PgConn().TxStatus() != 'I' {
		batch.Queue("rollback")
	}
	if !t.tidy {
		t.queueTidy(batch)
	}
	if batch.Len() > 0 {
		_ = conn.SendBatch(ctx, batch).Close()
	}
	if !idle || !t.tidy || t.handler.spoiled.Load() {
		_ = conn.Close(ctx)
	}
}

// queueTidy checks, behind the transaction, whether the connection may be another event's.
func (t *PgxTransaction) queueTidy(batch *pgx.Batch) {
	query, args := t.found.Tidy()
	batch.Queue(query, args...).QueryRow(func(row pgx.Row) error { return row.Scan(&t.tidy) })
}

// Close closes the transaction to its handler. It reports false while a call is under way all the
// same, of a goroutine that the handler has left behind.
func (t *PgxTransaction) Close() (idle bool) { return t.handler.close() }

// Ended reports whether the handler has ended the transaction itself, and begun no other.
func (t *PgxTransaction) Ended() bool {
	conn := t.conn.Conn()
	return !conn.IsClosed() && conn.PgConn().TxStatus() == 'I'
}
