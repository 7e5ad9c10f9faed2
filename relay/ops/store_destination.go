package ops

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/relay/pg"
)

// From one name to the next in the index of each status, instead of through all that is pending or failed.
const selectDestinationNames = `
WITH RECURSIVE pending (destination) AS (
    (SELECT destination FROM outbox_delivery WHERE status = 'pending' ORDER BY destination LIMIT 1)
    UNION ALL
    SELECT (SELECT d.destination FROM outbox_delivery d
            WHERE d.status = 'pending' AND d.destination > p.destination ORDER BY d.destination LIMIT 1)
    FROM pending p WHERE p.destination IS NOT NULL
), failed (destination) AS (
    (SELECT destination FROM outbox_delivery WHERE status = 'failed' ORDER BY destination LIMIT 1)
    UNION ALL
    SELECT (SELECT d.destination FROM outbox_delivery d
            WHERE d.status = 'failed' AND d.destination > f.destination ORDER BY d.destination LIMIT 1)
    FROM failed f WHERE f.destination IS NOT NULL
)
SELECT destination FROM (
    SELECT destination FROM outbox_route
    UNION SELECT destination FROM outbox_relay_destination
    UNION SELECT destination FROM outbox_destination
    UNION SELECT destination FROM pending
    UNION SELECT destination FROM failed
) known
WHERE destination <> '' ORDER BY destination`

func destinationNames(ctx context.Context, q pg.DB) ([]string, error) {
	rows, err := q.Query(ctx, selectDestinationNames)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

const selectPause = `
SELECT paused, coalesce(paused_reason, ''), breaker FROM outbox_destination WHERE destination = $1 FOR UPDATE`

const upsertPause = `
INSERT INTO outbox_destination (destination, paused, paused_reason, paused_at) VALUES ($1, true, nullif($2, ''), now())
ON CONFLICT (destination) DO UPDATE
SET paused = true, paused_reason = coalesce(excluded.paused_reason, outbox_destination.paused_reason),
    paused_at = coalesce(outbox_destination.paused_at, excluded.paused_at)
RETURNING coalesce(paused_reason, ''), breaker`

// pauseDestination pauses a destination durably, and says what it was before.
func pauseDestination(ctx context.Context, pool *pgxpool.Pool, destination, reason string) (p Pause, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	p.Destination, p.Paused = destination, true
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		before, err := lockPause(ctx, tx, destination)
		if err != nil {
			return err
		}
		p.Changed = !before.Paused
		return tx.QueryRow(ctx, upsertPause, destination, reason).Scan(&p.Reason, &p.Breaker)
	})
	return p, err
}

// lockPause returns the state of a destination and keeps it; the zero state if there is none.
func lockPause(ctx context.Context, tx pgx.Tx, destination string) (p Pause, err error) {
	if _, err := tx.Exec(ctx, pg.CommitDurably); err != nil {
		return p, err
	}
	rows, err := tx.Query(ctx, selectPause, destination)
	if err != nil {
		return p, err
	}
	p.Breaker = "closed"
	_, err = pgx.ForEachRow(rows, []any{&p.Paused, &p.Reason, &p.Breaker}, func() error { return nil })
	return p, err
}

const endPause = `UPDATE outbox_destination SET paused = false, paused_reason = NULL, paused_at = NULL WHERE destination = $1`

const resetBreaker = `
WITH closed AS (
    UPDATE outbox_destination
    SET breaker = 'closed', breaker_opened_at = NULL, breaker_until = NULL, breaker_owner = NULL, breaker_probes = 0,
        breaker_error = NULL
    WHERE destination = $1 AND breaker <> 'closed'
    RETURNING destination
)
UPDATE outbox_alert SET resolved_at = now()
FROM closed WHERE rule = 'breaker_open' AND subject = closed.destination AND resolved_at IS NULL`

// resumeDestination ends a pause and, if it is to, closes the breaker.
func resumeDestination(ctx context.Context, pool *pgxpool.Pool, destination string, reset bool) (p Pause, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if p, err = lockPause(ctx, tx, destination); err != nil {
			return err
		}
		p.Destination, p.Changed, p.Paused = destination, p.Paused, false
		if _, err := tx.Exec(ctx, endPause, destination); err != nil {
			return err
		}
		if !reset || p.Breaker == "closed" {
			return nil
		}
		p.Breaker, p.BreakerReset = "closed", true
		_, err := tx.Exec(ctx, resetBreaker, destination)
		return err
	})
	return p, err
}
