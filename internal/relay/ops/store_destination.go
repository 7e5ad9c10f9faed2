package ops

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// ErrUnknownDestination says that the database does not know a destination: no route, no state, and
// no pending or failed delivery has its name.
var ErrUnknownDestination = errors.New("unknown destination")

// A Pause is what Pause and Resume found and did.
type Pause struct {
	Destination string `json:"destination"`
	// Paused reports whether it is paused now.
	Paused bool `json:"paused"`
	// Changed reports whether this call paused or resumed it; false: it was so before.
	Changed bool `json:"changed"`
	// Reason of the pause, or of the one that ended.
	Reason string `json:"paused_reason,omitempty"`
	// ReasonChanged reports whether this call gave a pause that lasts another reason.
	ReasonChanged bool `json:"reason_changed,omitempty"`
	// Breaker is its state now, as in [DestinationStatus].
	Breaker string `json:"breaker"`
	// BreakerReset reports whether this call closed the breaker.
	BreakerReset bool `json:"breaker_reset"`
	// WaitEnded reports whether this call ended a wait that the destination had asked for.
	WaitEnded bool `json:"wait_ended"`
}

// knownDestinations is the part of a WITH RECURSIVE that finds the destinations which the database
// knows. It goes from one name to the next in the index of each status, instead of through
// everything that is pending or failed.
const knownDestinations = pg.Pending + `, ` + knownWithPending

// knownWithPending is what follows the part that finds the destinations of pending deliveries.
const knownWithPending = `failed (destination) AS (
    (SELECT destination FROM outbox_delivery WHERE status = 'failed' ORDER BY destination LIMIT 1)
    UNION ALL
    SELECT (SELECT d.destination FROM outbox_delivery d
            WHERE d.status = 'failed' AND d.destination > f.destination ORDER BY d.destination LIMIT 1)
    FROM failed f WHERE f.destination IS NOT NULL
), known AS MATERIALIZED (
    SELECT destination FROM outbox_route
    UNION SELECT destination FROM outbox_relay_destination
    UNION SELECT destination FROM outbox_destination
    UNION SELECT destination FROM pending
    UNION SELECT destination FROM failed
)`

const selectDestinationNames = `
WITH RECURSIVE ` + knownDestinations + `
SELECT destination FROM known WHERE destination <> '' ORDER BY destination`

// Destinations returns the names that the database knows, sorted: those of its routes, of the state
// of destinations, and of deliveries that are pending or failed. It costs a few index lookups for
// each name.
func (o *Outbox) Destinations(ctx context.Context) ([]string, error) {
	return rows.Values[string](ctx, o.pool, "list destinations", selectDestinationNames)
}

const selectPause = `
SELECT paused, coalesce(paused_reason, ''), breaker FROM outbox_destination WHERE destination = $1 FOR UPDATE`

// change runs f in a durable transaction that holds the state of a destination. f gets that state
// and makes it the new one.
func (o *Outbox) change(ctx context.Context, verb, destination string, f func(context.Context, pgx.Tx, *Pause) error) (p Pause, err error) {
	names, err := o.Destinations(ctx)
	if err != nil {
		return Pause{}, err
	}
	if !slices.Contains(names, destination) {
		return Pause{}, fmt.Errorf("%w %q", ErrUnknownDestination, destination)
	}
	err = o.durably(ctx, func(ctx context.Context, tx pgx.Tx) error {
		p = Pause{Destination: destination, Breaker: "closed"} // unless it has a row
		err := tx.QueryRow(ctx, selectPause, destination).Scan(&p.Paused, &p.Reason, &p.Breaker)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
		if err := f(ctx, tx, &p); err != nil {
			return err
		}
		return o.recordChange(ctx, tx, verb, p)
	})
	if err != nil {
		return Pause{}, fmt.Errorf("%s %s: %w", verb, destination, err)
	}
	return p, nil
}

// recordChange writes what a call changed of a destination into the audit.
func (o *Outbox) recordChange(ctx context.Context, tx pgx.Tx, verb string, p Pause) error {
	if p.Changed || p.ReasonChanged {
		if err := o.record(ctx, tx, auditRow{action: verb, destination: p.Destination, detail: p.Reason}); err != nil {
			return err
		}
	}
	if p.BreakerReset || p.WaitEnded {
		return o.record(ctx, tx, auditRow{action: "reset_breaker", destination: p.Destination})
	}
	return nil
}

const upsertPause = `
INSERT INTO outbox_destination (destination, paused, paused_reason, paused_at) VALUES ($1, true, nullif($2, ''), now())
ON CONFLICT (destination) DO UPDATE
SET paused = true, paused_reason = coalesce(excluded.paused_reason, outbox_destination.paused_reason),
    paused_at = coalesce(outbox_destination.paused_at, excluded.paused_at)
RETURNING coalesce(paused_reason, ''), breaker`

// Pause keeps relays from claiming for a destination, from their next claim on; what is in flight
// finishes. A reason replaces that of an earlier pause, an empty one does not. The error wraps
// [ErrUnknownDestination] for a name that the database does not know, so that a misspelt pause is
// not taken for one.
func (o *Outbox) Pause(ctx context.Context, destination, reason string) (Pause, error) {
	reason = plain.Clip(reason)
	return o.change(ctx, "pause", destination, func(ctx context.Context, tx pgx.Tx, p *Pause) error {
		before := p.Reason
		p.Changed, p.Paused = !p.Paused, true
		err := tx.QueryRow(ctx, upsertPause, destination, reason).Scan(&p.Reason, &p.Breaker)
		p.ReasonChanged = !p.Changed && p.Reason != before
		return err
	})
}

const endPause = `UPDATE outbox_destination SET paused = false, paused_reason = NULL, paused_at = NULL WHERE destination = $1 AND paused`

// The alert stays: nothing says yet that the destination works. If its breaker stays closed for a
// minute, or ten seconds where nothing waits, relays end the alert as of this time.
const resetBreaker = `
WITH closed AS (
    UPDATE outbox_destination
    SET breaker = 'closed', breaker_opened_at = NULL, breaker_until = NULL, breaker_relay_id = NULL, breaker_probes = 0,
        breaker_error = NULL
    WHERE destination = $1 AND breaker <> 'closed'
    RETURNING destination
)
UPDATE outbox_alert SET last_at = now()
FROM closed WHERE rule = 'breaker_open' AND subject = closed.destination AND resolved_at IS NULL`

// Each relay sees it at its next beat.
const endWaits = `UPDATE outbox_relay_destination SET wait_until = '-infinity' WHERE destination = $1 AND wait_until > now()`

// Resume ends a pause. An open breaker stays open unless reset is true, and a wait that the
// destination has asked for (Retry-After) lasts: then what is due is sent, at the risk that the
// destination is still down. The error wraps [ErrUnknownDestination] as that of Pause does.
func (o *Outbox) Resume(ctx context.Context, destination string, reset bool) (Pause, error) {
	return o.resume(ctx, destination, true, reset)
}

// ResetBreaker closes the breaker of a destination, and ends its wait, as Resume does. A pause
// stays.
func (o *Outbox) ResetBreaker(ctx context.Context, destination string) (Pause, error) {
	return o.resume(ctx, destination, false, true)
}

func (o *Outbox) resume(ctx context.Context, destination string, pause, reset bool) (Pause, error) {
	p, err := o.change(ctx, "resume", destination, func(ctx context.Context, tx pgx.Tx, p *Pause) error {
		if pause {
			ended, err := tx.Exec(ctx, endPause, destination) // also a pause of this moment, which was not there to be locked
			if p.Changed, p.Paused = ended.RowsAffected() > 0, false; err != nil {
				return err
			}
		}
		if !reset {
			return nil
		}
		ended, err := tx.Exec(ctx, endWaits, destination)
		if p.WaitEnded = ended.RowsAffected() > 0; err != nil || p.Breaker == "closed" {
			return err
		}
		p.Breaker, p.BreakerReset = "closed", true
		_, err = tx.Exec(ctx, resetBreaker, destination)
		return err
	})
	if p.Changed || p.BreakerReset {
		err = o.requestSweep(ctx)
	}
	return p, err
}
