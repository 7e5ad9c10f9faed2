package ops

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/relay/pg"
)

// collect runs a statement and returns its rows, whose columns are the fields of T in their order; never nil without an error.
// what says in the error what failed.
func collect[T any](ctx context.Context, q pg.DB, what, statement string, args ...any) ([]T, error) {
	rows, err := q.Query(ctx, statement, args...)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[T])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return list, nil
}

// pinPlans keeps the planner to the indexes for one transaction, whatever ANALYZE has seen: each look at deliveries is bounded only in the
// order of its index. Compiling such a statement would take longer than running it.
const pinPlans = `SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off; SET LOCAL enable_bitmapscan = off;
SET LOCAL jit = off`

const selectNow = `SELECT clock_timestamp()`

// Now returns the time of the database, which dates everything in it.
func (o *Outbox) Now(ctx context.Context) (now time.Time, err error) {
	if err := o.pool.QueryRow(ctx, selectNow).Scan(&now); err != nil {
		return time.Time{}, fmt.Errorf("read the database's time: %w", err)
	}
	return now, nil
}
