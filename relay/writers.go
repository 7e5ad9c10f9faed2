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
		} else if late := w.Observe(now, at, latest, open, c.pace.Idle); !late.IsZero() {
			c.lookBack(late.Add(-policy.WritersMost))
		}
	}
	if w.Pending() {
		c.plan(w.Next)
	}
}

// lookBack makes the next claims look at everything that became due since the given time of the database.
func (c *claimer) lookBack(since time.Time) {
	for _, l := range c.lanes.list() {
		l.lookBack(since)
	}
	c.pace.Look()
}
