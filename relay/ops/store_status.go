package ops

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/pg"
)

// Status counts the deliveries of every destination and lists relays and open alerts, all at one moment. It reads the index
// entry of every pending and failed delivery: its cost grows with the backlog, not with what was delivered. environment is that
// of the relays, see [Outbox.Identity].
func (o *Outbox) Status(ctx context.Context, environment string) (s Status, err error) {
	report, err := o.Identity(ctx, environment)
	if err != nil {
		return Status{}, err
	}
	s.Quarantined = report.Reason()
	err = pgx.BeginTxFunc(ctx, o.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		if s.Destinations, s.Parked, err = destinationStatus(ctx, tx); err != nil {
			return err
		}
		if s.Relays, err = relayStatus(ctx, tx); err != nil {
			return err
		}
		s.Alerts, err = openAlerts(ctx, tx)
		return err
	})
	if err != nil {
		return Status{}, fmt.Errorf("read status: %w", err)
	}
	return s, nil
}

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
	all, err := collect[DestinationStatus](ctx, q, "count deliveries", selectDestinationStatus)
	if len(all) > 0 && all[0].Destination == "" {
		return all[1:], all[0].Pending, err
	}
	return all, 0, err
}

// Only what is due can be claimed, and nothing but a settle makes it due later.
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

func relayStatus(ctx context.Context, q pg.DB) ([]RelayStatus, error) {
	return collect[RelayStatus](ctx, q, "list relays", selectRelays)
}

// Relays lists the registered relays, and counts what each has in flight: it reads everything that is due. A dead relay is
// listed until a living one removes it, within seconds.
func (o *Outbox) Relays(ctx context.Context) ([]RelayStatus, error) { return relayStatus(ctx, o.pool) }

const selectLifeSigns = `
SELECT instance, name, version, started_at, extract(epoch FROM now() - heartbeat_at)::float8, false, session_pid IS NOT NULL, 0::bigint,
       coalesce(quarantined, ''), ARRAY[]::text[]
FROM outbox_relay ORDER BY instance`

// LifeSigns lists the registered relays without Idle, InFlight and Destinations. Its cost does not depend on what is pending,
// so that a health check may ask often.
func (o *Outbox) LifeSigns(ctx context.Context) ([]RelayStatus, error) {
	return collect[RelayStatus](ctx, o.pool, "list relays", selectLifeSigns)
}

const selectAlerts = `
SELECT rule, subject, count - counted_before, opened_at, coalesce(first_event_id, 0), coalesce(first_error, ''),
       coalesce(detail, ''), resolved_at
FROM outbox_alert WHERE resolved_at IS NULL ORDER BY opened_at, rule, subject`

func openAlerts(ctx context.Context, q pg.DB) ([]alert.Alert, error) {
	return collect[alert.Alert](ctx, q, "list alerts", selectAlerts)
}
