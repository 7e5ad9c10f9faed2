package pg

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// A DB runs statements: a pool, a connection or a transaction.
type DB interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// A Pool also runs batches and transactions of several round trips: a pool of connections, one
// connection, or [Transactions], where sessions do not last.
type Pool interface {
	DB
	SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults
	Begin(ctx context.Context) (pgx.Tx, error)
}

// StatementTimeout bounds each statement, so that a half-open connection cannot hold a goroutine
// for ever.
const StatementTimeout = 30 * time.Second

// Exec runs a statement without rows, for [StatementTimeout] at most. what says in the error what
// failed.
func Exec(ctx context.Context, db DB, what, sql string, args ...any) error {
	ctx, cancel := context.WithTimeout(ctx, StatementTimeout)
	defer cancel()
	if _, err := db.Exec(ctx, sql, args...); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// Struct runs a statement that returns one row, whose columns are the fields of T in their order,
// for [StatementTimeout] at most.
func Struct[T any](ctx context.Context, db DB, what, sql string, args ...any) (one T, err error) {
	ctx, cancel := context.WithTimeout(ctx, StatementTimeout)
	defer cancel()
	rows, err := db.Query(ctx, sql, args...)
	if err == nil {
		one, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[T])
	}
	if err != nil {
		return one, fmt.Errorf("%s: %w", what, err)
	}
	return one, nil
}

// Value runs a statement that returns one value, for [StatementTimeout] at most.
func Value[T any](ctx context.Context, db DB, what, sql string, args ...any) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, StatementTimeout)
	defer cancel()
	return rows.Value[T](ctx, db, what, sql, args...)
}
