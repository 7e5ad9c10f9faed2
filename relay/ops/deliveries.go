package ops

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// DeliveryFilter chooses deliveries to list. The zero value is the newest of all.
type DeliveryFilter struct {
	// Status: pending, delivered, failed or discarded. Empty: any.
	Status string
	// Destination by name. Empty: any.
	Destination string
	// Parked deliveries only: those that match no route. They have no destination.
	Parked bool
	// EventID of the one event to list the deliveries of. 0: any.
	EventID int64
	// EventIDs of the events to list the deliveries of. Empty: any.
	EventIDs []int64
	// Type is a pattern of event types, in which '*' stands for any characters. Empty: any.
	Type string
	// Since and Until bound when the event was created: Since <= created_at < Until. Zero: no bound.
	Since, Until time.Time
	// Reason of the last attempt. Empty: any.
	Reason string
	// OrderingKey of the event. Empty: any, also none.
	OrderingKey string
	// Key is the idempotency key of the one event. Empty: any.
	Key string
	// After is the last delivery of the page before: what follows it is returned. The zero value is the first page.
	After DeliveryPosition
	// Limit is how many are returned at most, the newest first. 0: 50.
	Limit int
}

// A DeliveryPosition is a delivery's place in a list.
type DeliveryPosition struct {
	EventID     int64
	Destination string
}

// Delivery is one delivery with what identifies its event; never the payload.
type Delivery struct {
	EventID        int64      `json:"event_id,string"`
	EventType      string     `json:"event_type"`
	IdempotencyKey string     `json:"idempotency_key"`
	CreatedAt      *time.Time `json:"created_at"`
	Destination    string     `json:"destination"` // empty: parked
	Status         string     `json:"status"`
	Attempts       int        `json:"attempts"`
	NextAttemptAt  time.Time  `json:"next_attempt_at"` // of the pending
	LastAttemptAt  *time.Time `json:"last_attempt_at"`
	DeliveredAt    *time.Time `json:"delivered_at"`
	LastStatus     *int       `json:"last_status"`
	LastReason     *string    `json:"last_reason"`
	LastError      *string    `json:"last_error"`
	ClaimedBy      *int32     `json:"claimed_by"` // the relay that has it in flight
	OrderingKey    *string    `json:"ordering_key"`
	Replay         bool       `json:"replay"` // an operator made it pending again
	// NotAfter is when the last request may reach the receiver, as X-Outbox-Not-After said. nil: any time.
	NotAfter *time.Time `json:"not_after"`
	// LatencySeconds is from the commit, or from the time before which it was not to be sent, to the delivery. nil: not delivered.
	LatencySeconds *float64 `json:"latency_seconds"`
}

// Attempt is one line of the attempt log, which holds the attempts that did not deliver.
type Attempt struct {
	Destination string         `json:"destination"`
	Attempt     int            `json:"attempt"`
	StartedAt   time.Time      `json:"started_at"`
	DurationMS  int            `json:"duration_ms"`
	Relay       int32          `json:"relay"` // instance number
	Status      *int           `json:"status"`
	Outcome     policy.Outcome `json:"outcome"`
	Reason      policy.Reason  `json:"reason"`
	Error       *string        `json:"error"`
}

// Head is the delivery of an ordering key that the later ones wait for.
type Head struct {
	Delivery
	// Behind counts what waits for it, up to 10,001.
	Behind int64 `json:"behind"`
}

// An EventReport is what the outbox holds of one event. It has no deliveries if the trigger did not run.
type EventReport struct {
	Event      Event      `json:"event"`
	Deliveries []Delivery `json:"deliveries"`
	Attempts   []Attempt  `json:"attempts"`
	Waits      []Wait     `json:"waits"`
}

// Event returns an event, also an archived one, its deliveries, its logged attempts, and why it waits. Its payload is read only if
// payload is true. The error wraps [ErrUnknownEvent] if there is none.
func (o *Outbox) Event(ctx context.Context, id int64, payload bool) (e EventReport, err error) {
	if e.Event, e.Deliveries, err = o.event(ctx, id, payload); err != nil {
		return EventReport{}, err
	}
	if e.Attempts, err = o.Attempts(ctx, id); err != nil {
		return EventReport{}, err
	}
	if e.Waits, err = o.Waits(ctx, id); err != nil {
		return EventReport{}, err
	}
	return e, nil
}
