package session

import (
	"context"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// hasWork is true if there is anything to do, now or later, for the relay $1. Before it stand
// [intake.Untaken] and what that needs. The orders are those of indexes: without them a plan may
// read all that was delivered.
const hasWork = `(EXISTS (SELECT FROM untaken)
    OR EXISTS (SELECT FROM (SELECT more, oldest_open_seq FROM outbox_range ORDER BY seq DESC LIMIT 1) l
               WHERE l.more OR EXISTS (SELECT FROM outbox_range o WHERE o.seq >= l.oldest_open_seq AND o.ended_at IS NULL))
    OR EXISTS (SELECT FROM outbox_delivery d WHERE ` + pg.IsDue + ` ORDER BY d.destination, d.replay, d.next_attempt_at, d.event_id LIMIT 1)
    OR EXISTS (SELECT FROM outbox_delivery d WHERE ` + pg.IsWaiting + ` ORDER BY d.destination, d.blocked_by, d.event_id LIMIT 1)
    OR EXISTS (SELECT FROM outbox_alert WHERE resolved_at IS NULL OR due_at <= now())
    OR EXISTS (SELECT FROM outbox_destination WHERE breaker <> 'closed' OR breaker_failures > 0 OR parked_after IS NOT NULL)
    OR EXISTS (SELECT FROM outbox_relay r WHERE id <> $1 AND ` + isDead + `))`

const withUntaken = `WITH most AS MATERIALIZED (SELECT 1 AS events), ` + intake.Untaken

// HasWork is the statement with which a relay decides to fall asleep.
const HasWork = withUntaken + `
SELECT ` + hasWork

// A lease that was shorter would end between two beats.
const fallAsleepSQL = `
UPDATE outbox_relay SET asleep = true, session_pid = NULL, heartbeat_at = now(), lease = greatest(lease, interval '60 seconds') WHERE id = $1`

// BeatOfSleeper is the statement of [BeatAsleep].
const BeatOfSleeper = withUntaken + `, written AS (
    UPDATE outbox_relay SET heartbeat_at = now(), server_started_at = pg_postmaster_start_time() WHERE id = $1 AND asleep RETURNING id
)
SELECT NOT EXISTS (SELECT FROM written) OR ` + hasWork + ` FROM (SELECT setval('outbox_armed'::regclass, (extract(epoch FROM clock_timestamp()) * 1000)::bigint + 60000)) armed`

const selectStarted = `SELECT pg_postmaster_start_time()`

const requestRoutes = `SELECT pg_notify('outbox_wake', 'routes ' || current_schema()) WHERE ` + pg.QueueHasRoom

// BeatAsleep says that a relay that is asleep lives, and makes producers notify for the next
// minute. It reports whether the relay has to wake up.
func BeatAsleep(ctx context.Context, db pg.DB, relayID int32) (wake bool, err error) {
	return rows.Value[bool](ctx, db, "beat of a relay that is asleep", BeatOfSleeper, relayID)
}

func fallAsleep(ctx context.Context, db pg.DB, relayID int32) error {
	return pg.Exec(ctx, db, "fall asleep", fallAsleepSQL, relayID)
}
