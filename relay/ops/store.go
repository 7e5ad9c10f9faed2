package ops

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/pg"
)

const selectDestinationStatus = `
WITH pending AS (
    SELECT destination, count(*) AS pending,
           count(*) FILTER (WHERE next_attempt_at <= now() AND ` + pg.IsFree + `) AS due,
           count(*) FILTER (WHERE NOT ` + pg.IsFree + `) AS in_flight,
           count(*) FILTER (WHERE attempts > 0) AS retrying,
           count(*) FILTER (WHERE replay) AS replays,
           extract(epoch FROM now() - min(next_attempt_at) FILTER (WHERE next_attempt_at <= now()))::float8 AS lag
    FROM outbox_delivery d WHERE status = 'pending' GROUP BY destination
), failed AS (
    SELECT destination, count(*) AS failed FROM outbox_delivery WHERE status = 'failed' GROUP BY destination
), blocked AS (
    SELECT destination, count(DISTINCT ordering_key) AS keys, extract(epoch FROM now() - min(since))::float8 AS age
    FROM (SELECT f.destination, f.ordering_key, coalesce(f.last_attempt_at, f.next_attempt_at) AS since
          FROM outbox_delivery f
          WHERE f.status = 'failed' AND f.ordering_key IS NOT NULL
            AND EXISTS (SELECT FROM outbox_delivery l
                        WHERE l.destination = f.destination AND l.ordering_key = f.ordering_key AND l.event_id > f.event_id
                          AND l.status = 'pending' AND l.ordering_key IS NOT NULL)
          LIMIT 10000) f
    GROUP BY destination
), known AS (
    SELECT destination FROM outbox_route
    UNION SELECT destination FROM outbox_relay_destination
    UNION SELECT destination FROM outbox_destination
    UNION SELECT destination FROM pending
    UNION SELECT destination FROM failed
)
SELECT k.destination, coalesce(p.pending, 0), coalesce(p.due, 0), coalesce(p.in_flight, 0), coalesce(p.retrying, 0),
       coalesce(f.failed, 0), coalesce(p.lag, 0), coalesce(d.paused, false), coalesce(d.paused_reason, ''), d.paused_at,
       coalesce(p.replays, 0), coalesce(b.keys, 0), coalesce(b.age, 0),
       EXISTS (SELECT FROM outbox_route r WHERE r.destination = k.destination), coalesce(d.breaker, 'closed'),
       d.breaker_opened_at, coalesce(extract(epoch FROM d.breaker_until - now()), 0)::float8, coalesce(d.breaker_error, ''),
       EXISTS (SELECT FROM outbox_relay_destination s WHERE s.destination = k.destination)
FROM known k
LEFT JOIN pending p USING (destination)
LEFT JOIN failed f USING (destination)
LEFT JOIN blocked b USING (destination)
LEFT JOIN outbox_destination d USING (destination)
ORDER BY k.destination`

// destinationStatus returns the destinations, and how many deliveries are parked.
func destinationStatus(ctx context.Context, q pg.DB) ([]DestinationStatus, int64, error) {
	rows, err := q.Query(ctx, selectDestinationStatus)
	if err != nil {
		return nil, 0, err
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[DestinationStatus])
	if err != nil {
		return nil, 0, err
	}
	if len(all) > 0 && all[0].Destination == "" {
		return all[1:], all[0].Pending, nil
	}
	return all, 0, nil
}

// What is claimed was due, and nothing but a settle makes it due later.
const selectRelays = `
SELECT r.instance, r.name, r.version, r.started_at, extract(epoch FROM now() - r.heartbeat_at)::float8,
       c.deliveries IS NULL, r.session_pid IS NOT NULL,
       coalesce(c.deliveries, 0), coalesce(r.quarantined, ''),
       ARRAY(SELECT s.destination FROM outbox_relay_destination s WHERE s.instance = r.instance ORDER BY s.destination)
FROM outbox_relay r
LEFT JOIN (SELECT claimed_by, count(*) AS deliveries FROM outbox_delivery
           WHERE status = 'pending' AND next_attempt_at <= now() AND claimed_by IS NOT NULL
           GROUP BY claimed_by) c ON c.claimed_by = r.instance
ORDER BY r.instance`

// relayStatus returns the registered relays with what each has in flight, for which it reads all that is due.
func relayStatus(ctx context.Context, q pg.DB) ([]RelayStatus, error) {
	rows, err := q.Query(ctx, selectRelays)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[RelayStatus])
}

const selectLifeSigns = `
SELECT instance, name, version, started_at, extract(epoch FROM now() - heartbeat_at)::float8, false, session_pid IS NOT NULL, 0::bigint,
       coalesce(quarantined, ''), ARRAY[]::text[]
FROM outbox_relay ORDER BY instance`

// lifeSigns returns the registered relays without what they do.
func lifeSigns(ctx context.Context, q pg.DB) ([]RelayStatus, error) {
	rows, err := q.Query(ctx, selectLifeSigns)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[RelayStatus])
}

const selectAlerts = `
SELECT rule, subject, count - counted_before, opened_at, coalesce(first_event_id, 0), coalesce(first_error, ''),
       coalesce(detail, ''), resolved_at
FROM outbox_alert WHERE resolved_at IS NULL ORDER BY opened_at, rule, subject`

func openAlerts(ctx context.Context, q pg.DB) ([]alert.Alert, error) {
	rows, err := q.Query(ctx, selectAlerts)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[alert.Alert])
}

// Parameters that are not given must not reach the plan, or it would serve none of the indexes: each is its own text.
const selectDeliveries = `
SELECT d.event_id, coalesce(e.event_type, ''), coalesce(e.idempotency_key, ''), e.created_at, d.destination, d.status,
       d.attempts, d.next_attempt_at, d.last_attempt_at, d.delivered_at, d.last_status, d.last_reason, d.last_error,
       d.claimed_by, d.ordering_key, d.replay, d.not_after
FROM outbox_delivery d LEFT JOIN outbox e ON e.id = d.event_id
WHERE true`

const newestFirst = `
ORDER BY d.event_id DESC, d.destination`

func deliveries(ctx context.Context, q pg.DB, filter DeliveryFilter) ([]Delivery, error) {
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
		{"d.last_reason =", filter.Reason != "", filter.Reason},
		{"d.ordering_key =", filter.OrderingKey != "", filter.OrderingKey},
		{"e.event_type LIKE", filter.Type != "", likePattern(filter.Type)},
		{"e.created_at >=", !filter.Since.IsZero(), filter.Since},
		{"e.created_at <", !filter.Until.IsZero(), filter.Until},
	} {
		if condition.given {
			args = append(args, condition.value)
			sql += fmt.Sprintf(" AND %s $%d", condition.text, len(args))
		}
	}
	args = append(args, filter.Limit)
	rows, err := q.Query(ctx, sql+newestFirst+fmt.Sprintf(" LIMIT $%d", len(args)), args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[Delivery])
}

const selectAttempts = `
SELECT destination, attempt, started_at, duration_ms, relay, status, outcome, reason, error
FROM outbox_attempt WHERE event_id = $1 ORDER BY started_at, id`

func loggedAttempts(ctx context.Context, q pg.DB, eventID int64) ([]Attempt, error) {
	rows, err := q.Query(ctx, selectAttempts, eventID)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[Attempt])
}

const selectNow = `SELECT clock_timestamp()`

func databaseTime(ctx context.Context, q pg.DB) (now time.Time, err error) {
	err = q.QueryRow(ctx, selectNow).Scan(&now)
	return now, err
}
