package relay

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// dueAlert is an alert with news, held by this relay until it has been sent or the hold ends.
type dueAlert struct {
	Alert
	notifiedTo []string // channels that have this news already
}

// alertHold is how long the relay that sends an alert keeps the others from sending it, and after which a channel that
// failed is tried again.
const alertHold = 30 * time.Second

const claimAlerts = `
WITH due AS (
    SELECT rule, subject FROM outbox_alert
    WHERE count > notified_count
      AND (claimed_until IS NULL OR claimed_until <= now())
      AND (notified_at IS NULL OR notified_at <= now() - make_interval(secs => $1))
    ORDER BY opened_at
    LIMIT 16
    FOR UPDATE SKIP LOCKED
)
UPDATE outbox_alert a SET claimed_until = now() + make_interval(secs => $2)
FROM due WHERE a.rule = due.rule AND a.subject = due.subject
RETURNING a.rule, a.subject, a.count, a.opened_at, coalesce(a.first_event_id, 0), coalesce(a.first_error, ''), a.notified_to`

// claimAlerts takes the alerts with news that nobody else is sending and whose window has passed.
func (s *store) claimAlerts(ctx context.Context, window time.Duration) ([]dueAlert, error) {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	rows, err := s.pool.Query(ctx, claimAlerts, window.Seconds(), alertHold.Seconds())
	if err != nil {
		return nil, fmt.Errorf("claim alerts: %w", err)
	}
	due, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (d dueAlert, err error) {
		err = row.Scan(&d.Rule, &d.Subject, &d.Count, &d.OpenedAt, &d.FirstEventID, &d.FirstError, &d.notifiedTo)
		return d, err
	})
	if err != nil {
		return nil, fmt.Errorf("claim alerts: %w", err)
	}
	return due, nil
}

const markNotified = `
UPDATE outbox_alert SET notified_count = $3, notified_at = now(), notified_to = '{}', claimed_until = NULL
WHERE rule = $1 AND subject = $2`

// markNotified records that every channel has the alert as it was claimed.
func (s *store) markNotified(ctx context.Context, a Alert) error {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	if _, err := s.pool.Exec(ctx, markNotified, a.Rule, a.Subject, a.Count); err != nil {
		return fmt.Errorf("mark alert notified: %w", err)
	}
	return nil
}

const markPartlyNotified = `UPDATE outbox_alert SET notified_to = $3 WHERE rule = $1 AND subject = $2`

// markPartlyNotified records which channels have the alert; the others get it when the hold ends.
func (s *store) markPartlyNotified(ctx context.Context, a Alert, channels []string) error {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	if _, err := s.pool.Exec(ctx, markPartlyNotified, a.Rule, a.Subject, channels); err != nil {
		return fmt.Errorf("mark alert partly notified: %w", err)
	}
	return nil
}

const closeAlerts = `
DELETE FROM outbox_alert
WHERE count = notified_count AND greatest(notified_at, last_at) <= now() - make_interval(secs => $1)`

// closeAlerts forgets alerts that had no news for a window: the next occurrence opens a new one.
func (s *store) closeAlerts(ctx context.Context, window time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	if _, err := s.pool.Exec(ctx, closeAlerts, window.Seconds()); err != nil {
		return fmt.Errorf("close alerts: %w", err)
	}
	return nil
}
