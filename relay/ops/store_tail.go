package ops

import (
	"context"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/policy"
)

const insertEvent = `
INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, related_reference, headers)
VALUES ($1, $2::text::json, $3, nullif($4, ''), nullif($5, ''), coalesce($6::jsonb, '{}'))`

// Send inserts one event as any producer does. It needs nothing but the rights of a producer.
func (o *Outbox) Send(ctx context.Context, e NewEvent) error {
	var headers any
	if len(e.Headers) > 0 {
		headers = e.Headers
	}
	if _, err := o.pool.Exec(ctx, insertEvent, e.Type, e.Payload, e.IdempotencyKey, e.OrderingKey, e.RelatedReference, headers); err != nil {
		return fmt.Errorf("insert event: %w", err)
	}
	return nil
}

const selectLatest = `SELECT coalesce((SELECT max(id) FROM outbox), 0), coalesce((SELECT max(id) FROM outbox_attempt), 0)`

type tailedEvent struct {
	ID           int64
	Type, Key    string
	CreatedAt    time.Time
	Destinations []string
}

const selectEventsBehind = `
SELECT o.id, o.event_type, o.idempotency_key, o.created_at::timestamptz,
       ARRAY(SELECT d.destination FROM outbox_delivery d WHERE d.event_id = o.id ORDER BY d.destination)
FROM outbox o WHERE o.id > $1 ORDER BY o.id LIMIT $2`

func (o *Outbox) eventsBehind(ctx context.Context, id int64) ([]tailedEvent, error) {
	return collect[tailedEvent](ctx, o.pool, "read new events", selectEventsBehind, id, tailOverlap+maxTailed)
}

type tailedAttempt struct {
	ID, EventID int64
	Destination string
	Attempt     int
	StartedAt   time.Time
	Outcome     policy.Outcome
	Reason      policy.Reason
	Error       *string
}

const selectAttemptsBehind = `
SELECT id, event_id, destination, attempt, started_at, outcome, reason, error FROM outbox_attempt WHERE id > $1 ORDER BY id LIMIT $2`

func (o *Outbox) attemptsBehind(ctx context.Context, id int64) ([]tailedAttempt, error) {
	return collect[tailedAttempt](ctx, o.pool, "read new attempts", selectAttemptsBehind, id, maxTailed)
}

type tailedEnd struct {
	EventID     int64
	Destination string
	Status      string
	At          time.Time
	Seconds     float64
}

const selectEnded = `
SELECT d.event_id, d.destination, d.status, coalesce(d.delivered_at, d.last_attempt_at, now()),
       extract(epoch FROM coalesce(d.delivered_at, d.last_attempt_at, now()) - e.created_at::timestamptz)::float8
FROM unnest($1::bigint[], $2::text[]) AS f (event_id, destination)
JOIN outbox_delivery d ON d.event_id = f.event_id AND d.destination = f.destination
JOIN outbox e ON e.id = d.event_id
WHERE d.status <> 'pending'`

// endedOf returns those of the given deliveries that have ended.
func (o *Outbox) endedOf(ctx context.Context, pending map[followed]bool) ([]tailedEnd, error) {
	if len(pending) == 0 {
		return nil, nil
	}
	var events []int64
	var destinations []string
	for f := range pending {
		events, destinations = append(events, f.Event), append(destinations, f.Destination)
	}
	return collect[tailedEnd](ctx, o.pool, "read deliveries", selectEnded, events, destinations)
}
