package ops

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
)

// createBatch is how many events one transaction looks at.
const createBatch = 5_000

// Undelivered counts events without deliveries that no relay will make any for.
type Undelivered struct {
	Events int64 `json:"events"`
	// FirstEventID is the lowest of them; 0 without any.
	FirstEventID int64 `json:"first_event_id,string"`
}

const selectUndelivered = `
WITH settled AS MATERIALIZED (` + intake.SettledSnapshot + `)
SELECT coalesce(max(e.id), $1), count(*), count(*) FILTER (WHERE e.missing), coalesce(min(e.id) FILTER (WHERE e.missing), 0)
FROM (SELECT o.id, pg_visible_in_snapshot(o.xid, (SELECT snapshot FROM settled))
             AND NOT EXISTS (SELECT FROM outbox_delivery d WHERE d.event_id = o.id) AS missing
      FROM (SELECT id, xid FROM outbox WHERE id > $1 ORDER BY id LIMIT $2) o) e`

// Undelivered looks for events without deliveries among all events, in batches. It does not count
// archived events.
func (o *Outbox) Undelivered(ctx context.Context) (all Undelivered, err error) {
	for after, looked := int64(0), createBatch; looked == createBatch; {
		var found Undelivered
		err := o.pool.QueryRow(ctx, selectUndelivered, after, createBatch).Scan(&after, &looked, &found.Events, &found.FirstEventID)
		if err != nil {
			return all, fmt.Errorf("look for events without deliveries: %w", err)
		}
		if all.Events == 0 {
			all.FirstEventID = found.FirstEventID
		}
		all.Events += found.Events
	}
	return all, nil
}

// CreatedDeliveries counts what CreateDeliveries did.
type CreatedDeliveries struct {
	Events     int64 `json:"events"`
	Deliveries int64 `json:"deliveries"`
}

const createDeliveries = `SELECT last_id, finished, events, deliveries FROM outbox_create_deliveries($1::bigint, $2::integer)`

// CreateDeliveries gives every event without deliveries those that its type has by the stored
// routes, or a parked one. It leaves events alone that have a delivery, or are not routed yet, so
// it can be repeated. It works in batches, each a transaction; with an error, also that of ctx, the
// result says what was done.
func (o *Outbox) CreateDeliveries(ctx context.Context) (CreatedDeliveries, error) {
	var all CreatedDeliveries
	err := o.Recorded(ctx, "create_deliveries", func(audit int64) (_ int64, _ string, err error) {
		all, err = o.createDeliveries(ctx, createBatch, audit)
		return 0, "", err
	})
	return all, err
}

func (o *Outbox) createDeliveries(ctx context.Context, batch int, audit int64) (all CreatedDeliveries, err error) {
	for after, finished := int64(0), false; !finished; {
		var created CreatedDeliveries
		err := o.durably(ctx, func(ctx context.Context, tx pgx.Tx) error {
			if err := tx.QueryRow(ctx, createDeliveries, after, batch).Scan(&after, &finished, &created.Events, &created.Deliveries); err != nil {
				return err
			}
			return growAuditBy(ctx, tx, audit, created.Deliveries)
		})
		if err != nil {
			return all, fmt.Errorf("create deliveries: %w", err)
		}
		all.Events += created.Events
		all.Deliveries += created.Deliveries
	}
	return all, nil
}
