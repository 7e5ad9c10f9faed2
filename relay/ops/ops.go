package ops

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// Outbox answers what operators ask of an outbox. It is safe for concurrent use.
type Outbox struct {
	pool *pgxpool.Pool
}

// New returns an Outbox over pool, whose search_path must lead to the outbox tables. The caller keeps the pool.
func New(pool *pgxpool.Pool) *Outbox { return &Outbox{pool: pool} }

// Status is what stands in an outbox at one moment.
type Status struct {
	Destinations []DestinationStatus `json:"destinations"`
	// Parked deliveries match no route; they wait for one.
	Parked int64         `json:"parked"`
	Relays []RelayStatus `json:"relays"`
	Alerts []alert.Alert `json:"alerts"`
	// Quarantined says why relays do nothing on this database, see [identity.Report.Reason]; empty: they may work.
	Quarantined string `json:"quarantined,omitempty"`
}

// DestinationStatus counts the deliveries of one destination.
type DestinationStatus struct {
	Destination string `json:"destination"`
	// Pending is the backlog: everything that is neither delivered, failed nor discarded.
	Pending int64 `json:"pending"`
	// Due of the pending could be sent now.
	Due int64 `json:"due"`
	// InFlight of the pending are claimed by a relay.
	InFlight int64 `json:"in_flight"`
	// Retrying of the pending were attempted before.
	Retrying int64 `json:"retrying"`
	Failed   int64 `json:"failed"`
	// LagSeconds is the age of the oldest due delivery; 0 without one.
	LagSeconds   float64 `json:"lag_seconds"`
	Paused       bool    `json:"paused"`
	PausedReason string  `json:"paused_reason,omitempty"`
	// PausedAt is when; nil unless paused.
	PausedAt *time.Time `json:"paused_at,omitempty"`
	// Replays of the pending were made pending again by an operator.
	Replays int64 `json:"replays"`
	// BlockedKeys counts the ordering keys whose later deliveries wait behind a failed one. It looks at 10,000 of those.
	BlockedKeys int64 `json:"blocked_keys"`
	// BlockedSeconds is for how long the oldest of them has been blocked; 0 without one.
	BlockedSeconds float64 `json:"blocked_seconds"`
	// Routed: a route leads there. Nothing new arrives at a destination without.
	Routed bool `json:"routed"`
	// Breaker: closed; open, when the destination is down and its deliveries are held; half_open while one is tried.
	Breaker string `json:"breaker"`
	// BreakerOpenedAt is when the hold began; nil when closed.
	BreakerOpenedAt *time.Time `json:"breaker_opened_at,omitempty"`
	// BreakerSeconds until the next probe; not above 0 when it is due. 0 when closed.
	BreakerSeconds float64 `json:"breaker_seconds,omitempty"`
	// BreakerError is what the destination last answered to a probe, or what opened the breaker.
	BreakerError string `json:"breaker_error,omitempty"`
	// Served: a registered relay delivers there. What is pending for a destination without is unserved.
	Served bool `json:"served"`
}

// RelayStatus is one registered relay.
type RelayStatus struct {
	Instance  int32     `json:"instance"`
	Name      string    `json:"name"`
	Version   string    `json:"version"`
	StartedAt time.Time `json:"started_at"`
	// HeartbeatAgeSeconds since the relay last said that it lives; it writes that down every 4 to 6 seconds.
	HeartbeatAgeSeconds float64 `json:"heartbeat_age_seconds"`
	// Idle: nothing is claimed by it.
	Idle bool `json:"idle"`
	// Session: the relay has a connection of its own for as long as it lives. Without, behind a pooler, only its heartbeat
	// says that it lives.
	Session bool `json:"session"`
	// InFlight deliveries are claimed by it.
	InFlight int64 `json:"in_flight"`
	// Quarantined says why the relay does nothing here; empty: it works.
	Quarantined string `json:"quarantined,omitempty"`
	// Destinations that it serves, sorted.
	Destinations []string `json:"destinations"`
}

// Relays lists the registered relays; the dead among them are removed by the living within seconds.
func (o *Outbox) Relays(ctx context.Context) ([]RelayStatus, error) {
	list, err := relayStatus(ctx, o.pool)
	if err != nil {
		return nil, fmt.Errorf("list relays: %w", err)
	}
	return list, nil
}

// LifeSigns lists the registered relays as [Outbox.Relays] does, without Idle and InFlight. It costs the same whatever is
// pending, for health checks.
func (o *Outbox) LifeSigns(ctx context.Context) ([]RelayStatus, error) {
	list, err := lifeSigns(ctx, o.pool)
	if err != nil {
		return nil, fmt.Errorf("list relays: %w", err)
	}
	return list, nil
}

// Status counts the outbox. It reads every pending and failed row's index entry, so its cost grows with the backlog,
// not with what was delivered.
func (o *Outbox) Status(ctx context.Context) (Status, error) {
	var s Status
	err := pgx.BeginTxFunc(ctx, o.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		var err error
		if s.Destinations, s.Parked, err = destinationStatus(ctx, tx); err != nil {
			return err
		}
		if s.Relays, err = relayStatus(ctx, tx); err != nil {
			return err
		}
		s.Alerts, err = openAlerts(ctx, tx)
		return err
	})
	if err != nil {
		return Status{}, fmt.Errorf("read status: %w", err)
	}
	return s, nil
}

// CheckSchema returns nil if this build can work with the outbox schema, because it has the version this build knows or
// a later one that says so; an error wrapping [pg.ErrSchema] that says what to do if not, and any other error if that could
// not be found out.
func (o *Outbox) CheckSchema(ctx context.Context) error {
	_, err := pg.CheckSchema(ctx, o.pool)
	return err
}

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
	// Type is a pattern of event types, in which '*' stands for any characters. Empty: any.
	Type string
	// Since and Until bound when the event was created: Since <= created_at < Until. Zero: no bound.
	Since, Until time.Time
	// Reason of the last attempt. Empty: any.
	Reason string
	// OrderingKey of the event. Empty: any, also none.
	OrderingKey string
	// Limit of how many are returned, the newest first. 0: 50.
	Limit int
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
	// NotAfter is when the last request may reach the receiver, as it was told. nil: nothing binds it.
	NotAfter *time.Time `json:"not_after"`
}

// Now returns the time of the database, by which everything there is dated.
func (o *Outbox) Now(ctx context.Context) (time.Time, error) {
	now, err := databaseTime(ctx, o.pool)
	if err != nil {
		return time.Time{}, fmt.Errorf("read the database's time: %w", err)
	}
	return now, nil
}

// Deliveries lists the deliveries that match the filter.
func (o *Outbox) Deliveries(ctx context.Context, filter DeliveryFilter) ([]Delivery, error) {
	filter.Limit = cmp.Or(filter.Limit, 50)
	list, err := deliveries(ctx, o.pool, filter)
	if err != nil {
		return nil, fmt.Errorf("list deliveries: %w", err)
	}
	return list, nil
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

// Attempts returns what is logged of one event's attempts, oldest first.
func (o *Outbox) Attempts(ctx context.Context, eventID int64) ([]Attempt, error) {
	list, err := loggedAttempts(ctx, o.pool, eventID)
	if err != nil {
		return nil, fmt.Errorf("list attempts: %w", err)
	}
	return list, nil
}
