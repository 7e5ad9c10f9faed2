package ops

import (
	"context"
	"fmt"
	"time"
)

// pinPlans keeps the planner to the indexes for one transaction, whatever its statistics say: each look at deliveries is bounded only in the
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
