package session

import (
	"context"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// A relay that is asleep is a row without a session. Who runs its process writes the heartbeat, with [BeatAsleep], and listens: a notification
// wakes the relay, which resumes its row. Anything that its database may want of it wakes it too, so nothing is done for it while it sleeps.

// AsleepInterval is the time between two beats of a relay that is asleep. Producers notify for longer after each, and others believe
// for longer that it lives ([pg.IsAlive]).
const AsleepInterval = 25 * time.Second

// hasWork is true if there is anything to do, now or later, for the relay $1. Before it stand [intake.Untaken] and what that needs.
// The orders are those of indexes: without them a plan may read all that was delivered.
const hasWork = `(EXISTS (SELECT FROM untaken)
    OR EXISTS (SELECT FROM (SELECT more, oldest FROM outbox_range ORDER BY seq DESC LIMIT 1) l
               WHERE l.more OR EXISTS (SELECT FROM outbox_range o WHERE o.seq >= l.oldest AND o.ended_at IS NULL))
    OR EXISTS (SELECT FROM outbox_delivery d WHERE ` + pg.IsDue + ` ORDER BY d.destination, d.replay, d.next_attempt_at, d.event_id LIMIT 1)
    OR EXISTS (SELECT FROM outbox_delivery d WHERE ` + pg.IsWaiting + ` ORDER BY d.destination, d.blocked_by, d.event_id LIMIT 1)
    OR EXISTS (SELECT FROM outbox_alert WHERE resolved_at IS NULL OR due_at <= now())
    OR EXISTS (SELECT FROM outbox_destination WHERE breaker <> 'closed' OR breaker_failures > 0 OR parked_after IS NOT NULL)
    OR EXISTS (SELECT FROM outbox_relay r WHERE instance <> $1 AND ` + isDead + `))`

const withUntaken = `WITH most AS MATERIALIZED (SELECT 1 AS events), ` + intake.Untaken

// HasWork is the statement with which a relay decides to fall asleep.
const HasWork = withUntaken + `
SELECT ` + hasWork

// A lease that was shorter would end between two beats.
const fallAsleepSQL = `
UPDATE outbox_relay SET asleep = true, session_pid = NULL, heartbeat_at = now(), lease = greatest(lease, interval '60 seconds') WHERE instance = $1`

// BeatOfSleeper is the statement of [BeatAsleep].
const BeatOfSleeper = withUntaken + `, written AS (
    UPDATE outbox_relay SET heartbeat_at = now() WHERE instance = $1 AND asleep RETURNING instance
)
SELECT NOT EXISTS (SELECT FROM written) OR ` + hasWork + ` FROM (SELECT setval('outbox_armed'::regclass, (extract(epoch FROM clock_timestamp()) * 1000)::bigint + 60000)) armed`

// BeatAsleep says that a relay that is asleep lives, and makes producers notify for the next minute. It reports whether the relay has to wake up.
func BeatAsleep(ctx context.Context, db pg.DB, instance int32) (wake bool, err error) {
	return rows.Value[bool](ctx, db, "beat of a relay that is asleep", BeatOfSleeper, instance)
}

func fallAsleep(ctx context.Context, db pg.DB, instance int32) error {
	return pg.Exec(ctx, db, "fall asleep", fallAsleepSQL, instance)
}

// maySleep asks the relay to fall asleep if there has been nothing to do for long.
func (s *Session) maySleep(ctx context.Context, on *standing, now time.Time) error {
	if s.SleepAfter == 0 || on.conn == nil || !on.listening || s.Config.Pooler.Session != nil || s.asleep {
		return nil
	}
	if on.asked || !s.Idle() {
		s.busyAt, on.asked = now, false
	}
	if now.Sub(s.busyAt) < s.SleepAfter {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	instance, _ := s.Presence.Current()
	work, err := rows.Value[bool](ctx, on, "ask whether anything is to be done", HasWork, instance)
	if err != nil {
		return fmt.Errorf("fall asleep: %w", err)
	}
	if s.busyAt = now; !work {
		s.asleep = true
		s.FallAsleep(instance, on.schema)
	}
	return nil
}
