package routes

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

// A ParkedRange is a part of the events that was searched for parked deliveries.
type ParkedRange struct {
	After, Reached int64 // ids of events: behind the first, up to the second
	Released       int   // deliveries that got a destination
}

const selectLatestEvent = `SELECT coalesce((SELECT id FROM outbox ORDER BY id DESC LIMIT 1), 0)`

func latestEvent(ctx context.Context, db pg.DB) (id int64, err error) {
	return pg.Value[int64](ctx, db, "read the latest event", selectLatestEvent)
}

// Locked first: a relay that adds a route of one of these meanwhile waits, and then begins the pass
// again. What another one begins has not been searched here, and does not move. Without anything
// parked, the whole range is done.
const lockParkedSearch = `
SELECT coalesce(min(f.parked_after), $1), coalesce(array_agg(f.destination), '{}'), EXISTS (SELECT FROM outbox_delivery WHERE destination = '' AND status = 'pending')
FROM (SELECT destination, parked_after FROM outbox_destination WHERE parked_after IS NOT NULL ORDER BY destination FOR UPDATE) f`

const releaseParked = `SELECT outbox_release_parked($1::bigint, $2::bigint)`

const advanceParkedSearch = `UPDATE outbox_destination SET parked_after = $2 WHERE parked_after >= $1 AND parked_after < $2 AND destination = ANY ($3)`

// ReleaseParked gives parked deliveries of the next events, at most step of them and none behind
// latest, to the destinations that they now have. The next events are those behind where relays
// have come.
func ReleaseParked(ctx context.Context, db pg.Pool, step, latest int64) (r ParkedRange, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		var searched []string
		var parked bool
		if err := tx.QueryRow(ctx, lockParkedSearch, latest).Scan(&r.After, &searched, &parked); err != nil {
			return err
		}
		r.Reached = latest
		if parked {
			r.Reached = min(r.After+step, latest)
			if err := tx.QueryRow(ctx, releaseParked, r.After, r.Reached).Scan(&r.Released); err != nil {
				return err
			}
		}
		_, err := tx.Exec(ctx, advanceParkedSearch, r.After, r.Reached, searched)
		return err
	})
	if err != nil {
		return ParkedRange{}, fmt.Errorf("release parked deliveries: %w", pg.WithRoleHint(err))
	}
	return r, nil
}

const clearParkedSearch = `UPDATE outbox_destination SET parked_after = NULL WHERE parked_after >= $1`

// endParkedSearch says that nothing parked up to an event, the latest, has a route.
func endParkedSearch(ctx context.Context, db pg.DB, latest int64) error {
	return pg.Exec(ctx, db, "end looking through parked deliveries", clearParkedSearch, latest)
}

const beginParkedSearch = `
UPDATE outbox_destination d SET parked_after = 0
WHERE d.parked_after IS NULL AND EXISTS (SELECT FROM outbox_route r WHERE r.destination = d.destination)
  AND EXISTS (SELECT FROM outbox_delivery WHERE destination = '' AND status = 'pending')`

// BeginParkedSearch makes relays search everything parked again: a relay may have parked an event
// long after its route was added.
func BeginParkedSearch(ctx context.Context, db pg.DB) error {
	return pg.Exec(ctx, db, "begin looking through parked deliveries", beginParkedSearch)
}
