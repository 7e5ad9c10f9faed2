package consumer

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// database begins transactions through pgx or database/sql.
type database interface {
	// begin opens a transaction, runs query as its first statement and hands the row to scan. The transaction, if there
	// is one, is the caller's to end, even beside an error.
	begin(ctx context.Context, scan func(pgx.Row) error, query string, args []any) (transaction, error)
}

// transaction is one that spans the handler.
type transaction interface {
	queryRow(ctx context.Context, query string, args []any) pgx.Row

	// enter says that a handler gets the transaction next, on a connection that is as found.
	enter(found surroundings)

	// commit runs query as the last statement and commits, within ctx. After enter, query ends with the two
	// arguments of the surroundings as found, which are added here. It fails with errEnded, and does not commit, when
	// query divides by zero, as it does in any other transaction than the one that inserted the event. The transaction has ended
	// afterwards in any case.
	commit(ctx context.Context, query string, args []any) error

	// rollback gives the transaction up, unless it has ended. A failure needs no report: the connection is then discarded, and PostgreSQL
	// rolls back what nobody committed.
	rollback()

	// attach makes [Tx] or [TxSQL] find the transaction.
	attach(sc *scope)
}

// pgxDatabase spends two round trips a request beside the handler's own, as many as a bare BEGIN and COMMIT do: the first
// carries BEGIN and admission, the last the response and COMMIT.
type pgxDatabase struct {
	pool    *pgxpool.Pool
	options pgx.TxOptions
	timeout time.Duration // of rolling back
}

func (db *pgxDatabase) begin(ctx context.Context, scan func(pgx.Row) error, query string, args []any) (transaction, error) {
	conn, err := db.pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	batch := &pgx.Batch{}
	batch.BeginTx(db.options)
	batch.Queue(query, args...).QueryRow(scan)
	results := conn.SendBatch(ctx, batch)
	err = results.Close() // runs scan
	return lend(conn, results.Tx(), db.timeout), err
}

type pgxTransaction struct {
	conn    *pgxpool.Conn
	tx      pgx.Tx
	handler *handlerTx
	timeout time.Duration

	released bool // the connection is another's
	found    surroundings
	tidy     bool // the connection is as it was found, since no handler has had it or since it was looked at
}

func (t *pgxTransaction) enter(found surroundings) { t.found, t.tidy = found, false }

func (t *pgxTransaction) queryRow(ctx context.Context, query string, args []any) pgx.Row {
	return t.tx.QueryRow(ctx, query, args...)
}

func (t *pgxTransaction) commit(ctx context.Context, query string, args []any) error {
	defer t.rollback() // what an error left open
	if err := t.unfit(); err != nil {
		return err
	}
	asked := false
	batch := &pgx.Batch{}
	if t.tidy {
		batch.Queue(query, args...).Exec(func(pgconn.CommandTag) error { asked = true; return nil })
	} else {
		batch.Queue(query, append(args, t.found.searchPath, t.found.role)...).QueryRow(func(row pgx.Row) (err error) {
			t.tidy, err = scanLast(row)
			asked = err == nil
			return err
		})
	}
	err := t.sendCommit(ctx, batch)
	if !asked {
		return lost(err) // PostgreSQL skips the rest of a batch, so this did not commit
	}
	return err
}

// sendCommit ends a batch with COMMIT, and sends it.
func (t *pgxTransaction) sendCommit(ctx context.Context, batch *pgx.Batch) error {
	committed := false
	batch.Queue("commit").Exec(func(tag pgconn.CommandTag) error {
		committed = tag.String() == commitTag
		if committed {
			return nil
		}
		t.handler.spoiled.Store(true) // the word may be the name of a prepared statement, and would be so again
		if tag.String() == "ROLLBACK" {
			return errAborted
		}
		return errNotCommit
	})
	err := t.conn.SendBatch(ctx, batch).Close()
	if committed {
		return nil
	}
	return err
}

// unfit closes the transaction to its handler, and tells why it cannot be committed as the handler left it; nil: it may be.
func (t *pgxTransaction) unfit() error {
	idle := t.handler.close()
	switch conn := t.conn.Conn().PgConn(); {
	case t.handler.rolledBack.Load() || conn.TxStatus() == 'I':
		return errEnded
	case !idle || conn.IsBusy():
		return errRowsOpen
	}
	return nil
}

// commitTag is what PostgreSQL answers to a COMMIT that has committed.
const commitTag = "COMMIT"

// lost says what an error of the statement before COMMIT means: it is not in the transaction that inserted the event, or
// cannot look.
func lost(err error) error {
	switch sqlState(err) {
	case stateDivisionByZero:
		return fmt.Errorf("%w, or removed the event's row, or has set a role and not put it back", errEnded)
	case stateUndefinedTable, stateInsufficientPrivilege:
		return fmt.Errorf("%w: %w", errOutOfReach, err)
	}
	return err
}

func (t *pgxTransaction) rollback() {
	if t.released {
		return
	}
	t.released = true
	idle := t.handler.close()
	conn := t.conn.Conn()
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
	t.conn.Release() // which destroys a connection that is not idle
}

// queueTidy looks, behind the transaction, whether the connection may be another event's.
func (t *pgxTransaction) queueTidy(batch *pgx.Batch) {
	query, args := t.found.tidy()
	batch.Queue(query, args...).QueryRow(func(row pgx.Row) (err error) {
		t.tidy, err = scanTidy(row)
		return err
	})
}

// ended reports whether the handler has ended the transaction itself, and begun no other.
func (t *pgxTransaction) ended() bool {
	conn := t.conn.Conn()
	return !conn.IsClosed() && conn.PgConn().TxStatus() == 'I'
}

func (t *pgxTransaction) attach(sc *scope) { sc.tx = t.handler }

// sqlDatabase cannot send two statements at once, and so spends four round trips a request beside the handler's own.
type sqlDatabase struct {
	db        *sql.DB
	isolation sql.IsolationLevel
	timeout   time.Duration // of rolling back
}

func (db *sqlDatabase) begin(ctx context.Context, scan func(pgx.Row) error, query string, args []any) (transaction, error) {
	conn, err := db.db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	// database/sql rolls back when the context of BeginTx ends, and for net/http that is when the client goes. So ctx
	// ends the transaction only until the handler has it.
	lasting, cancel := context.WithCancel(context.WithoutCancel(ctx))
	release := context.AfterFunc(ctx, cancel)
	tx, err := conn.BeginTx(lasting, &sql.TxOptions{Isolation: db.isolation})
	if err != nil {
		release()
		cancel()
		_ = conn.Close()
		return nil, err
	}
	t := &sqlTransaction{conn: conn, tx: tx, cancel: cancel, timeout: db.timeout}
	err = scan(t.queryRow(lasting, query, args))
	if !release() {
		err = ctx.Err()
	}
	return t, err
}

type sqlTransaction struct {
	conn    *sql.Conn
	tx      *sql.Tx
	cancel  context.CancelFunc // of the context that BeginTx got
	found   *surroundings      // nil: no handler has had the connection
	timeout time.Duration
}

func (t *sqlTransaction) enter(found surroundings) { t.found = &found }

func (t *sqlTransaction) queryRow(ctx context.Context, query string, args []any) pgx.Row {
	return t.tx.QueryRowContext(ctx, query, args...)
}

func (t *sqlTransaction) commit(ctx context.Context, query string, args []any) error {
	defer t.rollback() // what an error left open, and the connection
	// Commit takes no context of its own: it obeys the one of BeginTx.
	release := context.AfterFunc(ctx, t.cancel)
	defer release()
	var err error
	if t.found == nil {
		_, err = t.tx.ExecContext(ctx, query, args...)
	} else {
		var tidy bool
		tidy, err = scanLast(t.tx.QueryRowContext(ctx, query, append(args, t.found.searchPath, t.found.role)...))
		if tidy {
			defer func() { t.found = nil }()
		}
	}
	if errors.Is(err, sql.ErrTxDone) && ctx.Err() == nil {
		return errEnded
	}
	if err != nil {
		return lost(err)
	}
	return t.tx.Commit()
}

func (t *sqlTransaction) rollback() {
	// Rollback takes no context of its own either.
	timer := time.AfterFunc(t.timeout, t.cancel)
	defer timer.Stop()
	_ = t.tx.Rollback()
	t.cancel()
	if t.found != nil && !t.tidy() {
		_ = t.conn.Raw(func(any) error { return driver.ErrBadConn }) // discards it
	}
	_ = t.conn.Close() // gives it back to the pool
}

// tidy reports whether the connection is as the transaction found it.
func (t *sqlTransaction) tidy() bool {
	ctx, cancel := context.WithTimeout(context.Background(), t.timeout)
	defer cancel()
	query, args := t.found.tidy()
	same, err := scanTidy(t.conn.QueryRowContext(ctx, query, args...))
	return err == nil && same
}

func (t *sqlTransaction) attach(sc *scope) { sc.sqlTx = t.tx }
