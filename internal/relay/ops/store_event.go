package ops

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/batch"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// A producer may write any time. One that neither Go nor JSON can tell, such as infinity, is shown
// as the nearest that they can.
const tellableAvailableAt = `greatest(least(available_at, '9999-12-31 00:00:00+00'), '0001-01-02 00:00:00+00')`

const selectEvent = `
SELECT e.*, o.header_names, o.payload_bytes FROM (
    SELECT id, event_type, event_version, idempotency_key, ordering_key, related_reference, ` + tellableAvailableAt + `, created_at::timestamptz, NULL::timestamptz
    FROM outbox WHERE id = $1
    UNION ALL
    SELECT id, event_type, event_version, idempotency_key, ordering_key, related_reference, ` + tellableAvailableAt + `, created_at, archived_at
    FROM outbox_archive WHERE id = $1
    LIMIT 1) e CROSS JOIN LATERAL outbox_outline(e.id) o`

const (
	orderReveal = `SELECT outbox_order_reveal($1::bigint, $2::text, $3::text)`
	reveal      = `SELECT payload, headers FROM outbox_reveal($1::bigint)`
)

// reveal returns the content of an event, after the audit has it.
func (o *Outbox) reveal(ctx context.Context, eventID int64) (payload *string, headers map[string]string, err error) {
	name, origin := o.actorOf()
	var entry int64
	err = o.durably(ctx, func(ctx context.Context, tx pgx.Tx) error {
		return tx.QueryRow(ctx, orderReveal, eventID, name, string(origin)).Scan(&entry)
	})
	if err == nil {
		err = o.pool.QueryRow(ctx, reveal, entry).Scan(&payload, &headers)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("reveal event %d: %w", eventID, err)
	}
	return payload, headers, nil
}

const selectArchivedDeliveries = `
SELECT a.id, a.event_type, a.idempotency_key, a.created_at, d.destination, d.status, d.attempts, coalesce(d.discarded_at, d.last_attempt_at, a.created_at), d.last_attempt_at,
       d.delivered_at, d.last_http_status, d.last_reason, d.last_error, NULL::int, a.ordering_key, d.replay, d.not_after,
       extract(epoch FROM d.delivered_at - greatest(a.created_at, a.available_at))::float8
FROM outbox_archive a CROSS JOIN LATERAL jsonb_to_recordset(a.deliveries) AS d (
    destination text, status text, attempts int, discarded_at timestamptz, last_attempt_at timestamptz, delivered_at timestamptz,
    last_http_status int, last_reason text, last_error text, replay boolean, not_after timestamptz)
WHERE a.id = $1 ORDER BY d.destination`

// event returns an event and its deliveries, from the archive if it is there.
func (o *Outbox) event(ctx context.Context, id int64) (e Event, deliveries []Delivery, err error) {
	events, err := rows.Structs[Event](ctx, o.pool, "read event", selectEvent, id)
	switch {
	case err != nil:
		return e, nil, err
	case len(events) == 0:
		// A row of outbox that was removed by hand leaves its deliveries behind.
		deliveries, err = o.deliveriesOf(ctx, DeliveryFilter{EventID: id, Limit: 1000})
		if err == nil && len(deliveries) == 0 {
			err = UnknownEvent{Detail: fmt.Sprintf("there is no event %d, or its month was dropped from the archive", id)}
		}
		return Event{ID: id}, deliveries, err
	case events[0].ArchivedAt != nil:
		deliveries, err = rows.Structs[Delivery](ctx, o.pool, "read archived deliveries", selectArchivedDeliveries, id)
	default:
		deliveries, err = o.deliveriesOf(ctx, DeliveryFilter{EventID: id, Limit: 1000})
	}
	return events[0], deliveries, err
}

const selectHasEvent = `
SELECT EXISTS (SELECT FROM outbox WHERE id = $1) OR EXISTS (SELECT FROM outbox_delivery WHERE event_id = $1)
    OR EXISTS (SELECT FROM outbox_archive WHERE id = $1)`

// hasEvent reports whether there is an event, archived or not, or what is left of one.
func (o *Outbox) hasEvent(ctx context.Context, id int64) (known bool, err error) {
	return rows.Value[bool](ctx, o.pool, "look for event", selectHasEvent, id)
}

const selectEventsOfKey = `
SELECT id FROM outbox WHERE idempotency_key = $1
UNION ALL
SELECT id FROM outbox_archive WHERE idempotency_key = $1
ORDER BY id DESC`

// EventsOfKey returns the ids of the events with an idempotency key: one that is not archived, and
// archived ones.
func (o *Outbox) EventsOfKey(ctx context.Context, key string) ([]int64, error) {
	return rows.Values[int64](ctx, o.pool, "look for idempotency key", selectEventsOfKey, key)
}

// Keys are printable ASCII in the order of bytes: those of a prefix are one range of their index,
// below the byte 127.
const selectEventsOfPrefix = `
SELECT id FROM outbox WHERE idempotency_key >= $1 AND idempotency_key < $1 || chr(127)
ORDER BY idempotency_key LIMIT $2`

// EventsOfPrefix returns the ids of the events, archived ones left out, whose idempotency key
// begins with a text, at most so many.
func (o *Outbox) EventsOfPrefix(ctx context.Context, prefix string, limit int) ([]int64, error) {
	return rows.Values[int64](ctx, o.pool, "look for idempotency keys", selectEventsOfPrefix, prefix, limit)
}

const selectRelatedEvents = `
SELECT min(e.id), count(*), coalesce(array_agg(e.id ORDER BY e.id DESC) FILTER (WHERE e.related_reference = $2), '{}')
FROM (SELECT id, related_reference FROM outbox WHERE id < $1 ORDER BY id DESC LIMIT $3) e`

// relatedAmong is among how many of the newest events a related reference is looked for. An index
// would cost producers 12 to 17 µs of processor time for each event that has one.
const relatedAmong = 200_000

// RelatedEvents returns the ids of the events with a related reference, the newest first, at most
// so many. It looks for them among the newest 200,000 events that are not archived, in statements
// of 5,000. all reports whether there are no more events than that.
func (o *Outbox) RelatedEvents(ctx context.Context, reference string, limit int) (found []int64, all bool, err error) {
	before := int64(1 << 62)
	for looked := 0; looked < relatedAmong && len(found) < limit; {
		var ids []int64
		var first *int64
		var read int
		if err := o.pool.QueryRow(ctx, selectRelatedEvents, before, reference, createBatch).Scan(&first, &read, &ids); err != nil {
			return nil, false, fmt.Errorf("look for related reference: %w", err)
		}
		found = append(found, ids...)
		if read < createBatch {
			all = true
			break
		}
		before, looked = *first, looked+read
	}
	return found[:min(len(found), limit)], all, nil
}

const selectRecentTypes = `
SELECT array_agg(DISTINCT t.event_type), coalesce(bool_or(t.event_type LIKE $1), false)
FROM (SELECT event_type FROM (SELECT event_type FROM outbox ORDER BY id DESC LIMIT 10000) recent
      UNION SELECT pattern FROM outbox_route WHERE pattern NOT LIKE '%*%') t`

// recentTypes returns the types of the newest events and of the routes, and whether one of them
// matches a pattern.
func (o *Outbox) recentTypes(ctx context.Context, pattern string) (types []string, known bool, err error) {
	err = o.pool.QueryRow(ctx, selectRecentTypes, batch.LikePattern(pattern)).Scan(&types, &known)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return nil, false, fmt.Errorf("look for event types: %w", err)
	}
	return types, known, nil
}
