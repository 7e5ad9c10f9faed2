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
