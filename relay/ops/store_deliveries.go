package ops

import (
	"cmp"
	"context"
	"fmt"
)

// A condition that is not given must not reach the plan, or the plan would use none of the indexes. So each filter has a text of
// its own.
const selectDeliveries = `
SELECT d.event_id, coalesce(e.event_type, ''), coalesce(e.idempotency_key, ''), e.created_at, d.destination, d.status,
       d.attempts, d.next_attempt_at, d.last_attempt_at, d.delivered_at, d.last_status, d.last_reason, d.last_error,
       d.claimed_by, d.ordering_key, d.replay, d.not_after,
       extract(epoch FROM d.delivered_at - greatest(e.created_at::timestamptz, e.available_at))::float8
FROM outbox_delivery d LEFT JOIN outbox e ON e.id = d.event_id
WHERE true`

// The bound on event_id alone, which the filter adds before it, is what the index is read from.
const afterPosition = ` AND (d.event_id < $%d OR d.destination > $%d)`

const newestFirst = `
ORDER BY d.event_id DESC, d.destination`

// Deliveries lists the deliveries that match the filter, the newest first.
func (o *Outbox) Deliveries(ctx context.Context, filter DeliveryFilter) ([]Delivery, error) {
	sql := selectDeliveries
	var args []any
	for _, condition := range []struct {
		text  string
		given bool
		value any
	}{
		{"d.status =", filter.Status != "", filter.Status},
		{"d.destination =", filter.Destination != "" || filter.Parked, filter.Destination},
		{"d.event_id =", filter.EventID != 0, filter.EventID},
		{"d.event_id = ANY", len(filter.EventIDs) > 0, filter.EventIDs},
		{"d.last_reason =", filter.Reason != "", filter.Reason},
		{"d.ordering_key =", filter.OrderingKey != "", filter.OrderingKey},
		{"e.event_type LIKE", filter.Type != "", likePattern(filter.Type)},
		{"e.created_at >=", !filter.Since.IsZero(), filter.Since},
		{"e.created_at <", !filter.Until.IsZero(), filter.Until},
		{"e.idempotency_key =", filter.Key != "", filter.Key},
		{"d.event_id <=", filter.After.EventID != 0, filter.After.EventID},
	} {
		if condition.given {
			args = append(args, condition.value)
			sql += fmt.Sprintf(" AND %s ($%d)", condition.text, len(args))
		}
	}
	if filter.After.EventID != 0 {
		args = append(args, filter.After.Destination)
		sql += fmt.Sprintf(afterPosition, len(args)-1, len(args))
	}
	args = append(args, cmp.Or(filter.Limit, 50))
	return collect[Delivery](ctx, o.pool, "list deliveries", sql+newestFirst+fmt.Sprintf(" LIMIT $%d", len(args)), args...)
}

const selectAttempts = `
SELECT destination, attempt, started_at, duration_ms, relay, status, outcome, reason, error
FROM outbox_attempt WHERE event_id = $1 ORDER BY started_at, id`

// Attempts returns what the log holds of one event's attempts, the oldest first.
func (o *Outbox) Attempts(ctx context.Context, eventID int64) ([]Attempt, error) {
	return collect[Attempt](ctx, o.pool, "list attempts", selectAttempts, eventID)
}

// Each of the two statuses has an index of its own.
const selectHead = selectDeliveries + ` AND d.destination = $1 AND d.event_id = least(
    (SELECT event_id FROM outbox_delivery WHERE destination = $1 AND ordering_key = $2 AND status = 'pending' ORDER BY event_id LIMIT 1),
    (SELECT event_id FROM outbox_delivery WHERE destination = $1 AND ordering_key = $2 AND status = 'failed' ORDER BY event_id LIMIT 1))`

const countBehind = `
SELECT count(*) FROM (
    (SELECT FROM outbox_delivery WHERE destination = $1 AND ordering_key = $2 AND status = 'pending' AND event_id > $3 LIMIT 10001)
    UNION ALL
    (SELECT FROM outbox_delivery WHERE destination = $1 AND ordering_key = $2 AND status = 'failed' AND event_id > $3 LIMIT 10001)
    LIMIT 10001) behind`

// HeadOfKey returns the first pending or failed delivery of an ordering key to a destination: the one that the others of the key
// wait for. It returns nil if there is none.
func (o *Outbox) HeadOfKey(ctx context.Context, destination, orderingKey string) (*Head, error) {
	heads, err := collect[Delivery](ctx, o.pool, "find the head of the ordering key", selectHead, destination, orderingKey)
	if err != nil || len(heads) == 0 {
		return nil, err
	}
	head := &Head{Delivery: heads[0]}
	if err := o.pool.QueryRow(ctx, countBehind, destination, orderingKey, head.EventID).Scan(&head.Behind); err != nil {
		return nil, fmt.Errorf("count what waits behind the head of the ordering key: %w", err)
	}
	return head, nil
}
