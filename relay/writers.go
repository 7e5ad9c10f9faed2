package relay

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// observeWriters looks at the open transactions if it is time to, and makes claims look back to where one has committed late.
// Claims go on without it: floors then stay where they are, and late commits wait for a walk.
func (c *claimer) observeWriters(ctx context.Context, now time.Time) {
	w := &c.writers
	if w.Wanted(now, c.pace.Idle) {
		at, latest, open, err := pg.OpenWriters(ctx, c.store.pool)
		if err != nil {
			c.databaseError("look for open transactions", err)
			w.Next = now.Add(policy.WritersMost)
		} else if late := w.Observe(now, at, latest, open); !late.IsZero() {
			c.lookBack(late.Add(-policy.WritersMost))
		}
	}
	if w.Pending() {
		c.plan(w.Next)
	}
}
