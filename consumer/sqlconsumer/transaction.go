package sqlconsumer

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer/internal/handlerctx"
	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
)

// database cannot send two statements at once, and so spends four round trips a request beside the
// handler's own.
type database struct {
	db        *sql.DB
	isolation sql.IsolationLevel
	timeout   time.Duration // of rolling back
}

func (db *database) Begin(ctx context.Context, scan func(pgx.Row) error, query string, args []any) (memory.Transaction, error) {
	conn, err := db.db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	// database/sql rolls back when the context of BeginTx ends, and for net/http that is when the
	// client goes. So ctx ends the transaction only until the handler has it.
	lasting, cancel := context.WithCancel(context.WithoutCancel(ctx))
	release := context.AfterFunc(ctx, cancel)
	tx, err := conn.BeginTx(lasting, &sql.TxOptions{Isolation: db.isolation})
	if err != nil {
		release()
		cancel()
		_ = conn.Close()
		return nil, err
	}
	t := &transaction{conn: conn, tx: tx, cancel: cancel, timeout: db.timeout}
	err = scan(t.QueryRow(lasting, query, args))
	if !release() {
		err = ctx.Err()
	}
	return t, err
}

func (db *database) Exec(ctx context.Context, query string, args ...any) (int64, error) {
	result, err := db.db.ExecContext(ctx, query, args...)
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

type transaction struct {
	conn    *sql.Conn
	tx      *sql.Tx
	cancel  context.CancelFunc   // of the context that BeginTx got
	found   *memory.Surroundings // nil: no handler has had the connection
	timeout time.Duration
}

func (t *transaction) Enter(found memory.Surroundings) { t.found = &found }

func (t *transaction) QueryRow(ctx context.Context, query string, args []any) pgx.Row {
	return t.tx.QueryRowContext(ctx, query, args...)
}

func (t *transaction) Commit(ctx context.Context, query string, args []any) error {
	defer t.Rollback() // what an error left open, and the connection
	// Commit takes no context: it obeys the one of BeginTx.
	release := context.AfterFunc(ctx, t.cancel)
	defer release()
	var err error
	if t.found == nil {
		_, err = t.tx.ExecContext(ctx, query, args...)
	} else {
		var tidy bool
		err = t.tx.QueryRowContext(ctx, query, append(args, t.found.SearchPath, t.found.Role)...).Scan(&tidy)
		if tidy {
			defer func() { t.found = nil }()
		}
	}
	if errors.Is(err, sql.ErrTxDone) && ctx.Err() == nil {
		return memory.ErrEnded
	}
	if err != nil {
		return memory.Lost(err)
	}
	return t.tx.Commit()
}

func (t *transaction) Rollback() {
	// Rollback takes no context either.
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
func (t *transaction) tidy() bool {
	ctx, cancel := context.WithTimeout(context.Background(), t.timeout)
	defer cancel()
	query, args := t.found.Tidy()
	var same bool
	err := t.conn.QueryRowContext(ctx, query, args...).Scan(&same)
	return err == nil && same
}

func (t *transaction) Attach(scope *handlerctx.Scope) { scope.SQLTx = t.tx }
