package ops

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// pinPlans keeps the planner to the indexes for one transaction, whatever its statistics say: each
// look at deliveries is bounded only in the order of its index. Compiling such a statement would
// take longer than running it.
const pinPlans = `SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off; SET LOCAL enable_bitmapscan = off;
SET LOCAL jit = off`

const selectNow = `SELECT clock_timestamp()`

// Now returns the time of the database, which dates everything in it.
func (o *Outbox) Now(ctx context.Context) (now time.Time, err error) {
	return rows.Value[time.Time](ctx, o.pool, "read the database's time", selectNow)
}
