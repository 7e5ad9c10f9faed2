package ops

import (
	"context"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// pinPlans keeps the planner to the indexes for one transaction, whatever its statistics say: each
// look at deliveries is bounded only in the order of its index. Compiling such a statement would
// take longer than running it.
const pinPlans = `SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off; SET LOCAL enable_bitmapscan = off;
SET LOCAL jit = off`

// durable begins a transaction of an operator. Its commit survives a crash of the server. Where its
// session stands still, as that of a suspended host, the server soon ends it and releases its
// locks.
const durable = pg.CommitDurably + `; SET LOCAL idle_in_transaction_session_timeout = '10s'; SET LOCAL lock_timeout = '2s'; SET LOCAL statement_timeout = '30s';
` + pinPlans

// briefly begins a transaction that only reads. It does not wait for long where another session
// has locked a table, since what it then read would be as old as the wait.
const briefly = pinPlans + `; SET LOCAL lock_timeout = '2s'`

// lockHint says what to do where another session keeps a table locked.
func lockHint(err error) error {
	if pg.HasCode(err, pg.LockNotAvailable) {
		return fmt.Errorf("%w: another session keeps a table locked, and outbox-relay doctor names it", err)
	}
	return err
}

const selectNow = `SELECT clock_timestamp()`

// Now returns the time of the database, which dates everything in it.
func (o *Outbox) Now(ctx context.Context) (now time.Time, err error) {
	return rows.Value[time.Time](ctx, o.pool, "read the database's time", selectNow)
}
