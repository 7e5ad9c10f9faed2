package intake

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

// A range whose row another session has locked is left to it: another rescue, or a settle of a
// relay that lives after all. So is one that another relay has taken over since the snapshot of
// this statement, which shows the old fence: that relay may have registered since, and seem dead.
const takeOverRange = `
WITH last AS MATERIALIZED (SELECT oldest_open_seq FROM outbox_range ORDER BY seq DESC LIMIT 1),
free AS MATERIALIZED (
    SELECT r.seq FROM last l CROSS JOIN LATERAL (
        SELECT o.seq FROM outbox_range o
        WHERE o.seq >= l.oldest_open_seq AND o.ended_at IS NULL
          AND CASE WHEN o.relay_id = $1::int THEN o.fence <> ALL ($2::bigint[])
                   ELSE NOT EXISTS (SELECT FROM outbox_relay a WHERE a.id = o.relay_id) END
          AND o.fence = (SELECT f.fence FROM outbox_range f WHERE f.seq = o.seq)
        ORDER BY o.seq LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED) r
)
UPDATE outbox_range SET relay_id = $1, fence = (greatest(fence, ` + fenceNow + `) | 1) + 1
WHERE seq = ANY (ARRAY (SELECT f.seq FROM free f))
RETURNING seq, fence, taken_at, extract(epoch FROM promised)::float8, ` + counts

// Events are found as the take has found them: a range that is a whole difference by xid, one that
// was cut by id.
const selectRange = `
WITH r AS MATERIALIZED (SELECT * FROM outbox_range WHERE seq = $1), e AS MATERIALIZED (
    SELECT n.* FROM r CROSS JOIN LATERAL pg_snapshot_xip(r.base) AS x (xid) CROSS JOIN LATERAL (
        SELECT ` + sizedColumns + ` FROM outbox o
        WHERE pg_visible_in_snapshot(x.xid, r.target) AND (o.xid, o.id) > (x.xid, r.low) AND (o.xid, o.id) <= (x.xid, r.upto) AND o.xid > '2'
        ORDER BY o.xid, o.id OFFSET 0) n
    UNION ALL
    SELECT n.* FROM r CROSS JOIN LATERAL (
        SELECT ` + sizedColumns + ` FROM outbox o
        WHERE r.new_above IS NULL AND o.xid >= pg_snapshot_xmax(r.base) AND o.xid < pg_snapshot_xmax(r.target) AND o.xid > '2'
          AND pg_visible_in_snapshot(o.xid, r.target) ORDER BY o.xid, o.id OFFSET 0) n
    UNION ALL
    SELECT n.* FROM r CROSS JOIN LATERAL (
        SELECT s.* FROM (
            SELECT ` + sizedColumns + `, o.xid FROM outbox o
            WHERE r.new_above IS NOT NULL AND o.id > greatest(r.low, r.new_above) AND o.id <= r.upto ORDER BY o.id OFFSET 0) s
        WHERE s.xid >= pg_snapshot_xmax(r.base) AND pg_visible_in_snapshot(s.xid, r.target)) x
    CROSS JOIN LATERAL (SELECT x.id, x.event_type, x.event_version, x.idempotency_key, x.ordering_key, x.related_reference, x.headers,
        x.created_at, x.available_at, x.payload, x.bytes) n
)
SELECT ` + eventResults + `,
       CASE WHEN $3 >= 0 THEN (SELECT array_agg(d.destination) FROM outbox_delivery d WHERE d.event_id = e.id) END
FROM r LEFT JOIN e ON true WHERE r.fence = $2 ORDER BY e.id`

// RescueRange takes over the oldest open range that no relay has in hand: of a relay that is no
// longer registered, or of this relay with a fence that is not in inHand, as after a take whose
// answer was lost. The range comes with the destinations that are settled already. found is false
// if there is none. A range of which nothing is left comes too: the caller ends it. inline is as in
// [Terms]. It bounds what the events of a range take, however they were taken. If it is Blind, no
// rows are read.
//
// Two statements: the second one sees all that the former owner wrote before the fence changed. If
// the relay dies between them, the next call finds the range again.
func RescueRange(ctx context.Context, db pg.DB, relay int32, inHand []int64, inline int) (r Range, found bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	if inHand == nil {
		inHand = []int64{}
	}
	var promised float64
	err = db.QueryRow(ctx, takeOverRange, relay, inHand).Scan(&r.Seq, &r.Fence, &r.TakenAt, &promised, &r.Routes, &r.Destinations)
	if errors.Is(err, pgx.ErrNoRows) {
		return Range{}, false, nil
	}
	if err != nil {
		return Range{}, false, fmt.Errorf("take over a range: %w", err)
	}
	r.Promised = seconds(&promised)
	rows, err := db.Query(ctx, selectRange, r.Seq, r.Fence, inline)
	if err == nil {
		r.Events, err = rescued(rows)
	}
	if err != nil {
		return Range{}, false, fmt.Errorf("read a range that was taken over: %w", err)
	}
	return r, true, nil
}

func rescued(rows pgx.Rows) (events []Event, err error) {
	var id *int64
	var e Event
	var wait *float64
	var settled []string
	_, err = pgx.ForEachRow(rows, []any{
		&id, &e.EventType, &e.Version, &e.Key, &e.OrderingKey, &e.RelatedReference,
		&e.Headers, &e.CreatedAt, &e.AvailableAt, &wait, &e.PayloadBytes, &e.Payload, &settled,
	}, func() error {
		if id != nil {
			e.ID, e.Wait, e.Settled = *id, seconds(wait), slices.Clone(settled)
			events = append(events, e)
		}
		e = Event{}
		return nil
	})
	return events, err
}
