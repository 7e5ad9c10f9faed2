package relay

import (
	"context"
	"time"
)

// Events without deliveries come about where the trigger does not run: loads with triggers disabled, logical replication,
// session_replication_role = replica. Nothing claims them, and no other rule sees them.
const (
	// undeliveredBatch is how many events each walk of one search looks at: some 20 ms.
	undeliveredBatch = 5_000
)

// searchUndelivered looks for events without deliveries: among the new ones until it has caught up or taken a hundredth
// of the interval between two looks, and among a further part of all others.
func (r *Relay) searchUndelivered(ctx context.Context) error {
	began := time.Now()
	age := r.cfg.Watching.Interval * 9 / 10
	for {
		more, err := r.store.searchUndelivered(ctx, age, undeliveredBatch)
		if err != nil || !more || time.Since(began) > r.cfg.Watching.Interval/100 {
			return err
		}
		age = 0
	}
}
