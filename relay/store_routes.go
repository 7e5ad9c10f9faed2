package relay

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// routeRow is one line of outbox_route.
type routeRow struct {
	Pattern     string
	Destination string
}

const waitForLocks = `SET LOCAL lock_timeout = 0`

const lockRoutes = `LOCK TABLE outbox_route IN SHARE ROW EXCLUSIVE MODE`

const selectRoutes = `SELECT pattern, destination FROM outbox_route`

// routes returns the stored routes.
func (s *store) routes(ctx context.Context) (map[routeRow]bool, error) {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	rows, err := s.pool.Query(ctx, selectRoutes)
	if err != nil {
		return nil, fmt.Errorf("read routes: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[routeRow])
	if err != nil {
		return nil, fmt.Errorf("read routes: %w", err)
	}
	stored := make(map[routeRow]bool, len(list))
	for _, route := range list {
		stored[route] = true
	}
	return stored, nil
}

const deleteRoutes = `
DELETE FROM outbox_route WHERE (pattern, destination) IN (SELECT * FROM unnest($1::text[], $2::text[]))`

const insertRoutes = `
INSERT INTO outbox_route (pattern, destination) SELECT * FROM unnest($1::text[], $2::text[])`

// syncRoutes makes the stored routes equal to wanted and returns what changed; nothing if check, which may be nil, finds
// that it must not be. Producers go on meanwhile: the lock only keeps other relays from doing the same.
func (s *store) syncRoutes(ctx context.Context, wanted map[routeRow]bool, check func(context.Context, querier) error) (added, removed []routeRow, err error) {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		// Without its routes, every new event would be parked.
		if _, err := tx.Exec(ctx, commitDurably); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, waitForLocks); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, lockRoutes); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, selectRoutes)
		if err != nil {
			return err
		}
		stored, err := pgx.CollectRows(rows, pgx.RowToStructByPos[routeRow])
		if err != nil {
			return err
		}
		missing := make(map[routeRow]bool, len(wanted))
		for route := range wanted {
			missing[route] = true
		}
		for _, route := range stored {
			if wanted[route] {
				delete(missing, route)
				continue
			}
			removed = append(removed, route)
		}
		for route := range missing {
			added = append(added, route)
		}
		if patterns, destinations := columns(removed); len(patterns) > 0 {
			if _, err := tx.Exec(ctx, deleteRoutes, patterns, destinations); err != nil {
				return err
			}
		}
		if patterns, destinations := columns(added); len(patterns) > 0 {
			if _, err := tx.Exec(ctx, insertRoutes, patterns, destinations); err != nil {
				return err
			}
		}
		if check != nil {
			return check(ctx, tx)
		}
		return nil
	})
	switch {
	case errors.Is(err, ErrUnserved):
		return nil, nil, err
	case err != nil:
		return nil, nil, fmt.Errorf("synchronise routes: %w", err)
	}
	return added, removed, nil
}

func columns(routes []routeRow) (patterns, destinations []string) {
	for _, route := range routes {
		patterns, destinations = append(patterns, route.Pattern), append(destinations, route.Destination)
	}
	return patterns, destinations
}
