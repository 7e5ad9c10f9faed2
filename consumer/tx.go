package consumer

import (
	"context"
	"database/sql"
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

	// commit runs query as the last statement and commits, within ctx. It fails with errEnded, and does not commit, when
	// query divides by zero, as it does where it does not find the event's row as it was admitted. The transaction has ended
	// afterwards in any case.
	commit(ctx context.Context, query string, args []any) error

	// confirm is commit with a query that only asks whether everything is still as it was begun. Where that is certain it is
	// not sent.
	confirm(ctx context.Context, query string, args []any) error

	// rollback gives the transaction up. A failure needs no report: the connection is then discarded, and PostgreSQL
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
}

func (t *pgxTransaction) queryRow(ctx context.Context, query string, args []any) pgx.Row {
	return t.tx.QueryRow(ctx, query, args...)
}

func (t *pgxTransaction) confirm(ctx context.Context, query string, args []any) error {
	t.handler.over.Store(true) // from here on no doubt arises
	if t.handler.doubtful.Load() {
		return t.commit(ctx, query, args)
	}
	defer t.rollback() // what an error left open
	if err := t.unfit(); err != nil {
		return err
	}
	return t.done(t.conn.Exec(ctx, "commit"))
}

func (t *pgxTransaction) commit(ctx context.Context, query string, args []any) error {
	defer t.rollback() // what an error left open
	if err := t.unfit(); err != nil {
		return err
	}
	batch := &pgx.Batch{}
	batch.Queue(query, args...)
	batch.Queue("commit")
	results := t.conn.SendBatch(ctx, batch)
	defer results.Close()
	if _, err := results.Exec(); err != nil {
		return lost(err) // PostgreSQL skips the rest of a batch, so this did not commit
	}
	return t.done(results.Exec())
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

// done tells whether a COMMIT has committed. The word may be the name of a prepared statement; then it would be so again.
func (t *pgxTransaction) done(tag pgconn.CommandTag, err error) error {
	if err != nil || tag.String() == commitTag {
		return err
	}
	if t.handler.exposed.Load() {
		t.handler.spoiled.Store(true)
	}
	if tag.String() == "ROLLBACK" {
		return errAborted
	}
	return errNotCommit
}

// commitTag is what PostgreSQL answers to a COMMIT that has committed.
const commitTag = "COMMIT"

// lost says what an error of the statement before COMMIT means: it does not find the event's row in the transaction that
// inserted it, or cannot look.
func lost(err error) error {
	switch sqlState(err) {
	case stateDivisionByZero:
		return fmt.Errorf("%w, or removed the event's row from processed_events, or has set search_path or a role and not put it back", errEnded)
	case stateUndefinedTable, stateInsufficientPrivilege:
		return fmt.Errorf("%w: %w", errOutOfReach, err)
	}
	return err
}

func (t *pgxTransaction) rollback() {
	idle := t.handler.close()
	conn := t.conn.Conn()
	if conn.PgConn().TxStatus() != 'I' {
		ctx, cancel := context.WithTimeout(context.Background(), t.timeout)
		defer cancel()
		_ = t.tx.Rollback(ctx)
	}
	if !idle || t.handler.spoiled.Load() {
		ctx, cancel := context.WithTimeout(context.Background(), t.timeout)
		defer cancel()
		_ = conn.Close(ctx)
	}
	t.conn.Release() // which destroys a connection that is not idle
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
	// database/sql rolls back when the context of BeginTx ends, and for net/http that is when the client goes. So ctx
	// ends the transaction only until the handler has it.
	lasting, cancel := context.WithCancel(context.WithoutCancel(ctx))
	release := context.AfterFunc(ctx, cancel)
	tx, err := db.db.BeginTx(lasting, &sql.TxOptions{Isolation: db.isolation})
	if err != nil {
		release()
		cancel()
		return nil, err
	}
	t := &sqlTransaction{tx: tx, cancel: cancel, timeout: db.timeout}
	err = scan(t.queryRow(lasting, query, args))
	if !release() {
		err = ctx.Err()
	}
	return t, err
}

type sqlTransaction struct {
	tx      *sql.Tx
	cancel  context.CancelFunc // of the context that BeginTx got
	timeout time.Duration
}

func (t *sqlTransaction) queryRow(ctx context.Context, query string, args []any) pgx.Row {
	return t.tx.QueryRowContext(ctx, query, args...)
}

func (t *sqlTransaction) commit(ctx context.Context, query string, args []any) error {
	defer t.rollback() // what an error left open
	// Commit takes no context of its own: it obeys the one of BeginTx.
	release := context.AfterFunc(ctx, t.cancel)
	defer release()
	_, err := t.tx.ExecContext(ctx, query, args...)
	if errors.Is(err, sql.ErrTxDone) && ctx.Err() == nil {
		return errEnded
	}
	if err != nil {
		return lost(err)
	}
	return t.tx.Commit()
}

func (t *sqlTransaction) confirm(ctx context.Context, query string, args []any) error {
	return t.commit(ctx, query, args) // nobody sees what is done with a *sql.Tx
}

func (t *sqlTransaction) rollback() {
	// Rollback takes no context of its own either.
	timer := time.AfterFunc(t.timeout, t.cancel)
	defer timer.Stop()
	_ = t.tx.Rollback()
	t.cancel()
}

func (t *sqlTransaction) attach(sc *scope) { sc.sqlTx = t.tx }
