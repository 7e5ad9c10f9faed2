package intake

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

// Beyond are events that came after a difference that was cut.
type Beyond struct {
	Seq                  int64   // of the last range
	Routes, Destinations int64   // as in Range
	Events               []Event // without their payloads
}

// BeyondRow is a row for one event beyond a cut.
type BeyondRow struct {
	EventID     int64
	Destination string
	Bytes       int
}

// How many events beyond a cut may get rows together, and how many may be read for that.
const (
	beyondEvents = 500
	beyondReads  = 5000
)

// Events with a key wait: what is left of the difference may hold an earlier one. $3 is that of
// eventResults.
const selectBeyond = `
WITH last AS MATERIALIZED (SELECT seq, more, target FROM outbox_range ORDER BY seq DESC LIMIT 1),
late AS MATERIALIZED (
    SELECT x.xid FROM last l CROSS JOIN LATERAL pg_snapshot_xip(l.target) AS x (xid)
    WHERE l.more AND pg_visible_in_snapshot(x.xid, pg_current_snapshot())
), found AS MATERIALIZED (
    (SELECT n.* FROM late CROSS JOIN LATERAL (
        SELECT o.id FROM outbox o WHERE o.xid >= late.xid AND o.xid <= late.xid AND o.xid > '2' ORDER BY o.xid, o.id LIMIT $1::int) n LIMIT $1)
    UNION ALL
    SELECT n.id FROM last l CROSS JOIN LATERAL (
        SELECT o.id FROM outbox o
        WHERE l.more AND o.xid >= pg_snapshot_xmax(l.target) AND o.xid > '2' AND pg_visible_in_snapshot(o.xid, pg_current_snapshot())
        ORDER BY o.xid, o.id LIMIT $1) n
)
SELECT l.seq, ` + counts + `, ` + eventResults + `
FROM last l LEFT JOIN (
    SELECT n.*, octet_length(n.payload::text) AS bytes FROM found f CROSS JOIN LATERAL (SELECT ` + eventColumns + ` FROM outbox o WHERE o.id = f.id LIMIT 1) n
    WHERE n.ordering_key IS NULL AND n.available_at <= now()
      AND NOT EXISTS (SELECT FROM outbox_delivery d WHERE d.event_id = f.id)
    LIMIT $2::int) e ON true
WHERE l.more`

// FindBeyond returns events without an ordering key that came after the difference that relays are
// taking in pieces, and have no row. There are none if it was not cut.
func FindBeyond(ctx context.Context, db pg.DB) (found Beyond, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	rows, err := db.Query(ctx, selectBeyond, beyondReads, beyondEvents, 0)
	if err != nil {
		return found, fmt.Errorf("find events beyond a cut: %w", err)
	}
	var id *int64
	var e Event
	var wait *float64
	if _, err := pgx.ForEachRow(rows, []any{
		&found.Seq, &found.Routes, &found.Destinations, &id, &e.EventType, &e.Version, &e.Key, &e.OrderingKey, &e.RelatedReference,
		&e.Headers, &e.CreatedAt, &e.AvailableAt, &wait, &e.PayloadBytes, &e.Payload,
	}, func() error {
		if id != nil {
			e.ID = *id
			found.Events = append(found.Events, e)
		}
		e = Event{}
		return nil
	}); err != nil {
		return found, fmt.Errorf("find events beyond a cut: %w", err)
	}
	return found, nil
}

// The row of the range has no events of its own. Its number is the lock: no relay takes in between.
const writeBeyond = `
WITH last AS MATERIALIZED (
    SELECT seq, base, target, upto, new_above, oldest_open_seq FROM (SELECT * FROM outbox_range ORDER BY seq DESC LIMIT 1) o WHERE o.seq = $2::bigint AND o.more
), ` + openRanges + `, taken AS (
    INSERT INTO outbox_range AS r (seq, relay_id, fence, base, target, low, upto, new_above, more, oldest_open_seq, ended_at, beyond)
    SELECT l.seq + 1, $1::int, ` + fenceNow + `, l.base, l.target, l.upto, l.upto, l.new_above, true, coalesce(p.oldest_open_seq, l.seq + 1), clock_timestamp(), true
    FROM last l CROSS JOIN open p
    ON CONFLICT DO NOTHING
    RETURNING r.seq
), written AS (
    INSERT INTO outbox_delivery (event_id, destination, next_attempt_at, payload_bytes)
    SELECT w.event_id, w.destination, now(), w.bytes FROM taken t CROSS JOIN unnest($3::bigint[], $4::text[], $5::int[]) AS w (event_id, destination, bytes)
    ON CONFLICT DO NOTHING
)
SELECT t.seq IS NOT NULL, now() FROM (SELECT 1) one LEFT JOIN taken t ON true`

// WriteBeyond writes pending rows for events that [FindBeyond] returned, and at says since when
// they are due. It writes none, and returns false, if another range was taken meanwhile.
func WriteBeyond(ctx context.Context, db pg.DB, relay int32, seq int64, list []BeyondRow) (at time.Time, written bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	events, destinations, bytes := make([]int64, len(list)), make([]string, len(list)), make([]int32, len(list))
	for i, r := range list {
		events[i], destinations[i], bytes[i] = r.EventID, r.Destination, int32(r.Bytes)
	}
	err = db.QueryRow(ctx, writeBeyond, relay, seq, events, destinations, bytes).Scan(&written, &at)
	if pg.HasCode(err, pg.LockNotAvailable) {
		return at, false, nil
	}
	if err != nil {
		return at, false, fmt.Errorf("write events beyond a cut: %w", err)
	}
	return at, written, nil
}
