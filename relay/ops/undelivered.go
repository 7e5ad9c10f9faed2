package ops

import (
	"context"
	"fmt"
)

// createBatch is how many events one transaction looks at.
const createBatch = 5_000

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
func (o *Outbox) Undelivered(ctx context.Context) (all Undelivered, err error) {
	for after := int64(0); ; {
		last, looked, u, err := undeliveredBehind(ctx, o.pool, after, createBatch)
		if err != nil {
			return all, fmt.Errorf("look for events without deliveries: %w", err)
		}
		if all.Events == 0 {
			all.FirstEventID = u.FirstEventID
		}
		all.Events += u.Events
		if after = last; looked < createBatch {
			return all, nil
		}
	}
}

// CreateDeliveries gives every event without deliveries those that its type has by the stored routes, or a parked one, in
// batches, each a transaction. An event that has any delivery is left alone, so that it may be repeated. progress may be
// nil; it follows each batch that created something. After an error, also that of ctx, the result says what was done.
func (o *Outbox) CreateDeliveries(ctx context.Context, progress func(CreatedDeliveries)) (all CreatedDeliveries, err error) {
	for after := int64(0); ; {
		last, finished, c, err := createDeliveriesBehind(ctx, o.pool, after, createBatch)
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
