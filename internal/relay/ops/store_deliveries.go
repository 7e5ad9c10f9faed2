package ops

import (
	"context"
	"fmt"
	"math"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/batch"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// eventDue is when an event e became due.
const eventDue = `greatest(e.created_at::timestamptz, e.available_at)`

// deliveryColumns are the fields of a Delivery under the names of its JSON.
const deliveryColumns = `
SELECT d.event_id, coalesce(e.event_type, '') AS event_type, coalesce(e.idempotency_key, '') AS idempotency_key, e.created_at, d.destination, d.status,
       d.attempts, d.next_attempt_at, d.last_attempt_at, d.delivered_at, d.last_http_status, d.last_reason, d.last_error,
       d.claimed_by, d.ordering_key, d.replay, d.not_after,
       CASE WHEN NOT d.replay THEN extract(epoch FROM d.delivered_at - ` + eventDue + `)::float8 END AS latency_seconds`

const selectDeliveries = deliveryColumns + `
FROM outbox_delivery d LEFT JOIN outbox e ON e.id = d.event_id
WHERE true`

const newestFirst = `
ORDER BY d.event_id DESC, d.destination`

// deliveriesOf lists the deliveries of named events: by their ids or by an idempotency key, whose
// indexes find them.
func (o *Outbox) deliveriesOf(ctx context.Context, filter DeliveryFilter) ([]Delivery, error) {
	where, args := filter.conditions([]any{filter.Limit, filter.behind().EventID, filter.After.Destination})
	return rows.Structs[Delivery](ctx, o.pool, "list deliveries", selectDeliveries+" AND"+behind+where+newestFirst+" LIMIT $1", args...)
}

// behind is where the page begins.
func (f DeliveryFilter) behind() DeliveryPosition {
	if f.After.EventID == 0 {
		return DeliveryPosition{EventID: math.MaxInt64}
	}
	return f.After
}

// conditions returns the filter as text. A condition that is not given must not reach the plan, or
// the plan would use none of the indexes.
func (f DeliveryFilter) conditions(args []any) (where string, with []any) {
	for _, condition := range []struct {
		text  string
		given bool
		value any
	}{
		{"d.status =", f.Status != "", f.Status},
		{"d.attempts >=", f.Attempts > 0, f.Attempts},
		{"d.destination =", f.Destination != "" || f.Parked, f.Destination},
		{"d.event_id =", f.EventID != 0, f.EventID},
		{"d.event_id = ANY", len(f.EventIDs) > 0, f.EventIDs},
		{"d.last_reason =", f.Reason != "", f.Reason},
		{"d.ordering_key =", f.OrderingKey != "", f.OrderingKey},
		{"e.event_type LIKE", f.Type != "", batch.LikePattern(f.Type)},
		{"e.created_at >=", !f.Since.IsZero(), f.Since},
		{"e.created_at <", !f.Until.IsZero(), f.Until},
		{"e.idempotency_key =", f.Key != "", f.Key},
		{"e.related_reference =", f.Related != "", f.Related},
	} {
		if condition.given {
			args = append(args, condition.value)
			where += fmt.Sprintf(" AND %s ($%d)", condition.text, len(args))
		}
	}
	return where, args
}

// A source is an index along which deliveries are read, the newest first: $1 of them behind the
// position $2 and $3. The first three parameters of each are the same.
type source string

const (
	behind = ` d.event_id <= $2 AND (d.event_id < $2 OR d.destination > $3)`

	// allDeliveries are read along the primary key.
	allDeliveries source = `SELECT d.* FROM outbox_delivery d WHERE ` + behind + newestFirst + ` LIMIT $1`
	// failedDeliveries and parkedDeliveries are few among many. $4 has their destinations.
	failedDeliveries source = `SELECT d.* FROM (SELECT d.event_id, d.destination FROM unnest($4::text[]) n (name) CROSS JOIN LATERAL (
        SELECT d.event_id, d.destination FROM outbox_delivery d
        WHERE d.destination = n.name AND (d.status = 'failed' OR d.status = 'pending' AND d.destination = '') AND ` + behind + `
        ORDER BY d.event_id DESC LIMIT $1) d` + newestFirst + ` LIMIT $1) f
    JOIN outbox_delivery d ON d.event_id = f.event_id AND d.destination = f.destination` + newestFirst + `
    `
	parkedDeliveries source = `SELECT d.* FROM unnest($4::text[]) n (name) CROSS JOIN LATERAL (
        SELECT * FROM outbox_delivery d WHERE d.destination = '' AND d.status = 'pending' AND ` + behind + `
        ORDER BY d.event_id DESC LIMIT $1) d` + newestFirst + ` LIMIT $1`
	// pendingDeliveries are read as a whole and then put in order: no index has them in that of
	// their events.
	pendingDeliveries source = `SELECT d.* FROM unnest($4::text[]) n (name) CROSS JOIN LATERAL (
        (SELECT * FROM outbox_delivery d WHERE d.destination = n.name AND ` + pg.IsDue + ` AND ` + behind + ` LIMIT 10001)
        UNION ALL
        (SELECT * FROM outbox_delivery d WHERE d.destination = n.name AND ` + pg.IsWaiting + ` AND ` + behind + ` LIMIT 10001)
        LIMIT 10001) d` + newestFirst + ` LIMIT $1`
)

// listWindow is completed by a source and the conditions of a filter, behind which stands
// endOfWindow.
const (
	listWindow = `
WITH w AS MATERIALIZED (%s)
SELECT s.rows, coalesce(s.event_id, 0), coalesce(s.destination, ''), (SELECT created_at::timestamptz FROM outbox WHERE id = s.event_id), (
    SELECT jsonb_agg(to_jsonb(f) || jsonb_build_object('event_id', f.event_id::text) ORDER BY f.event_id DESC, f.destination) FROM (` + deliveryColumns + `
        FROM w d LEFT JOIN LATERAL (SELECT o.event_type, o.idempotency_key, o.created_at, o.available_at, o.related_reference FROM outbox o WHERE o.id = d.event_id LIMIT 1) e ON true
        WHERE true`
	endOfWindow = newestFirst + ` LIMIT $%d) f)
FROM (SELECT count(*) AS rows, min(event_id) AS event_id, (array_agg(destination ORDER BY event_id, destination DESC))[1] AS destination FROM w) s`
)

// A window is what one statement read of a source, and what matched.
type window struct {
	rows  int
	last  Searched
	found []Delivery
}

// readWindow reads at most so many rows of a source, and of those at most limit that match.
func (o *Outbox) readWindow(ctx context.Context, from source, names []string, filter DeliveryFilter, rows, limit int) (w window, err error) {
	after := filter.behind()
	args := []any{rows, after.EventID, after.Destination}
	if from != allDeliveries {
		args = append(args, names)
	}
	where, args := filter.conditions(args)
	args = append(args, limit)
	statement := fmt.Sprintf(listWindow, from) + where + fmt.Sprintf(endOfWindow, len(args))
	err = pgx.BeginTxFunc(ctx, o.pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, briefly); err != nil {
			return err
		}
		return tx.QueryRow(ctx, statement, args...).Scan(&w.rows, &w.last.EventID, &w.last.Destination, &w.last.CreatedAt, &w.found)
	})
	if err != nil {
		return window{}, fmt.Errorf("list deliveries: %w", lockHint(err))
	}
	return w, nil
}

const selectFewPending = `
SELECT coalesce(sum(p.pending), 0) <= 10000 FROM (
    SELECT (SELECT count(*) FROM (VALUES (n.name)) ` + pg.PendingOf + `) AS pending
    FROM unnest($1::text[]) n (name)) p`

// fewPending reports whether at most 10,000 deliveries are pending at destinations.
func (o *Outbox) fewPending(ctx context.Context, names []string) (few bool, err error) {
	return rows.Value[bool](ctx, o.pool, "count pending deliveries", selectFewPending, names)
}

const selectAttempts = `
SELECT event_id, destination, attempt, started_at, duration_ms, relay_id, http_status, outcome, reason, error
FROM outbox_attempt WHERE event_id = $1 ORDER BY started_at, id`

// Attempts returns what the log holds of one event's attempts, the oldest first.
func (o *Outbox) Attempts(ctx context.Context, eventID int64) ([]Attempt, error) {
	return rows.Structs[Attempt](ctx, o.pool, "list attempts", selectAttempts, eventID)
}

// No index leads from a destination to its attempts: the newest of all are read.
const selectLatestAttempts = `
SELECT a.event_id, a.destination, a.attempt, a.started_at, a.duration_ms, a.relay_id, a.http_status, a.outcome, a.reason, a.error
FROM (SELECT * FROM outbox_attempt ORDER BY id DESC LIMIT 2000) a
WHERE a.destination = $1 AND a.outcome <> 'delivered' ORDER BY a.id DESC LIMIT 10`

// LatestAttempts returns the newest attempts, probes too, that did not deliver to a destination: at
// most ten, among the newest 2,000 of all destinations, the newest first.
func (o *Outbox) LatestAttempts(ctx context.Context, destination string) ([]Attempt, error) {
	return rows.Structs[Attempt](ctx, o.pool, "list attempts", selectLatestAttempts, destination)
}

// Each of the two statuses has its own index. What has not joined the key yet holds nothing.
const selectHead = selectDeliveries + ` AND d.destination = $1 AND d.event_id = (SELECT h.event_id FROM (
    (SELECT joined, event_id FROM outbox_delivery WHERE destination = $1 AND ordering_key = $2 AND status = 'pending' AND joined IS NOT NULL
     ORDER BY joined, event_id LIMIT 1)
    UNION ALL
    (SELECT joined, event_id FROM outbox_delivery WHERE destination = $1 AND ordering_key = $2 AND status = 'failed' ORDER BY joined, event_id LIMIT 1)) h
    ORDER BY h.joined, h.event_id LIMIT 1)`

const countBehind = `
WITH head AS MATERIALIZED (SELECT joined FROM outbox_delivery WHERE event_id = $3 AND destination = $1 LIMIT 1)
SELECT count(*) FROM (
    (SELECT FROM head h CROSS JOIN LATERAL (
        SELECT FROM outbox_delivery d WHERE d.destination = $1 AND d.ordering_key = $2 AND d.status = 'pending' AND d.joined IS NOT NULL AND (d.joined, d.event_id) > (h.joined, $3)
        ORDER BY d.joined, d.event_id LIMIT 10001) d)
    UNION ALL
    (SELECT FROM head h CROSS JOIN LATERAL (
        SELECT FROM outbox_delivery d WHERE d.destination = $1 AND d.ordering_key = $2 AND d.status = 'failed' AND (d.joined, d.event_id) > (h.joined, $3)
        ORDER BY d.joined, d.event_id LIMIT 10001) d)
    LIMIT 10001) behind`

// HeadOfKey returns the first pending or failed delivery of an ordering key to a destination: the
// one that the others of the key wait for. It returns nil if there is none.
func (o *Outbox) HeadOfKey(ctx context.Context, destination, orderingKey string) (*Head, error) {
	heads, err := rows.Structs[Delivery](ctx, o.pool, "find the head of the ordering key", selectHead, destination, orderingKey)
	if err != nil || len(heads) == 0 {
		return nil, err
	}
	head := &Head{Delivery: heads[0]}
	if err := o.pool.QueryRow(ctx, countBehind, destination, orderingKey, head.EventID).Scan(&head.Behind); err != nil {
		return nil, fmt.Errorf("count what waits behind the head of the ordering key: %w", err)
	}
	return head, nil
}
