package natsconsumer

import (
	"context"
	"fmt"
)

// Lag is what waits for a receiver, in messages.
type Lag struct {
	Waiting  uint64 // not delivered yet
	UnderWay int    // delivered and not acknowledged, those between two attempts among them
	Failing  int    // of UnderWay: delivered more than once
}

// Lag asks the servers how far all processes of the receiver are behind the stream. It makes one
// request for each partition: ask for it twice a minute from one process, and not in each scrape of
// each replica.
func (c *Consumer) Lag(ctx context.Context) (sum Lag, err error) {
	for _, l := range c.lanes() {
		source, err := c.js.Consumer(ctx, c.cfg.Stream, l.durable)
		if err != nil {
			return Lag{}, fmt.Errorf("natsconsumer: durable consumer %q of stream %q: %w", l.durable, c.cfg.Stream, err)
		}
		info := source.CachedInfo()
		sum.Waiting += info.NumPending
		sum.UnderWay += info.NumAckPending
		sum.Failing += info.NumRedelivered
	}
	return sum, nil
}
