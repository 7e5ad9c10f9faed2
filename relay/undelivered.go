package relay

import (
	"context"
	"fmt"
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

// Undelivered counts events without deliveries.
type Undelivered struct {
	Events int64 `json:"events"`
	// FirstEventID is the lowest of them; 0 without any.
	FirstEventID int64 `json:"first_event_id,string"`
}

// CreatedDeliveries counts what CreateDeliveries did.
type CreatedDeliveries struct {
	Events     int64 `json:"events"`
	Deliveries int64 `json:"deliveries"`
}

// Undelivered looks for events without deliveries among all events, in batches. Archived events do not count.
func (o *Ops) Undelivered(ctx context.Context) (all Undelivered, err error) {
	for after := int64(0); ; {
		last, looked, u, err := undeliveredBehind(ctx, o.pool, after, undeliveredBatch)
		if err != nil {
			return all, fmt.Errorf("look for events without deliveries: %w", err)
		}
		if all.Events == 0 {
			all.FirstEventID = u.FirstEventID
		}
		all.Events += u.Events
		if after = last; looked < undeliveredBatch {
			return all, nil
		}
	}
}

// CreateDeliveries gives every event without deliveries those that its type has by the stored routes, or a parked one, in
// batches, each a transaction. An event that has any delivery is left alone, so that it may be repeated. progress may be
// nil; it follows each batch that created something. After an error, also that of ctx, the result says what was done.
func (o *Ops) CreateDeliveries(ctx context.Context, progress func(CreatedDeliveries)) (all CreatedDeliveries, err error) {
	for after := int64(0); ; {
		last, finished, c, err := createDeliveriesBehind(ctx, o.pool, after, undeliveredBatch)
		if err != nil {
			return all, fmt.Errorf("create deliveries: %w", err)
		}
		all.Events += c.Events
		all.Deliveries += c.Deliveries
		if progress != nil && c.Events > 0 {
			progress(all)
		}
		if after = last; finished {
			return all, nil
		}
	}
}
