package ops

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/watch"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// Status counts the deliveries of every destination, lists relays, and open alerts whose conditions
// hold, all at one moment, and says what to do about it. It counts up to 10,001 of each kind, and
// 1,001 that failed, so that its cost grows neither with the backlog nor with what was delivered.
// environment is that of the relays, see [Outbox.Identity].
func (o *Outbox) Status(ctx context.Context, environment string) (s Status, err error) {
	report, err := o.Identity(ctx, environment)
	if err != nil {
		return Status{}, err
	}
	s.Quarantined = report.Reason()
	err = pgx.BeginTxFunc(ctx, o.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, briefly); err != nil {
			return err
		}
		if s.Destinations, err = destinationStatus(ctx, tx); err != nil {
			return err
		}
		if s.Parked, err = parked(ctx, tx); err != nil {
			return err
		}
		if s.Untaken, err = untaken(ctx, tx); err != nil {
			return err
		}
		if s.Relays, err = relayStatus(ctx, tx); err != nil {
			return err
		}
		if s.Differences, err = watch.Differences(ctx, tx); err != nil {
			return err
		}
		if s.Refusals, err = watch.Refusals(ctx, tx); err != nil {
			return err
		}
		if s.Alerts, err = alert.Open(ctx, tx); err == nil {
			s.Alerts, err = watch.Current(ctx, tx, s.Alerts)
		}
		return err
	})
	if err != nil {
		return Status{}, fmt.Errorf("read status: %w", lockHint(err))
	}
	s.Advice = advise(s)
	return s, nil
}

// Each part of the pending deliveries of a destination is read up to a bound, in the order of the
// index, so that the cost does not grow with the backlog. Retries that wait for their time are a
// part of their own: a large backlog does not hide them. No index leads to what was delivered: it
// is looked for among the newest deliveries of all, and around the event that is retried.
const selectDestinationStatus = `
WITH RECURSIVE most AS MATERIALIZED (SELECT 10001 AS events), ` + watch.Lag + `, ` + watch.Lenient + `, ` + knownWithPending + `, ` + intake.InHand + `, newest AS MATERIALIZED (
    SELECT n.destination, max(n.delivered_at) AS delivered_at
    FROM (SELECT destination, delivered_at FROM outbox_delivery ORDER BY event_id DESC, destination DESC LIMIT 1000) n GROUP BY n.destination
)
SELECT k.destination, least(p.pending + i.deliveries, 10001), least(p.due, 10001), p.waiting, least(p.in_flight + i.deliveries, 10001), least(p.retrying, 10001),
       f.failed, greatest(0, extract(epoch FROM now() - g.since))::float8, coalesce(s.paused, false), coalesce(s.paused_reason, ''), s.paused_at,
       least(p.replays, 10001), b.keys, b.seconds,
       EXISTS (SELECT FROM outbox_route r WHERE r.destination = k.destination), coalesce(s.breaker, 'closed'),
       s.breaker_opened_at, greatest(0, extract(epoch FROM greatest(s.breaker_until, CASE WHEN s.breaker = 'open' THEN p.next_at END) - now()))::float8, coalesce(s.breaker_error, ''),
       o.served, (` + pg.WaitUntil + `), o.slowed_to,
       coalesce(p.last_event, 0), coalesce(p.last_reason, ''), coalesce(p.last_error, ''),
       f.unsendable, coalesce(f.last_reason, ''), coalesce(f.last_error, ''),
       p.last_at, f.last_at, greatest(w.delivered_at, a.delivered_at), p.lately, p.lately_since, (
           SELECT coalesce(jsonb_agg(to_jsonb(x)), '[]') FROM (
               (SELECT h.event_id, (SELECT count(*) FROM (
                           SELECT FROM outbox_delivery o CROSS JOIN LATERAL (
                               SELECT FROM outbox_delivery d WHERE d.destination = k.destination AND d.ordering_key = h.key AND d.status = 'pending'
                                 AND d.joined IS NOT NULL AND (d.joined, d.event_id) > (o.joined, o.event_id)
                               ORDER BY d.joined, d.event_id LIMIT 10001) d
                           WHERE o.event_id = h.event_id::bigint AND o.destination = k.destination) w) AS waiting,
                       h.key, 'failed' AS status, 0 AS attempts, 0::float8 AS due_in_seconds, h.reason
                FROM jsonb_to_recordset(b.heads) AS h (event_id text, key text, reason text))
               UNION ALL
               (SELECT n.blocked_by::text AS event_id, n.waiting, coalesce(h.ordering_key, '') AS key, h.status, h.attempts,
                      greatest(extract(epoch FROM h.next_attempt_at - now()), 0)::float8 AS due_in_seconds, '' AS reason
               FROM (SELECT b.blocked_by, count(*) AS waiting FROM (
                         SELECT d.blocked_by FROM outbox_delivery d WHERE d.destination = k.destination AND ` + pg.IsWaiting + ` LIMIT 10001) b
                     GROUP BY b.blocked_by ORDER BY waiting DESC, b.blocked_by LIMIT 3) n
               CROSS JOIN LATERAL (SELECT * FROM outbox_delivery h WHERE h.event_id = n.blocked_by AND h.destination = k.destination LIMIT 1) h
               WHERE h.status = 'pending' ORDER BY n.waiting DESC, n.blocked_by)) x)
FROM known k
LEFT JOIN lag g ON g.destination = k.destination
LEFT JOIN outbox_destination s ON s.destination = k.destination
CROSS JOIN LATERAL (
    SELECT count(*) AS pending, count(*) FILTER (WHERE d.blocked_by IS NOT NULL) AS waiting,
           CASE WHEN count(*) FILTER (WHERE d.next_attempt_at <= now() AND d.blocked_by IS NULL) > 10000 THEN 10001
                ELSE count(*) FILTER (WHERE d.next_attempt_at <= now() AND d.blocked_by IS NULL AND ` + pg.IsFree + `) END AS due,
           count(*) FILTER (WHERE NOT ` + pg.IsFree + `) AS in_flight,
           count(*) FILTER (WHERE d.attempts > 0) AS retrying, count(*) FILTER (WHERE d.replay) AS replays,
           (array_agg(d.event_id ORDER BY d.last_attempt_at DESC) FILTER (WHERE d.attempts > 0))[1] AS last_event,
           (array_agg(d.last_reason ORDER BY d.last_attempt_at DESC) FILTER (WHERE d.attempts > 0))[1] AS last_reason,
           (array_agg(d.last_error ORDER BY d.last_attempt_at DESC) FILTER (WHERE d.attempts > 0))[1] AS last_error,
           max(d.last_attempt_at) FILTER (WHERE d.attempts > 0) AS last_at,
           count(*) FILTER (WHERE d.attempts > 0 AND d.last_attempt_at > now() - interval '10 seconds') AS lately,
           min(d.last_attempt_at) FILTER (WHERE d.attempts > 0 AND d.last_attempt_at > now() - interval '10 seconds') AS lately_since,
           min(d.next_attempt_at) FILTER (WHERE d.blocked_by IS NULL) AS next_at
    FROM (
        (SELECT * FROM outbox_delivery d WHERE d.destination = k.destination AND ` + pg.IsDue + ` AND d.replay = false
         AND d.next_attempt_at <= now() ORDER BY d.next_attempt_at, d.event_id LIMIT 10001)
        UNION ALL
        (SELECT * FROM outbox_delivery d WHERE d.destination = k.destination AND ` + pg.IsDue + ` AND d.replay = false
         AND d.next_attempt_at > now() ORDER BY d.next_attempt_at, d.event_id LIMIT 10001)
        UNION ALL
        (SELECT * FROM outbox_delivery d WHERE d.destination = k.destination AND ` + pg.IsDue + ` AND d.replay = true
         AND d.next_attempt_at <= now() ORDER BY d.next_attempt_at, d.event_id LIMIT 10001)
        UNION ALL
        (SELECT * FROM outbox_delivery d WHERE d.destination = k.destination AND ` + pg.IsDue + ` AND d.replay = true
         AND d.next_attempt_at > now() ORDER BY d.next_attempt_at, d.event_id LIMIT 10001)
        UNION ALL
        (SELECT * FROM outbox_delivery d WHERE d.destination = k.destination AND ` + pg.IsWaiting + ` LIMIT 10001)
    ) d
) p
CROSS JOIN LATERAL (
    SELECT count(*) AS failed, count(*) FILTER (WHERE d.last_reason IN ('invalid_event', 'event_missing')) AS unsendable,
           (array_agg(d.last_reason ORDER BY d.event_id DESC))[1] AS last_reason,
           (array_agg(d.last_error ORDER BY d.event_id DESC))[1] AS last_error,
           (array_agg(d.last_attempt_at ORDER BY d.event_id DESC))[1] AS last_at
    FROM (SELECT d.event_id, d.last_reason, d.last_error, d.last_attempt_at FROM outbox_delivery d
          WHERE d.destination = k.destination AND d.status = 'failed' ORDER BY d.event_id DESC LIMIT 1001) d
) f
CROSS JOIN LATERAL (
    SELECT count(*) > 0 AS served,
           CASE WHEN bool_and(o.slowed_to IS NOT NULL AND o.slowed_to > 0) FILTER (WHERE ` + pg.IsAlive + `) THEN sum(o.slowed_to) FILTER (WHERE ` + pg.IsAlive + `) ELSE 0 END AS slowed_to
    FROM outbox_relay_destination o JOIN outbox_relay r ON r.id = o.relay_id WHERE o.destination = k.destination
) o
CROSS JOIN LATERAL (SELECT coalesce(sum(x.deliveries), 0)::bigint AS deliveries FROM in_hand x WHERE x.destination = k.destination) i
CROSS JOIN LATERAL (SELECT k.destination) lane
CROSS JOIN ` + watch.Blocked + ` b
LEFT JOIN newest w ON w.destination = k.destination
CROSS JOIN LATERAL (
    SELECT max(d.delivered_at) AS delivered_at FROM outbox_delivery d
    WHERE d.event_id BETWEEN p.last_event - 500 AND p.last_event + 500 AND d.destination = k.destination
) a
WHERE k.destination <> ''
ORDER BY k.destination`

// destinationStatus returns the state of every destination.
func destinationStatus(ctx context.Context, q pg.DB) ([]DestinationStatus, error) {
	list, err := rows.Structs[DestinationStatus](ctx, q, "count deliveries", selectDestinationStatus)
	for i := range list {
		list[i].State = list[i].state()
	}
	return list, err
}

const countParked = `
SELECT count(*) FROM (SELECT FROM outbox_delivery d WHERE d.destination = '' AND d.status = 'pending' LIMIT 10001) parked`

// parked counts the deliveries that match no route, up to 10,001.
func parked(ctx context.Context, q pg.DB) (n int64, err error) {
	return rows.Value[int64](ctx, q, "count parked deliveries", countParked)
}

// Only what is due can be claimed, and nothing but a settle makes it due later. What is claimed
// stands first among it.
const selectRelays = `
WITH RECURSIVE most AS MATERIALIZED (SELECT 10001 AS events), ` + pg.Pending + `, ` + intake.InHand + `, busy AS MATERIALIZED (
    SELECT DISTINCT o.relay_id FROM (SELECT oldest_open_seq FROM outbox_range ORDER BY seq DESC LIMIT 1) l CROSS JOIN LATERAL (
        SELECT n.relay_id FROM outbox_range n WHERE n.seq >= l.oldest_open_seq AND n.ended_at IS NULL OFFSET 0) o
)
SELECT r.id, r.name, r.version, r.started_at, greatest(0, extract(epoch FROM now() - r.heartbeat_at))::float8,
       c.deliveries IS NULL AND r.id NOT IN (SELECT b.relay_id FROM busy b), r.session_pid IS NOT NULL AND ` + pg.HasSession + `,
       coalesce(c.deliveries, 0) + coalesce((SELECT sum(i.deliveries) FROM in_hand i WHERE i.relay_id = r.id), 0)::bigint, coalesce(r.quarantined, ''),
       ARRAY(SELECT s.destination FROM outbox_relay_destination s WHERE s.relay_id = r.id ORDER BY s.destination),
       coalesce(r.reload_error, ''), r.reload_failed_at,
       ARRAY(SELECT d.destination FROM outbox_relay_destination d WHERE d.relay_id = r.id AND ` + watch.RefusedAlone + ` ORDER BY d.destination),
       r.asleep, r.session_pid IS NOT NULL AND NOT ` + pg.HasSession + `
FROM outbox_relay r
LEFT JOIN (SELECT d.claimed_by, count(*) AS deliveries
           FROM pending p CROSS JOIN (VALUES (false), (true)) x (replay) CROSS JOIN LATERAL (
               SELECT d.claimed_by FROM outbox_delivery d
               WHERE d.destination = p.destination AND ` + pg.IsDue + ` AND d.replay = x.replay AND d.next_attempt_at <= now()
               ORDER BY d.next_attempt_at, d.event_id LIMIT 10001) d
           WHERE d.claimed_by IS NOT NULL GROUP BY d.claimed_by) c ON c.claimed_by = r.id
ORDER BY r.id`

func relayStatus(ctx context.Context, q pg.DB) ([]RelayStatus, error) {
	return listRelays(ctx, q, selectRelays)
}

func listRelays(ctx context.Context, q pg.DB, statement string) ([]RelayStatus, error) {
	list, err := rows.Structs[RelayStatus](ctx, q, "list relays", statement)
	named := map[string]int{}
	for _, r := range list {
		named[r.Name]++
	}
	for i := range list {
		r := &list[i]
		if r.State, r.Called = r.state(), r.Name; named[r.Name] > 1 {
			r.Called = fmt.Sprintf("%s (id %d)", r.Name, r.RelayID)
		}
	}
	return list, err
}

// Relays lists the registered relays, and counts what each has in flight among the first 10,001 due
// deliveries of each destination. A dead relay is listed until a living one removes it, within
// seconds.
func (o *Outbox) Relays(ctx context.Context) ([]RelayStatus, error) { return relayStatus(ctx, o.pool) }

// Differences lists the destinations of which relays have different settings.
func (o *Outbox) Differences(ctx context.Context) ([]watch.Difference, error) {
	return watch.Differences(ctx, o.pool)
}

const selectLifeSigns = `
SELECT id, name, version, started_at, greatest(0, extract(epoch FROM now() - heartbeat_at))::float8, false, session_pid IS NOT NULL AND ` + pg.HasSession + `, 0::bigint,
       coalesce(quarantined, ''), ARRAY[]::text[], coalesce(reload_error, ''), reload_failed_at, ARRAY[]::text[], asleep, session_pid IS NOT NULL AND NOT ` + pg.HasSession + `
FROM outbox_relay r ORDER BY id`

// LifeSigns lists the registered relays without Idle, InFlight and Destinations. Its cost does not
// depend on what is pending, so that a health check may ask often.
func (o *Outbox) LifeSigns(ctx context.Context) ([]RelayStatus, error) {
	return listRelays(ctx, o.pool, selectLifeSigns)
}
