package ops

import (
	"context"

	"github.com/outbox-relay/outbox-relay/relay/pg"
)

const selectUndelivered = `
SELECT coalesce(max(e.id), $1), count(*), count(*) FILTER (WHERE e.missing), coalesce(min(e.id) FILTER (WHERE e.missing), 0)
FROM (SELECT o.id, NOT EXISTS (SELECT FROM outbox_delivery d WHERE d.event_id = o.id) AS missing
      FROM (SELECT id FROM outbox WHERE id > $1 ORDER BY id LIMIT $2) o) e`

// undeliveredBehind looks at the next events behind an id.
func undeliveredBehind(ctx context.Context, q pg.DB, after int64, batch int) (last int64, looked int, u Undelivered, err error) {
	err = q.QueryRow(ctx, selectUndelivered, after, batch).Scan(&last, &looked, &u.Events, &u.FirstEventID)
	return last, looked, u, err
}

const createDeliveries = `SELECT last_id, finished, events, deliveries FROM outbox_create_deliveries($1, $2)`

// createDeliveriesBehind gives the next events behind an id their deliveries, if they have none.
func createDeliveriesBehind(ctx context.Context, q pg.DB, after int64, batch int) (last int64, finished bool, c CreatedDeliveries, err error) {
	err = q.QueryRow(ctx, createDeliveries, after, batch).Scan(&last, &finished, &c.Events, &c.Deliveries)
	return last, finished, c, err
}
