package ops

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

const insertEvent = `
INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, related_reference, headers)
VALUES ($1, $2::text::json, $3, nullif($4, ''), nullif($5, ''), coalesce($6::jsonb, '{}'))`

const mayWriteAudit = `SELECT has_column_privilege('outbox_audit'::regclass, 'actor', 'INSERT')`

// Send inserts one event as any producer does. It needs nothing but the rights of a producer. A
// login that may write the audit leaves an entry there.
func (o *Outbox) Send(ctx context.Context, e NewEvent) error {
	var headers any
	if len(e.Headers) > 0 {
		headers = e.Headers
	}
	return o.durably(ctx, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, insertEvent, e.Type, e.Payload, e.IdempotencyKey, e.OrderingKey, e.RelatedReference, headers); err != nil {
			return fmt.Errorf("insert event: %w", err)
		}
		audited := false
		if err := tx.QueryRow(ctx, mayWriteAudit).Scan(&audited); err != nil || !audited {
			return err
		}
		return o.record(ctx, tx, auditRow{action: "send", detail: plain.Clip(e.Type + ", key " + e.IdempotencyKey)})
	})
}

const selectLatest = `SELECT coalesce((SELECT max(id) FROM outbox), 0), coalesce((SELECT max(id) FROM outbox_attempt), 0)`

type tailedEvent struct {
	ID        int64
	Type, Key string
	CreatedAt time.Time
}

const selectEventsBehind = `
SELECT o.id, o.event_type, o.idempotency_key, o.created_at::timestamptz
FROM outbox o WHERE o.id > $1 ORDER BY o.id LIMIT $2`

func (o *Outbox) eventsBehind(ctx context.Context, id int64) ([]tailedEvent, error) {
	return rows.Structs[tailedEvent](ctx, o.pool, "read new events", selectEventsBehind, id, tailOverlap+maxTailed)
}

type tailedAttempt struct {
	ID, EventID int64
	Destination string
	Attempt     int
	StartedAt   time.Time
	Outcome     policy.Outcome
	Reason      policy.Reason
	Error       *string
	Type, Key   string
}

const selectAttemptsBehind = `
SELECT a.id, a.event_id, a.destination, a.attempt, a.started_at, a.outcome, a.reason, a.error, coalesce(o.event_type, ''), coalesce(o.idempotency_key, '')
FROM (SELECT * FROM outbox_attempt WHERE id > $1 ORDER BY id LIMIT $2) a
LEFT JOIN outbox o ON o.id = a.event_id ORDER BY a.id`

func (o *Outbox) attemptsBehind(ctx context.Context, id int64) ([]tailedAttempt, error) {
	return rows.Structs[tailedAttempt](ctx, o.pool, "read new attempts", selectAttemptsBehind, id, maxTailed)
}

type tailedEnd struct {
	EventID     int64
	Destination string
	Status      string // empty: none of the event's deliveries has ended
	At          time.Time
	Seconds     float64
	Last        bool // no delivery of the event ends later
	Type, Key   string
}

const selectEnded = `
WITH settled AS MATERIALIZED (` + intake.SettledSnapshot + `)
SELECT f.event_id, coalesce(d.destination, ''), coalesce(d.status, ''), coalesce(d.delivered_at, d.last_attempt_at, now()),
       coalesce(extract(epoch FROM coalesce(d.delivered_at, d.last_attempt_at, now()) - ` + eventDue + `), 0)::float8,
       coalesce(pg_visible_in_snapshot(e.xid, (SELECT snapshot FROM settled)), true)
           AND NOT EXISTS (SELECT FROM outbox_delivery p WHERE p.event_id = f.event_id AND p.status = 'pending'),
       coalesce(e.event_type, ''), coalesce(e.idempotency_key, '')
FROM unnest($1::bigint[]) AS f (event_id)
LEFT JOIN outbox e ON e.id = f.event_id
LEFT JOIN outbox_delivery d ON d.event_id = f.event_id AND d.status <> 'pending'`

// endedOf returns the deliveries of the given events that have ended, and an empty one of each
// event of which none has.
func (o *Outbox) endedOf(ctx context.Context, events []int64) ([]tailedEnd, error) {
	if len(events) == 0 {
		return nil, nil
	}
	return rows.Structs[tailedEnd](ctx, o.pool, "read deliveries", selectEnded, events)
}
