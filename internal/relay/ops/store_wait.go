package ops

import (
	"context"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/watch"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

const selectWaits = `
WITH ` + watch.Lenient + `
SELECT d.destination, extract(epoch FROM d.next_attempt_at - now())::float8, d.next_attempt_at, d.attempts,
       CASE WHEN NOT ` + pg.IsFree + ` THEN d.claimed_by END, coalesce(r.name, ''), coalesce(` + pg.IsAlive + `, false),
       coalesce(extract(epoch FROM d.lease_expires_at - now()), 0)::float8,
       coalesce(p.paused, false), coalesce(p.paused_reason, ''), p.paused_at,
       coalesce(p.breaker, 'closed'), coalesce(extract(epoch FROM greatest(p.breaker_until, CASE WHEN p.breaker = 'open' THEN (` + pg.NextDue + `) END) - now()), 0)::float8, coalesce(p.breaker_error, ''),
       coalesce(h.event_id, 0), coalesce(h.status, ''), coalesce(h.last_reason, ''), coalesce(h.attempts, 0), coalesce(h.last_error, ''), h.next_attempt_at, coalesce(h.next_attempt_at <= now(), false), coalesce(d.ordering_key, ''),
       d.destination = '' AND EXISTS (SELECT FROM outbox_route t WHERE e.event_type LIKE t.like_pattern),
       EXISTS (SELECT FROM outbox_relay_destination s WHERE s.destination = d.destination),
       (` + pg.WaitUntil + `),
       (SELECT count(*) FROM outbox_relay r WHERE ` + pg.IsAlive + ` AND quarantined IS NULL),
       EXISTS (SELECT FROM outbox_relay r WHERE ` + pg.IsAlive + ` AND quarantined IS NOT NULL),
       EXISTS (SELECT FROM outbox_route),
       coalesce(d.last_reason, ''), coalesce(d.last_error, ''),
       (SELECT count(*) FROM (SELECT FROM outbox_delivery b
                              WHERE b.destination = d.destination AND b.status = 'pending' AND b.blocked_by IS NULL AND b.next_attempt_at <= now()
                                AND (b.replay, b.next_attempt_at, b.event_id) < (d.replay, d.next_attempt_at, d.event_id) AND d.next_attempt_at <= now()
                              LIMIT $2) ahead)
FROM outbox_delivery d
CROSS JOIN LATERAL (SELECT d.destination) lane
LEFT JOIN outbox e ON e.id = d.event_id
LEFT JOIN outbox_relay r ON r.id = d.claimed_by
LEFT JOIN outbox_destination p ON p.destination = d.destination
LEFT JOIN LATERAL (
    SELECT * FROM (
        (SELECT p.joined, p.event_id, p.status, p.last_reason, p.attempts, p.last_error, p.next_attempt_at FROM outbox_delivery p
         WHERE p.destination = d.destination AND p.ordering_key = d.ordering_key AND p.status = 'pending' AND p.joined IS NOT NULL
           AND CASE WHEN d.joined IS NULL THEN d.next_attempt_at <= now() ELSE (p.joined, p.event_id) < (d.joined, d.event_id) END
         ORDER BY p.joined, p.event_id LIMIT 1)
        UNION ALL
        (SELECT f.joined, f.event_id, f.status, f.last_reason, f.attempts, f.last_error, f.next_attempt_at FROM outbox_delivery f
         WHERE f.destination = d.destination AND f.ordering_key = d.ordering_key AND f.status = 'failed'
           AND d.destination NOT IN (SELECT l.destination FROM lenient l)
           AND CASE WHEN d.joined IS NULL THEN d.next_attempt_at <= now() ELSE (f.joined, f.event_id) < (d.joined, d.event_id) END
         ORDER BY f.joined, f.event_id LIMIT 1)) first
    ORDER BY first.joined, first.event_id LIMIT 1
) h ON true
WHERE d.event_id = $1 AND d.status = 'pending'
ORDER BY d.destination`

// waiting returns what each pending delivery of an event may wait for.
func (o *Outbox) waiting(ctx context.Context, eventID int64) ([]waitState, error) {
	return rows.Structs[waitState](ctx, o.pool, "find out why deliveries wait", selectWaits, eventID, aheadTo+1)
}

const selectBehindFailed = `
WITH ` + watch.Lenient + `
SELECT f.destination, (SELECT count(*) FROM (
           SELECT FROM outbox_delivery d WHERE d.destination = f.destination AND d.ordering_key = f.ordering_key AND d.status = 'pending'
             AND d.joined IS NOT NULL AND (d.joined, d.event_id) > (f.joined, f.event_id)
           ORDER BY d.joined, d.event_id LIMIT 10001) behind)
FROM outbox_delivery f
WHERE f.event_id = $1 AND f.status = 'failed' AND f.destination NOT IN (SELECT l.destination FROM lenient l)`

// behindFailed counts what waits behind the failed deliveries of an event, by destination.
func (o *Outbox) behindFailed(ctx context.Context, eventID int64) (map[string]int64, error) {
	type count struct {
		Destination string
		Behind      int64
	}
	list, err := rows.Structs[count](ctx, o.pool, "count what waits behind the event", selectBehindFailed, eventID)
	behind := map[string]int64{}
	for _, c := range list {
		behind[c.Destination] = c.Behind
	}
	return behind, err
}
