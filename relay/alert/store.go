package alert

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/relay/pg"
)

// Notice is an alert with news for one channel, held by this relay until it has been sent or the hold ends.
type Notice struct {
	Alert
	total int64 // the count over all episodes, by which news is told from what is known
}

const (
	// alertHold is how long the relay that sends an alert to a channel keeps the others from doing so. It outlasts
	// alertTimeout and the statement that says it is sent.
	alertHold = 45 * time.Second
	// Retry is after which time a channel that failed is tried again.
	Retry = 30 * time.Second
	// alertCalm is how long a condition must have ended before its recovery is told: one that returns within it goes on
	// as if it had not ended.
	alertCalm = time.Minute
)

// AnyDue is true when some alert has news to tell, or something else is to be done with it. An expression for the
// heartbeat, so that an idle relay asks nothing more.
const AnyDue = `EXISTS (SELECT FROM outbox_alert WHERE due_at <= now())`

// The alert's row is only kept from going: channels that are told at the same time do not pass each other over. What the
// channel knows of it is as old as the statement, so what is written compares it once more. A copy of the database has the
// original's alerts too, so a relay that is not sure where it is tells only that.
const claimNotice = `
WITH due AS MATERIALIZED (
    SELECT a.rule, a.subject, a.count, a.counted_before, a.opened_at, a.first_event_id, a.first_error, a.detail, a.resolved_at,
           coalesce(n.count, 0) AS known, coalesce(n.recovered_count, 0) AS recovered
    FROM outbox_alert a
    LEFT JOIN outbox_alert_notice n ON n.rule = a.rule AND n.subject = a.subject AND n.channel = $1
    WHERE coalesce(n.claimed_until <= now(), true) AND ($5 OR a.rule = 'quarantined')
      AND CASE WHEN a.resolved_at IS NULL
               THEN a.count > coalesce(n.count, 0) AND coalesce(n.notified_at <= now() - make_interval(secs => $2), true)
               ELSE n.count > n.recovered_count AND a.resolved_at <= now() - make_interval(secs => $3) END
    ORDER BY a.opened_at, a.rule, a.subject
    LIMIT 1
    FOR KEY SHARE OF a SKIP LOCKED
), claimed AS (
    INSERT INTO outbox_alert_notice AS n (rule, subject, channel, count, recovered_count, claimed_until)
    SELECT rule, subject, $1, known, recovered, now() + make_interval(secs => $4) FROM due
    ON CONFLICT (rule, subject, channel) DO UPDATE SET claimed_until = excluded.claimed_until
    WHERE coalesce(n.claimed_until <= now(), true) AND n.count = excluded.count AND n.recovered_count = excluded.recovered_count
    RETURNING rule
)
SELECT d.rule, d.subject, d.count - d.counted_before, d.opened_at, coalesce(d.first_event_id, 0), coalesce(d.first_error, ''),
       coalesce(d.detail, ''), d.resolved_at, d.count
FROM due d WHERE EXISTS (SELECT FROM claimed)`

// ClaimNotice takes the oldest alert that has news for a channel, which no other relay is sending there and whose window has
// passed. It returns false if there is none.
func (s *Sender) ClaimNotice(ctx context.Context, channel string, window time.Duration, all bool) (d Notice, found bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	err = s.DB.QueryRow(ctx, claimNotice, channel, window.Seconds(), calm(window).Seconds(), alertHold.Seconds(), all).
		Scan(&d.Rule, &d.Subject, &d.Count, &d.OpenedAt, &d.FirstEventID, &d.FirstError, &d.Detail, &d.ResolvedAt, &d.total)
	if errors.Is(err, pgx.ErrNoRows) {
		return Notice{}, false, nil
	}
	if err != nil {
		return Notice{}, false, fmt.Errorf("claim alert: %w", err)
	}
	return d, true, nil
}

const markTold = `
UPDATE outbox_alert_notice SET count = $4, notified_at = now(), claimed_until = NULL
WHERE rule = $1 AND subject = $2 AND channel = $3`

const markRecovered = `
UPDATE outbox_alert_notice SET count = $4, recovered_count = $4, claimed_until = NULL
WHERE rule = $1 AND subject = $2 AND channel = $3`

// markTold records that a channel has the alert as it was claimed.
func (s *Sender) markTold(ctx context.Context, channel string, d Notice) error {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	statement := markTold
	if d.ResolvedAt != nil {
		statement = markRecovered
	}
	if _, err := s.DB.Exec(ctx, statement, d.Rule, d.Subject, channel, d.total); err != nil {
		return fmt.Errorf("mark alert told: %w", err)
	}
	return nil
}

const postponeNotice = `
UPDATE outbox_alert_notice SET claimed_until = now() + make_interval(secs => $4)
WHERE rule = $1 AND subject = $2 AND channel = $3`

// postponeNotice gives a channel that failed some time.
func (s *Sender) postponeNotice(ctx context.Context, channel string, d Notice) error {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	if _, err := s.DB.Exec(ctx, postponeNotice, d.Rule, d.Subject, channel, Retry.Seconds()); err != nil {
		return fmt.Errorf("postpone alert: %w", err)
	}
	return nil
}

// An alert goes when it is resolved, that has been told, and so long has passed since it was last told that the next time
// it fires is news. Failures are events and not a state that ends: their alert goes a window after the last news, too.
// What the log was told counts as told only where there is no other channel.
// What has changed since the statement began is left alone, and due again; what is locked is as well.
const scheduleAlerts = `
WITH unlocked AS MATERIALIZED (
    SELECT rule, subject FROM outbox_alert WHERE $4 OR rule = 'quarantined' FOR NO KEY UPDATE SKIP LOCKED
), state AS MATERIALIZED (
    SELECT a.rule, a.subject, a.count, a.resolved_at, a.last_at,
           min(CASE WHEN a.resolved_at IS NULL AND a.count > coalesce(n.count, 0)
                    THEN greatest(n.notified_at + make_interval(secs => $2), n.claimed_until, now())
                    WHEN a.resolved_at IS NOT NULL AND n.count > n.recovered_count
                    THEN greatest(a.resolved_at + make_interval(secs => $3), n.claimed_until, now()) END) AS news_at,
           CASE WHEN a.resolved_at IS NOT NULL THEN greatest(a.resolved_at, max(n.notified_at) + make_interval(secs => $2))
                WHEN a.rule = 'failed' THEN greatest(a.last_at, max(n.notified_at)) + make_interval(secs => $2) END AS close_at,
           coalesce(max(n.count) FILTER (WHERE c.channel <> 'log' OR cardinality($1) = 1), 0) AS told,
           CASE WHEN a.resolved_at IS NOT NULL AND
                     bool_or(n.recovered_count = a.count AND (c.channel <> 'log' OR cardinality($1) = 1)) THEN now() END AS recovered_at
    FROM outbox_alert a
    CROSS JOIN unnest($1::text[]) AS c (channel)
    LEFT JOIN outbox_alert_notice n ON n.rule = a.rule AND n.subject = a.subject AND n.channel = c.channel
    GROUP BY a.rule, a.subject
), closed AS (
    DELETE FROM outbox_alert a USING state s, unlocked u
    WHERE a.rule = s.rule AND a.subject = s.subject AND u.rule = s.rule AND u.subject = s.subject
      AND a.count = s.count AND a.last_at = s.last_at AND a.resolved_at IS NOT DISTINCT FROM s.resolved_at
      AND s.news_at IS NULL AND s.close_at <= now()
)
UPDATE outbox_alert a
SET due_at = coalesce(s.news_at, s.close_at), notified_count = greatest(a.notified_count, s.told),
    recovered_at = coalesce(a.recovered_at, s.recovered_at)
FROM state s, unlocked u
WHERE a.rule = s.rule AND a.subject = s.subject AND u.rule = s.rule AND u.subject = s.subject
  AND a.count = s.count AND a.last_at = s.last_at AND a.resolved_at IS NOT DISTINCT FROM s.resolved_at
  AND NOT (s.news_at IS NULL AND coalesce(s.close_at <= now(), false))
  AND (a.due_at IS DISTINCT FROM coalesce(s.news_at, s.close_at) OR a.notified_count < s.told
       OR a.recovered_at IS NULL AND s.recovered_at IS NOT NULL)`

// scheduleAlerts removes alerts that are over, and notes of the others what has been told and when something is to be done.
func (s *Sender) scheduleAlerts(ctx context.Context, channels []string, window time.Duration, all bool) error {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	if _, err := s.DB.Exec(ctx, scheduleAlerts, channels, window.Seconds(), calm(window).Seconds(), all); err != nil {
		return fmt.Errorf("schedule alerts: %w", err)
	}
	return nil
}

// calm returns alertCalm, or the window if that is shorter.
func calm(window time.Duration) time.Duration { return min(alertCalm, window) }
