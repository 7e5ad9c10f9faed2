package relay

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/relay/pg"
)

// A parkedRange is a part of the events that was looked through for parked deliveries.
type parkedRange struct {
	after, reached int64
	released       int
}

// Locked first: a relay that adds a route meanwhile waits, and then begins the pass anew. Without anything parked, the whole
// range is done.
const lockParkedSearch = `
SELECT coalesce(min(f.parked_after), $1), EXISTS (SELECT FROM outbox_delivery WHERE destination = '' AND status = 'pending')
FROM (SELECT parked_after FROM outbox_destination WHERE parked_after IS NOT NULL ORDER BY destination FOR UPDATE) f`

// A relay has no right to insert or delete a delivery.
const releaseParked = `SELECT outbox_release_parked($1::bigint, $2::bigint)`

const advanceParkedSearch = `UPDATE outbox_destination SET parked_after = $2 WHERE parked_after >= $1 AND parked_after < $2`

// releaseParked gives parked deliveries of the next events, at most step of them and none behind latest, to the destinations
// that they now have. The next events are those behind where relays have come or, once more, behind from.
func (s *store) releaseParked(ctx context.Context, step, latest int64, from *int64) (r parkedRange, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		var parked bool
		if err := tx.QueryRow(ctx, lockParkedSearch, latest).Scan(&r.after, &parked); err != nil {
			return err
		}
		if from != nil {
			r.after = *from
		}
		r.reached = latest
		if parked {
			r.reached = min(r.after+step, latest)
			if err := tx.QueryRow(ctx, releaseParked, r.after, r.reached).Scan(&r.released); err != nil {
				return err
			}
		}
		if from != nil {
			return nil
		}
		_, err := tx.Exec(ctx, advanceParkedSearch, r.after, r.reached)
		return err
	})
	if err != nil {
		return parkedRange{}, fmt.Errorf("release parked deliveries: %w", pg.WithRoleHint(err))
	}
	return r, nil
}

const endParkedSearch = `UPDATE outbox_destination SET parked_after = NULL WHERE parked_after >= $1`

// endParkedSearch says that nothing parked up to an event, the latest, has a route.
func (s *store) endParkedSearch(ctx context.Context, latest int64) error {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	if _, err := s.pool.Exec(ctx, endParkedSearch, latest); err != nil {
		return fmt.Errorf("end looking through parked deliveries: %w", err)
	}
	return nil
}

const beginParkedSearch = `
UPDATE outbox_destination d SET parked_after = 0
WHERE d.parked_after IS NULL AND EXISTS (SELECT FROM outbox_route r WHERE r.destination = d.destination)
  AND EXISTS (SELECT FROM outbox_delivery WHERE destination = '' AND status = 'pending')`

// beginParkedSearch makes relays look through everything parked again: a transaction with an old snapshot may have parked an event
// long after its route was added.
func (s *store) beginParkedSearch(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	if _, err := s.pool.Exec(ctx, beginParkedSearch); err != nil {
		return fmt.Errorf("begin looking through parked deliveries: %w", err)
	}
	return nil
}
