package watch

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/pg"
)

// The tables that the watcher looks after.
const watchedTables = `ARRAY['outbox', 'outbox_delivery', 'outbox_attempt', 'outbox_destination', 'outbox_relay', 'outbox_alert']`

// The first pending delivery of every destination, found by skipping through the hot index: live deliveries stand before
// replays there, and parked ones, whose destination is empty, first of all. A statement finds them once, and nothing in it looks in
// front of them again: while vacuum is blocked, what was delivered still stands there, entry by entry.
const firstPending = `pending AS (
    (SELECT d.destination, d.replay, d.next_attempt_at, d.event_id FROM outbox_delivery d
     WHERE d.status = 'pending' AND d.destination >= ''
     ORDER BY d.destination, d.replay, d.next_attempt_at, d.event_id LIMIT 1)
    UNION ALL
    SELECT following.* FROM pending CROSS JOIN LATERAL (
        SELECT d.destination, d.replay, d.next_attempt_at, d.event_id FROM outbox_delivery d
        WHERE d.status = 'pending' AND d.destination > pending.destination
        ORDER BY d.destination, d.replay, d.next_attempt_at, d.event_id LIMIT 1) following
)`

// Whether a key is blocked is asked of the index of what is ordered, one key at a time: with the status alone, a plan may
// go through all that is pending for each. What waits behind a failed head, or for too long behind one that is not due, has an
// alert of its own. It is looked through up to a bound; behind that, whatever comes next counts as waiting: rather two alerts
// than none. Only live deliveries lag: replays wait by design.
//
// Heads that are not due are found from the deliveries that have waited for too long behind them. Those come first among what is due,
// however much is scheduled, and a lane that keeps up has none. The walk from such a delivery to its head goes downwards and is
// short: nothing between them was sent. Upwards it would read an index entry of everything that the key sent while vacuum is blocked.
const watchLanes = `
SELECT jsonb_agg(jsonb_build_object('destination', l.destination,
    'held', coalesce(s.paused OR s.breaker <> 'closed', false),
    'seconds', coalesce(extract(epoch FROM now() - coalesce(due.next_attempt_at, beyond.next_attempt_at)), 0),
    'event', coalesce(due.event_id, beyond.event_id, 0),
    'blocked', b.keys, 'blocked_seconds', b.seconds, 'blocked_key', b.key, 'blocked_event', b.event,
    'waiting', w.keys, 'waiting_seconds', w.seconds, 'waiting_key', w.key, 'waiting_event', w.event, 'waiting_until', w.until))
FROM pending l
LEFT JOIN outbox_destination s ON s.destination = l.destination
CROSS JOIN LATERAL (
    SELECT count(*) AS keys, coalesce(extract(epoch FROM now() - min(x.next_attempt_at)), 0) AS seconds,
           coalesce((array_agg(x.ordering_key ORDER BY x.next_attempt_at, x.event_id))[1], '') AS key,
           coalesce((array_agg(head.event_id ORDER BY x.next_attempt_at, x.event_id))[1], 0) AS event,
           coalesce((array_agg(CASE WHEN head.next_attempt_at > now() THEN to_char(head.next_attempt_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS')
                               END ORDER BY x.next_attempt_at, x.event_id))[1], '') AS until,
           coalesce(array_agg(x.ordering_key), '{}') AS all_keys
    FROM (SELECT DISTINCT ON (d.ordering_key) d.* FROM (
              SELECT d.ordering_key, d.event_id, d.next_attempt_at FROM outbox_delivery d
              WHERE NOT l.replay AND d.destination = l.destination AND d.replay = false AND d.status = 'pending'
                AND (d.next_attempt_at, d.event_id) >= (l.next_attempt_at, l.event_id) AND d.next_attempt_at <= now() - make_interval(secs => $4)
              ORDER BY d.next_attempt_at, d.event_id LIMIT 1000) d
          WHERE d.ordering_key IS NOT NULL ORDER BY d.ordering_key, d.event_id) x
    CROSS JOIN LATERAL (
        SELECT p.event_id, p.next_attempt_at FROM outbox_delivery p
        WHERE p.destination = l.destination AND p.ordering_key = x.ordering_key AND p.status = 'pending' AND p.event_id < x.event_id
        ORDER BY p.event_id DESC LIMIT 1) head
    WHERE head.next_attempt_at > now() - make_interval(secs => $4)
) w
LEFT JOIN LATERAL (
    SELECT x.next_attempt_at, x.event_id FROM (
        SELECT d.next_attempt_at, d.event_id, d.ordering_key FROM outbox_delivery d
        WHERE NOT l.replay AND d.destination = l.destination AND d.replay = false AND d.status = 'pending'
          AND (d.next_attempt_at, d.event_id) >= (l.next_attempt_at, l.event_id) AND d.next_attempt_at <= now()
        ORDER BY d.next_attempt_at, d.event_id LIMIT 1000) x
    WHERE x.ordering_key IS NULL
       OR x.ordering_key <> ALL (w.all_keys) AND (l.destination = ANY ($2::text[]) OR NOT EXISTS (
          SELECT FROM outbox_delivery h
          WHERE h.destination = l.destination AND h.ordering_key = x.ordering_key AND h.status = 'failed' AND h.event_id < x.event_id))
    ORDER BY x.next_attempt_at, x.event_id LIMIT 1
) due ON true
LEFT JOIN LATERAL (
    SELECT d.next_attempt_at, d.event_id FROM outbox_delivery d
    WHERE due.event_id IS NULL AND NOT l.replay
      AND d.destination = l.destination AND d.replay = false AND d.status = 'pending'
      AND (d.next_attempt_at, d.event_id) >= (l.next_attempt_at, l.event_id) AND d.next_attempt_at <= now()
    ORDER BY d.next_attempt_at, d.event_id OFFSET 1000 LIMIT 1
) beyond ON true
CROSS JOIN LATERAL (
    SELECT count(*) AS keys, coalesce(extract(epoch FROM now() - min(h.since)), 0) AS seconds,
           coalesce((array_agg(h.ordering_key ORDER BY h.since, h.event_id))[1], '') AS key,
           coalesce((array_agg(h.event_id ORDER BY h.since, h.event_id))[1], 0) AS event
    FROM (WITH RECURSIVE head AS (
              (SELECT f.ordering_key, f.event_id, coalesce(f.last_attempt_at, f.next_attempt_at) AS since FROM outbox_delivery f
               WHERE f.destination = l.destination AND f.ordering_key >= '' AND f.status = 'failed' AND l.destination <> ALL ($2::text[])
               ORDER BY f.ordering_key, f.event_id LIMIT 1)
              UNION ALL
              SELECT following.* FROM head CROSS JOIN LATERAL (
                  SELECT f.ordering_key, f.event_id, coalesce(f.last_attempt_at, f.next_attempt_at) FROM outbox_delivery f
                  WHERE f.destination = l.destination AND f.ordering_key > head.ordering_key AND f.status = 'failed'
                  ORDER BY f.ordering_key, f.event_id LIMIT 1) following
          ) SELECT * FROM head LIMIT 10001) h
    -- With EXISTS, a plan without statistics compares each head with all that is pending and has a key.
    CROSS JOIN LATERAL (
        SELECT FROM outbox_delivery p
        WHERE p.destination = l.destination AND p.ordering_key = h.ordering_key AND p.event_id > h.event_id AND p.status = 'pending'
        LIMIT 1) later
) b
WHERE l.destination <> ''`

// Destinations that have accepted nothing yet, with two failures or more that only a person mends. What is retried stands first among
// what is not due, or first among what is due. Whether anything was delivered is asked of the neighbouring events alone: no index
// leads to what was delivered. A destination that is held has an alert of its own.
const watchNeverDelivered = `
SELECT jsonb_agg(jsonb_build_object('destination', l.destination, 'attempts', r.attempts, 'event', r.event, 'error', coalesce(r.error, '')))
FROM pending l
CROSS JOIN LATERAL (
    SELECT sum(x.attempts) AS attempts, min(x.event_id) AS event, (array_agg(x.last_error ORDER BY x.last_attempt_at DESC))[1] AS error
    FROM ((SELECT * FROM outbox_delivery d
           WHERE NOT l.replay AND d.destination = l.destination AND d.replay = false AND d.status = 'pending' AND d.next_attempt_at > now()
           ORDER BY d.next_attempt_at, d.event_id LIMIT 100)
          UNION ALL
          (SELECT * FROM outbox_delivery d
           WHERE NOT l.replay AND d.destination = l.destination AND d.replay = false AND d.status = 'pending'
             AND (d.next_attempt_at, d.event_id) >= (l.next_attempt_at, l.event_id) AND d.next_attempt_at <= now()
           ORDER BY d.next_attempt_at, d.event_id LIMIT 100)) x
    WHERE x.last_reason IN ('unauthorized', 'not_found', 'redirect', 'dns', 'tls', 'egress')
) r
WHERE l.destination <> '' AND r.attempts >= 2
  AND NOT EXISTS (SELECT FROM outbox_destination s WHERE s.destination = l.destination AND (s.paused OR s.breaker <> 'closed'))
  AND NOT EXISTS (SELECT FROM outbox_delivery o WHERE o.event_id >= r.event - 1000 AND o.event_id <= r.event + 1000
                    AND o.destination = l.destination AND o.status = 'delivered')`

const watchParked = `
SELECT jsonb_build_object('count', (SELECT count(*) FROM (
           SELECT FROM outbox_delivery d WHERE d.destination = '' AND d.status = 'pending' LIMIT 10001) p),
       'seconds', greatest(extract(epoch FROM now() - d.next_attempt_at), 0), 'event', d.event_id,
       'type', coalesce((SELECT e.event_type FROM outbox e WHERE e.id = d.event_id), ''))
FROM outbox_delivery d WHERE d.destination = '' AND d.status = 'pending'
ORDER BY d.destination, d.replay, d.next_attempt_at, d.event_id LIMIT 1`

// Who keeps VACUUM from removing rows of this database: transactions that have changed something or hold a snapshot. A
// session that is idle in a transaction and has neither is harmless, VACUUM itself is left out by the server, and what
// relays do is bounded by their statement_timeout.
const watchHolders = `
SELECT jsonb_agg(h) FROM (
    SELECT * FROM (
        SELECT 'session' AS kind, a.pid, a.application_name AS application, a.usename AS "user", a.state,
               extract(epoch FROM now() - a.xact_start) AS seconds, extract(epoch FROM now() - a.state_change) AS state_seconds,
               '' AS name
        FROM pg_stat_activity a
        WHERE a.datname = current_database() AND (a.backend_xid IS NOT NULL OR a.backend_xmin IS NOT NULL)
          AND a.xact_start IS NOT NULL AND a.leader_pid IS NULL AND a.pid <> pg_backend_pid()
          AND a.backend_type NOT IN ('autovacuum worker', 'walsender')
          AND NOT (a.usename = current_user AND starts_with(a.application_name, current_setting('application_name')))
          AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum v WHERE v.pid = a.pid)
        UNION ALL
        SELECT 'prepared', 0, '', p.owner, '', extract(epoch FROM now() - p.prepared), 0, p.gid
        FROM pg_prepared_xacts p WHERE p.database = current_database()
    ) holders ORDER BY seconds DESC LIMIT 5
) h`

// Slots and standbys have no time at which they began to block vacuum, so what they blocked at the last look
// is remembered. So is the oldest transaction of the server, for when the session it belongs to cannot be seen.
const watchTracked = `
SELECT jsonb_agg(jsonb_build_object('kind', t.kind, 'name', t.name, 'xmin', t.xmin, 'transactions', t.transactions,
                                    'active', t.active, 'since', coalesce(before.since, now())))
FROM (
    SELECT CASE WHEN s.xmin IS NULL THEN 'catalog slot' ELSE 'slot' END AS kind, s.slot_name::text AS name,
           coalesce(s.xmin, s.catalog_xmin)::text AS xmin, age(coalesce(s.xmin, s.catalog_xmin))::bigint AS transactions, s.active
    FROM pg_replication_slots s
    WHERE s.xmin IS NOT NULL OR s.catalog_xmin IS NOT NULL AND s.database = current_database()
    UNION ALL
    SELECT 'standby', coalesce(r.application_name, '') || ' ' || coalesce(host(r.client_addr), 'local'), r.backend_xmin::text,
           age(r.backend_xmin)::bigint, true
    FROM pg_stat_replication r WHERE r.backend_xmin IS NOT NULL
    UNION ALL
    SELECT 'unseen', '', pg_snapshot_xmin(now.snapshot)::text,
           (pg_snapshot_xmax(now.snapshot)::text::numeric - pg_snapshot_xmin(now.snapshot)::text::numeric)::bigint, true
    FROM (SELECT pg_current_snapshot() AS snapshot) now
) t
LEFT JOIN jsonb_to_recordset(coalesce(nullif(w.sample -> 'tracked', 'null'), '[]')) AS before (kind text, name text, xmin text, since timestamptz)
    ON before.kind = t.kind AND before.name = t.name AND before.xmin = t.xmin`

const watchLockWaits = `
WITH locks AS MATERIALIZED (
    SELECT l.pid, l.granted, l.waitstart, l.relation, l.database FROM pg_locks l
)
SELECT count(DISTINCT waiting.pid)
FROM locks waiting
WHERE NOT waiting.granted AND waiting.waitstart < clock_timestamp() - interval '1 second' AND EXISTS (
    SELECT FROM locks held
    WHERE held.pid = waiting.pid AND held.relation = ANY (` + watchedTables + `::regclass[]::oid[])
      AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database()))`

// One relay looks, the others read what it saw. The subselects run only where the row is updated. The lock of the row keeps
// two from looking at once: unlike an advisory lock, no login without rights on the table can take it.
const TakeWatch = `
WITH RECURSIVE ` + firstPending + `, due AS MATERIALIZED (
    SELECT ctid FROM outbox_watch WHERE watched_at <= now() - make_interval(secs => $1) FOR NO KEY UPDATE SKIP LOCKED
), watched AS (
    UPDATE outbox_watch w SET watched_at = now(), sample = jsonb_build_object(
        'database', current_database(),
        'lanes', (` + watchLanes + `),
        'parked', (` + watchParked + `),
        'never_delivered', (` + watchNeverDelivered + `),
        'undelivered', (SELECT jsonb_build_object('count', cardinality(u.missing), 'event', u.missing[1])
                        FROM outbox_undelivered u WHERE u.missing <> '{}'),
        'holders', (` + watchHolders + `),
        'tracked', (` + watchTracked + `),
        'hidden', (SELECT count(*) FROM pg_stat_activity a
                   WHERE a.datname = current_database() AND a.query = '<insufficient privilege>'),
        'dead', (SELECT jsonb_object_agg(t, pg_stat_get_dead_tuples(t::regclass)) FROM unnest(` + watchedTables + `) t),
        'lock_waits', (` + watchLockWaits + `),
        'unserved', (SELECT jsonb_agg(u) FROM (` + pg.UnservedOf + `) u),
        'rescues', (SELECT jsonb_build_object('relays', count(*))
                    FROM (SELECT FROM outbox_rescue WHERE at > now() - make_interval(secs => $3) LIMIT 1001) r),
        'alerts', (SELECT jsonb_agg(jsonb_build_object('rule', a.rule, 'subject', a.subject, 'failed', a.rule = 'failed' AND EXISTS (
                       SELECT FROM outbox_delivery f WHERE f.destination = a.subject AND f.status = 'failed'),
                       'left', CASE a.rule
                           WHEN 'breaker_open' THEN NOT EXISTS (SELECT FROM outbox_route r WHERE r.destination = a.subject)
                               AND NOT EXISTS (SELECT FROM outbox_delivery p WHERE p.destination = a.subject AND p.status = 'pending')
                           -- Not at once, or a relay that came and went would never be reported.
                           WHEN 'routes_changed' THEN a.last_at < now() - interval '10 seconds' AND NOT ` + pg.RelaysDisagree + `
                           ELSE false END))
                   FROM (SELECT rule, subject, last_at FROM outbox_alert WHERE resolved_at IS NULL LIMIT 1001) a))
    WHERE w.ctid = ANY (ARRAY (SELECT ctid FROM due))
    RETURNING w.watched_at, w.sample
)
SELECT true, watched_at, sample, now(), EXISTS (SELECT FROM outbox_alert) FROM watched
UNION ALL
SELECT false, greatest(watched_at, now() - interval '24 hours'), sample, now(), EXISTS (SELECT FROM outbox_alert) FROM outbox_watch WHERE NOT EXISTS (SELECT FROM watched)`

// take looks around the database, or returns what another relay saw if that is not older than the given age. lenient are
// the destinations where a failed delivery does not block its ordering key. alerts reports whether there is any alert,
// also of those that are over.
func (w *Watcher) take(ctx context.Context, age time.Duration, lenient []string, limits alert.Config) (seen sample, alerts bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	if lenient == nil {
		lenient = []string{}
	}
	var content []byte
	err = w.DB.QueryRow(ctx, TakeWatch, age.Seconds(), lenient, limits.Window.Seconds(), limits.LagOver.Seconds()).
		Scan(&seen.own, &seen.at, &content, &seen.now, &alerts)
	if err != nil {
		return sample{}, false, fmt.Errorf("look around the database: %w", err)
	}
	if err := json.Unmarshal(content, &seen); err != nil {
		return sample{}, false, fmt.Errorf("look around the database: %w", err)
	}
	return seen, alerts, nil
}

// A condition that lasts is news only when it has become twice as bad. What another relay has told since the look may be
// more than what the look saw, and is not ended by it.
const applyConditions = `
WITH fired AS (
    INSERT INTO outbox_alert AS a (rule, subject, level, detail, first_event_id)
    SELECT rule, subject, level, detail, nullif(event_id, 0)
    FROM unnest($1::text[], $2::text[], $3::bigint[], $4::text[], $5::bigint[]) AS f (rule, subject, level, detail, event_id)
    ON CONFLICT (rule, subject) DO UPDATE
    SET last_at = now(), detail = excluded.detail,
        count = a.count + (a.resolved_at IS NOT NULL OR excluded.level >= 2 * greatest(a.level, 1))::int,
        level = CASE WHEN a.resolved_at IS NOT NULL OR excluded.level >= 2 * greatest(a.level, 1) THEN excluded.level ELSE a.level END,
        first_event_id = CASE WHEN a.resolved_at IS NOT NULL THEN excluded.first_event_id ELSE a.first_event_id END
)
UPDATE outbox_alert a SET resolved_at = now()
FROM unnest($6::text[], $7::text[]) AS e (rule, subject)
WHERE a.rule = e.rule AND a.subject = e.subject AND a.resolved_at IS NULL AND a.last_at <= $8`

// applyConditions opens an alert, or keeps it open, for every condition that holds, and resolves those that ended by the
// time of the look.
func (w *Watcher) applyConditions(ctx context.Context, hold []condition, ended []subject, at time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	rules, subjects, details := make([]string, 0, len(hold)), make([]string, 0, len(hold)), make([]string, 0, len(hold))
	levels, events := make([]int64, 0, len(hold)), make([]int64, 0, len(hold))
	for _, c := range hold {
		rules, subjects, details = append(rules, c.Rule), append(subjects, c.Subject), append(details, c.detail)
		levels, events = append(levels, c.level), append(events, c.event)
	}
	endedRules, endedSubjects := make([]string, 0, len(ended)), make([]string, 0, len(ended))
	for _, e := range ended {
		endedRules, endedSubjects = append(endedRules, e.Rule), append(endedSubjects, e.Subject)
	}
	_, err := w.DB.Exec(ctx, applyConditions, rules, subjects, levels, details, events, endedRules, endedSubjects, at)
	if err != nil {
		return fmt.Errorf("apply conditions: %w", err)
	}
	return nil
}
