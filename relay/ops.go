package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/migrations"
)

// Ops answers what operators ask of an outbox. It is safe for concurrent use.
type Ops struct {
	pool *pgxpool.Pool
}

// NewOps returns an Ops over pool, whose search_path must lead to the outbox tables. The caller keeps the pool.
func NewOps(pool *pgxpool.Pool) *Ops { return &Ops{pool: pool} }

// Status is what stands in an outbox at one moment.
type Status struct {
	Destinations []DestinationStatus `json:"destinations"`
	// Parked deliveries match no route; they wait for one.
	Parked int64         `json:"parked"`
	Relays []RelayStatus `json:"relays"`
	Alerts []Alert       `json:"alerts"`
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
}

// RelayStatus is one registered relay.
type RelayStatus struct {
	Instance  int32     `json:"instance"`
	Name      string    `json:"name"`
	Version   string    `json:"version"`
	StartedAt time.Time `json:"started_at"`
	// HeartbeatAgeSeconds since the relay last said that it lives; it does so every second.
	HeartbeatAgeSeconds float64 `json:"heartbeat_age_seconds"`
	Idle                bool    `json:"idle"`
}

// Status counts the outbox. It reads every pending and failed row's index entry, so its cost grows with the backlog,
// not with what was delivered.
func (o *Ops) Status(ctx context.Context) (Status, error) {
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

// ErrSchema says that the database's schema is not the one this build works with.
var ErrSchema = errors.New("schema mismatch")

// CheckSchema returns nil if the outbox schema has exactly the version this build knows, an error wrapping [ErrSchema]
// that says what to do if not, and any other error if that could not be found out.
func (o *Ops) CheckSchema(ctx context.Context) error {
	version, err := schemaVersion(ctx, o.pool)
	want := migrations.Outbox.Latest()
	var pgErr *pgconn.PgError
	switch {
	case errors.As(err, &pgErr) && pgErr.Code == "42P01": // undefined_table
		return fmt.Errorf("%w: there is no outbox schema here (version %d is needed); run: outbox-relay migrate up", ErrSchema, want)
	case err != nil:
		return fmt.Errorf("read schema version: %w", err)
	case version < want:
		return fmt.Errorf("%w: the database has version %d, this build needs %d; run: outbox-relay migrate up", ErrSchema, version, want)
	case version > want:
		return fmt.Errorf("%w: the database has version %d, this build knows %d; run a newer outbox-relay", ErrSchema, version, want)
	}
	return nil
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
	// Limit of how many are returned, the newest first. 0: 50.
	Limit int
}

// DeliveryInfo is one delivery with what identifies its event; never the payload.
type DeliveryInfo struct {
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
}

// Deliveries lists the deliveries that match the filter.
func (o *Ops) Deliveries(ctx context.Context, filter DeliveryFilter) ([]DeliveryInfo, error) {
	setDefault(&filter.Limit, 50)
	list, err := deliveries(ctx, o.pool, filter)
	if err != nil {
		return nil, fmt.Errorf("list deliveries: %w", err)
	}
	return list, nil
}

// LoggedAttempt is one line of the attempt log, which holds the attempts that did not deliver.
type LoggedAttempt struct {
	Destination string    `json:"destination"`
	Attempt     int       `json:"attempt"`
	StartedAt   time.Time `json:"started_at"`
	DurationMS  int       `json:"duration_ms"`
	Relay       int32     `json:"relay"` // instance number
	Status      *int      `json:"status"`
	Outcome     Outcome   `json:"outcome"`
	Reason      Reason    `json:"reason"`
	Error       *string   `json:"error"`
}

// Attempts returns what is logged of one event's attempts, oldest first.
func (o *Ops) Attempts(ctx context.Context, eventID int64) ([]LoggedAttempt, error) {
	list, err := loggedAttempts(ctx, o.pool, eventID)
	if err != nil {
		return nil, fmt.Errorf("list attempts: %w", err)
	}
	return list, nil
}
