package pg

import (
	"context"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Chores runs statements one at a time, so that housekeeping never holds more than one of the
// pool's connections, however long its statements take: claims and settles always have one each.
type Chores struct {
	Pool
	turn chan struct{} // of one: the goroutine that has put something into it has the turn
}

// NewChores returns chores that run their statements on a pool.
func NewChores(on Pool) *Chores { return &Chores{Pool: on, turn: make(chan struct{}, 1)} }

// await returns when no other statement is running. The caller calls end, once or more, when its
// own has ended.
func (c *Chores) await(ctx context.Context) (end func(), err error) {
	select {
	case c.turn <- struct{}{}:
		return sync.OnceFunc(func() { <-c.turn }), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Query runs a statement; it ends with its rows.
func (c *Chores) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	end, err := c.await(ctx)
	if err != nil {
		return nil, err
	}
	rows, err := c.Pool.Query(ctx, sql, args...)
	if err != nil {
		end()
		return nil, err
	}
	return &committedRows{Rows: rows, end: func() error { end(); return nil }}, nil
}

// QueryRow runs a statement whose first row is all that matters.
func (c *Chores) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, err := c.Query(ctx, sql, args...)
	return committedRow{rows: rows, err: err}
}

// Exec runs a statement without rows.
func (c *Chores) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	end, err := c.await(ctx)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	defer end()
	return c.Pool.Exec(ctx, sql, args...)
}

// SendBatch runs statements in one round trip.
func (c *Chores) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	end, err := c.await(ctx)
	if err != nil {
		return pgx.FailedBatchResults(batch, err)
	}
	results := c.Pool.SendBatch(ctx, batch)
	return committedBatch{BatchResults: results, end: sync.OnceValue(func() error {
		defer end()
		return results.Close()
	})}
}

// Begin begins a transaction of several round trips.
func (c *Chores) Begin(ctx context.Context) (pgx.Tx, error) {
	end, err := c.await(ctx)
	if err != nil {
		return nil, err
	}
	tx, err := c.Pool.Begin(ctx)
	if err != nil {
		end()
		return nil, err
	}
	return choreTx{tx, end}, nil
}

type choreTx struct {
	pgx.Tx
	end func()
}

// Commit ends the transaction.
func (t choreTx) Commit(ctx context.Context) error {
	defer t.end()
	return t.Tx.Commit(ctx)
}

// Rollback ends the transaction.
func (t choreTx) Rollback(ctx context.Context) error {
	defer t.end()
	return t.Tx.Rollback(ctx)
}
