package inboxops

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/inboxsql"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

const selectEstimates = `
SELECT reltuples::bigint FROM pg_class WHERE oid = 'inbox_events'::regclass
UNION ALL
SELECT reltuples::bigint FROM pg_class WHERE oid = 'processed_events'::regclass`

func estimateRows(ctx context.Context, tx pgx.Tx, s *Status) error {
	counts, err := rows.Values[int64](ctx, tx, "estimate rows", selectEstimates)
	if err != nil {
		return err
	}
	s.InboxRows, s.MemoryRows = counts[0], counts[1]
	return nil
}

// Every part reads one index, at most $3 entries of it. The lag is the exact one also where not all
// is counted: it is found by the first entry of each type.
const selectSenderStatus = inboxsql.Kinds + `, lag AS (
    SELECT min(first.next_attempt_at) AS since
    FROM (SELECT event_type FROM kind WHERE event_type IS NOT NULL LIMIT 1000) kind CROSS JOIN LATERAL (
        SELECT e.next_attempt_at FROM inbox_events e
        WHERE e.receiver = $1::text AND e.source = $2::text AND e.event_type = kind.event_type
          AND e.processing_state = 'pending' AND e.next_attempt_at IS NOT NULL
        ORDER BY e.next_attempt_at LIMIT 1) first
), due AS (
    SELECT count(*) AS events, count(*) FILTER (WHERE next_attempt_at <= now()) AS due
    FROM (SELECT next_attempt_at FROM inbox_events
          WHERE receiver = $1::text AND source = $2::text AND processing_state = 'pending' AND next_attempt_at IS NOT NULL
          ORDER BY event_type LIMIT $3::bigint) e
), waiting AS (
    SELECT count(*) AS events
    FROM (SELECT FROM inbox_events
          WHERE receiver = $1::text AND source = $2::text AND processing_state = 'pending' AND next_attempt_at IS NULL
          ORDER BY ordering_key LIMIT $3::bigint) e
), working AS (
    SELECT count(*) AS events, min(claimed_at) AS since
    FROM (SELECT claimed_at FROM inbox_events
          WHERE receiver = $1::text AND source = $2::text AND processing_state = 'processing'
          ORDER BY claimed_at LIMIT $3::bigint) e
), review AS (
    SELECT count(*) AS events, count(*) FILTER (WHERE processing_state = 'failed') AS failed
    FROM (SELECT processing_state FROM inbox_events
          WHERE receiver = $1::text AND source = $2::text AND processing_state IN ('failed', 'ignored')
          ORDER BY inbox_id DESC LIMIT $3::bigint) e
), blocked AS (
    SELECT count(*) AS keys
    FROM (SELECT DISTINCT ordering_key
          FROM (SELECT ordering_key FROM inbox_events
                WHERE receiver = $1::text AND source = $2::text AND processing_state = 'failed' AND ordering_key IS NOT NULL
                ORDER BY ordering_key LIMIT 10000) f) f
    WHERE EXISTS (SELECT FROM inbox_events w
                  WHERE w.receiver = $1::text AND w.source = $2::text AND w.ordering_key = f.ordering_key
                    AND w.processing_state = 'pending' AND w.next_attempt_at IS NULL OFFSET 0)
)
SELECT due.due, due.events - due.due, waiting.events, working.events, review.failed, review.events - review.failed,
       greatest(due.events, waiting.events, working.events, review.events) >= $3::bigint, blocked.keys,
       greatest(coalesce(extract(epoch FROM now() - lag.since), 0), 0)::float8,
       greatest(coalesce(extract(epoch FROM now() - working.since), 0), 0)::float8,
       (SELECT received_before FROM inbox_forgotten WHERE receiver = $1::text AND source = $2::text)
FROM due, waiting, working, review, blocked, lag`

// countSender counts the events of one sender.
func countSender(ctx context.Context, tx pgx.Tx, sender Sender) (SenderStatus, error) {
	s := SenderStatus{Sender: sender}
	err := tx.QueryRow(ctx, selectSenderStatus, sender.Receiver, sender.Source, statusLimit).Scan(&s.Due, &s.Scheduled, &s.Waiting,
		&s.Processing, &s.Failed, &s.Ignored, &s.AtLeast, &s.BlockedKeys, &s.LagSeconds, &s.ProcessingSeconds, &s.RemembersSince)
	if err != nil {
		return SenderStatus{}, fmt.Errorf("count events: %w", err)
	}
	s.Pending = s.Due + s.Scheduled + s.Waiting
	return s, nil
}
