package routes

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// A routing is what one relay records of its configuration.
type routing struct {
	instance     int32
	destinations []string
	routes       map[Row]bool // empty: the relay is stopping and withdraws them
}

// A Change is what one synchronisation found and left in outbox_route.
type Change struct {
	before, after map[Row]bool

	Added, Removed []Row
}

const waitForLocks = `SET LOCAL lock_timeout = 0`

const waitBriefly = `SET LOCAL lock_timeout = 2000`

const lockRoutes = `LOCK TABLE outbox_route IN SHARE ROW EXCLUSIVE MODE`

// syncRoutes records what this relay is configured for, unless own is nil, and makes the stored routes those of all
// registered relays together. While no relay has recorded any, they stay: producers go on while all relays are away.
// describe words the alert about the change for the relays that did not make it. Producers never wait: the lock only
// orders relays that do the same.
func syncRoutes(ctx context.Context, db pg.Pool, own *routing, describe func(Change) string) (change Change, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		wait := waitBriefly
		if own != nil && len(own.routes) > 0 {
			if err := keepRegistered(ctx, tx, own.instance); err != nil {
				return err
			}
			wait = waitForLocks
		}
		// Durably: without its routes, every new event would be parked.
		for _, statement := range []string{pg.CommitDurably, wait, lockRoutes} {
			if _, err := tx.Exec(ctx, statement); err != nil {
				return err
			}
		}
		if own != nil {
			if err := recordRouting(ctx, tx, own); err != nil {
				return err
			}
		}
		change, err = uniteRoutes(ctx, tx)
		if err != nil || len(change.Added)+len(change.Removed) == 0 {
			return err
		}
		return announceRoutes(ctx, tx, describe(change), own == nil && len(change.Added) > 0)
	})
	if err != nil {
		return Change{}, fmt.Errorf("synchronise routes: %w", err)
	}
	return change, nil
}

const lockOwnRelay = `SELECT FROM outbox_relay WHERE instance = $1 FOR KEY SHARE`

// keepRegistered keeps this relay's row until the transaction ends. It comes before the lock on the routes, or a rescue
// that removes the row could wait for this transaction and this transaction for the rescue.
func keepRegistered(ctx context.Context, tx pgx.Tx, instance int32) error {
	tag, err := tx.Exec(ctx, lockOwnRelay, instance)
	if err == nil && tag.RowsAffected() == 0 {
		err = pg.ErrTakenForDead
	}
	return err
}

const recordDestinations = `
WITH dropped AS (DELETE FROM outbox_relay_destination WHERE instance = $1 AND destination <> ALL ($2::text[]))
INSERT INTO outbox_relay_destination (instance, destination) SELECT $1, unnest($2::text[]) ON CONFLICT DO NOTHING`

const recordRoutes = `
WITH own AS MATERIALIZED (
    SELECT * FROM unnest($2::text[], $3::text[]) AS o (pattern, destination)
), dropped AS (
    DELETE FROM outbox_relay_route WHERE instance = $1 AND (pattern, destination) NOT IN (SELECT pattern, destination FROM own)
)
INSERT INTO outbox_relay_route (instance, pattern, destination) SELECT $1, pattern, destination FROM own ON CONFLICT DO NOTHING`

// recordRouting writes what a relay serves and where it routes, instead of what it wrote before.
func recordRouting(ctx context.Context, tx pgx.Tx, own *routing) error {
	if len(own.routes) > 0 {
		if _, err := tx.Exec(ctx, recordDestinations, own.instance, own.destinations); err != nil {
			return err
		}
	}
	patterns, destinations := make([]string, 0, len(own.routes)), make([]string, 0, len(own.routes))
	for route := range own.routes {
		patterns, destinations = append(patterns, route.Pattern), append(destinations, route.Destination)
	}
	_, err := tx.Exec(ctx, recordRoutes, own.instance, patterns, destinations)
	return err
}

const selectRoutes = `SELECT pattern, destination FROM outbox_route`

const removeRoutes = `
DELETE FROM outbox_route t
WHERE EXISTS (SELECT FROM outbox_relay_route)
  AND NOT EXISTS (SELECT FROM outbox_relay_route o WHERE o.pattern = t.pattern AND o.destination = t.destination)
RETURNING t.pattern, t.destination`

// The only statement that adds routes.
const addRoutes = `
INSERT INTO outbox_route (pattern, destination)
SELECT DISTINCT o.pattern, o.destination FROM outbox_relay_route o
WHERE NOT EXISTS (SELECT FROM outbox_route t WHERE t.pattern = o.pattern AND t.destination = o.destination)
RETURNING pattern, destination`

// uniteRoutes makes the stored routes the union of what the registered relays have recorded.
func uniteRoutes(ctx context.Context, tx pgx.Tx) (change Change, err error) {
	stored, err := queryRoutes(ctx, tx, selectRoutes)
	if err != nil {
		return Change{}, err
	}
	if change.Removed, err = queryRoutes(ctx, tx, removeRoutes); err != nil {
		return Change{}, err
	}
	if change.Added, err = queryRoutes(ctx, tx, addRoutes); err != nil {
		return Change{}, err
	}
	change.before, change.after = map[Row]bool{}, map[Row]bool{}
	for _, route := range stored {
		change.before[route], change.after[route] = true, true
	}
	for _, route := range change.Removed {
		delete(change.after, route)
	}
	for _, route := range change.Added {
		change.after[route] = true
	}
	return change, nil
}

func queryRoutes(ctx context.Context, q pg.DB, statement string) ([]Row, error) {
	rows, err := q.Query(ctx, statement)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[Row])
}

// The alert is for the relays that did not make the change, and does not fire when all of them wanted it.
const fireRoutesChanged = `
INSERT INTO outbox_alert AS a (rule, subject, detail)
SELECT 'routes_changed', current_database(), $1 WHERE $2 OR ` + pg.RelaysDisagree + `
ON CONFLICT (rule, subject) DO UPDATE SET count = a.count + 1, last_at = now(), detail = excluded.detail`

// The others compare their routes at once instead of at their next look.
const notifyRoutes = `SELECT pg_notify('outbox_wake', 'routes ' || current_schema()) WHERE ` + pg.QueueHasRoom

// announceRoutes alerts of changed routes if relays disagree about them, or if always, and wakes the other relays.
func announceRoutes(ctx context.Context, tx pgx.Tx, detail string, always bool) error {
	if _, err := tx.Exec(ctx, fireRoutesChanged, detail, always); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, notifyRoutes)
	return err
}

// unserved returns the destinations with pending deliveries that no registered relay serves.
func unserved(ctx context.Context, q pg.DB) ([]Unserved, error) {
	rows, err := q.Query(ctx, pg.Unserved)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[Unserved])
}

// An Unserved is one with pending deliveries that no registered relay serves.
type Unserved struct {
	Destination string `json:"destination"`
	Pending     int    `json:"pending"` // at most 10,001
}

// String returns the name and how many deliveries wait, at most "more than 10000".
func (u Unserved) String() string {
	return fmt.Sprintf("%s (%s)", u.Destination, plain.UpTo(u.Pending, 10_000))
}
