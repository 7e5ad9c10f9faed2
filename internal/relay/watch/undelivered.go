package watch

import (
	"context"
	"time"
)

// Events without deliveries come about where rows of another server are loaded, as by logical
// replication or from a dump: relays take them for old ones. Nothing sends them, and no other rule
// sees them.
const undeliveredBatch = 5_000 // looked at by each walk of one search: some 20 ms

// searchUndelivered looks for events without deliveries: among the new ones until it has caught up
// or taken a hundredth of the interval between two looks, and among a further part of all others.
func (w *Watcher) searchUndelivered(ctx context.Context) error {
	began := time.Now()
	age := w.Config().Interval * 9 / 10
	for {
		more, err := w.searchNext(ctx, age, undeliveredBatch)
		if err != nil || !more || time.Since(began) > w.Config().Interval/100 {
			return err
		}
		age = 0
	}
}
