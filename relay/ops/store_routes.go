package ops

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/relay/pg"
)

const selectRouteStatus = `
SELECT r.pattern, r.destination,
       (SELECT count(*) FROM (SELECT FROM outbox_delivery d
                              WHERE d.status = 'pending' AND d.destination = r.destination LIMIT 10001) pending),
       (SELECT coalesce(jsonb_agg(jsonb_build_object('instance', n.instance, 'name', n.name) ORDER BY n.instance), '[]')
        FROM outbox_relay_route o JOIN outbox_relay n USING (instance)
        WHERE o.pattern = r.pattern AND o.destination = r.destination)
FROM outbox_route r
WHERE ($1 = '' OR $1 LIKE r.like_pattern)
ORDER BY r.pattern, r.destination`

// routeStatus returns all routes.
func routeStatus(ctx context.Context, q pg.DB) ([]RouteStatus, error) { return routesOf(ctx, q, "") }

// routesOf returns the routes that an event type takes; all of them for the empty one, which no event has.
func routesOf(ctx context.Context, q pg.DB, eventType string) ([]RouteStatus, error) {
	rows, err := q.Query(ctx, selectRouteStatus, eventType)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[RouteStatus])
}
