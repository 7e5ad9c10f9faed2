package watch

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// The tables that the watcher looks after.
const watchedTables = `ARRAY['outbox'::regclass, 'outbox_delivery'::regclass, 'outbox_attempt'::regclass, 'outbox_destination'::regclass, 'outbox_relay'::regclass, 'outbox_alert'::regclass]`

// What waits behind a failed head, or for too long behind one that is not due, has an alert of its
// own: the heads are found by skipping from one to the next in the index of what waits, and of what
// follows each the first ten are looked at.
const watchLanes = `
SELECT jsonb_agg(jsonb_build_object('destination', l.destination,
    'held', coalesce(s.paused OR s.breaker <> 'closed', false),
    'paused', CASE WHEN s.paused THEN extract(epoch FROM now() - s.paused_at) ELSE 0 END, 'paused_reason', coalesce(s.paused_reason, ''),
    'seconds', coalesce(extract(epoch FROM now() - g.since), 0), 'event', coalesce(g.event_id, 0),
    'blocked', b.keys, 'blocked_seconds', b.seconds, 'blocked_key', coalesce(b.heads -> 0 ->> 'key', ''),
    'blocked_event', coalesce((b.heads -> 0 ->> 'event_id')::bigint, 0),
    'waiting', w.keys, 'waiting_seconds', w.seconds, 'waiting_key', w.key, 'waiting_event', w.event, 'waiting_until', w.until))
FROM (SELECT destination FROM pending UNION SELECT destination FROM lag) l
LEFT JOIN lag g ON g.destination = l.destination
LEFT JOIN outbox_destination s ON s.destination = l.destination
CROSS JOIN LATERAL (
    SELECT count(*) AS keys, coalesce(extract(epoch FROM now() - min(x.next_attempt_at)), 0) AS seconds,
           coalesce((array_agg(x.ordering_key ORDER BY x.next_attempt_at, x.event_id))[1], '') AS key,
           coalesce((array_agg(x.blocked_by ORDER BY x.next_attempt_at, x.event_id))[1], 0) AS event,
           coalesce((array_agg(CASE WHEN head.next_attempt_at > now() THEN to_char(head.next_attempt_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS')
                               END ORDER BY x.next_attempt_at, x.event_id))[1], '') AS until
    FROM (WITH RECURSIVE head AS (
              (SELECT d.blocked_by FROM outbox_delivery d
               WHERE d.destination = l.destination AND ` + pg.IsWaiting + `
               ORDER BY d.blocked_by, d.event_id LIMIT 1)
              UNION ALL
              SELECT following.* FROM head CROSS JOIN LATERAL (
                  SELECT d.blocked_by FROM outbox_delivery d
                  WHERE d.destination = l.destination AND ` + pg.IsWaiting + ` AND d.blocked_by > head.blocked_by
                  ORDER BY d.blocked_by, d.event_id LIMIT 1) following
          ) SELECT * FROM head LIMIT 1001) y
    CROSS JOIN LATERAL (
        SELECT * FROM (
            SELECT d.blocked_by, d.event_id, d.ordering_key, d.next_attempt_at FROM outbox_delivery d
            WHERE d.destination = l.destination AND ` + pg.IsWaiting + ` AND d.blocked_by = y.blocked_by
            ORDER BY d.blocked_by, d.event_id LIMIT 10) f
        ORDER BY f.next_attempt_at, f.event_id LIMIT 1) x
    CROSS JOIN LATERAL (
        SELECT h.next_attempt_at, h.status FROM outbox_delivery h WHERE h.event_id = x.blocked_by AND h.destination = l.destination LIMIT 1) head
    WHERE x.next_attempt_at <= now() - make_interval(secs => $4)
      AND head.status NOT IN ('delivered', 'failed', 'discarded') AND head.next_attempt_at > now() - make_interval(secs => $4)
) w
CROSS JOIN LATERAL (SELECT l.destination) lane
CROSS JOIN ` + Blocked + ` b
WHERE l.destination <> ''`

// failingLanes is the part of a WITH of what was attempted in vain at each destination, apart by
// whether only a person fixes that. What is retried stands first among what is not due, or first
// among what is due. A destination that is held has its own alert.
const failingLanes = `failing AS MATERIALIZED (
    SELECT l.destination, r.*, (SELECT min(t.started_at) FROM (
        SELECT started_at FROM outbox_attempt WHERE event_id = r.event AND destination = l.destination ORDER BY claim DESC LIMIT r.most) t) AS since
    FROM pending l
    CROSS JOIN LATERAL (
        SELECT x.last_reason IN ('unauthorized', 'not_found', 'redirect', 'dns', 'tls', 'egress') AS person, sum(x.attempts) AS attempts, max(x.attempts) AS most,
               min(x.event_id) AS event, max(x.last_attempt_at) AS last, array_agg(x.last_attempt_at) AS attempted,
               (array_agg(x.last_error ORDER BY x.last_attempt_at DESC))[1] AS error
        FROM ((SELECT * FROM outbox_delivery d
               WHERE NOT l.replay AND d.destination = l.destination AND d.replay = false AND ` + pg.IsDue + ` AND d.next_attempt_at > now()
               ORDER BY d.next_attempt_at, d.event_id LIMIT 100)
              UNION ALL
              (SELECT * FROM outbox_delivery d
               WHERE NOT l.replay AND d.destination = l.destination AND d.replay = false AND ` + pg.IsDue + `
                 AND (d.next_attempt_at, d.event_id) >= (l.next_attempt_at, l.event_id) AND d.next_attempt_at <= now()
               ORDER BY d.next_attempt_at, d.event_id LIMIT 100)) x
        WHERE x.attempts > 0 AND x.last_reason NOT IN ('shutdown', 'lease')
        GROUP BY person
    ) r
    WHERE l.destination <> '' AND r.attempts >= 2
      AND NOT EXISTS (SELECT FROM outbox_destination s WHERE s.destination = l.destination AND (s.paused OR s.breaker <> 'closed'))
)`

// Destinations with two failures or more that only a person fixes, or three of one event where
// others arrived before: what is retried may be over soon. Whether anything was delivered is asked
// of the neighbouring events alone: no index leads to what was delivered.
const watchMisconfigured = `
SELECT jsonb_agg(jsonb_build_object('destination', r.destination, 'attempts', r.attempts, 'event', r.event, 'error', coalesce(r.error, ''),
    'seconds', coalesce(extract(epoch FROM now() - r.since), 0)))
FROM failing r
WHERE r.person AND NOT EXISTS (SELECT FROM outbox_delivery o WHERE o.event_id >= r.event - 1000 AND o.event_id <= r.event + 1000
                    AND o.destination = r.destination AND o.status = 'delivered' AND (r.most < 3 OR o.delivered_at > r.last))`

// Destinations that have accepted nothing for $4 seconds, and two minutes at least, though what
// fails there may be over by itself. One delivery that fails between others that are accepted is no
// such destination: it counts if nothing was accepted since its first attempt, and two or more if
// nothing was since the latest of each. When something was accepted last is known from the history,
// to the minute, and from events that are near the first or among the newest.
const watchFailing = `
SELECT jsonb_agg(jsonb_build_object('destination', r.destination, 'attempts', r.attempts, 'event', r.event, 'error', coalesce(r.error, ''),
    'seconds', extract(epoch FROM now() - greatest(r.since, a.accepted))))
FROM failing r
CROSS JOIN LATERAL (
    SELECT greatest((SELECT h.at + interval '1 minute' FROM outbox_history h
                     WHERE h.step = 1 AND h.destination = r.destination AND h.event_type = '' AND h.delivered > 0 ORDER BY h.at DESC LIMIT 1),
                    (SELECT max(o.delivered_at) FROM outbox_delivery o
                     WHERE o.event_id >= r.event - 1000 AND o.event_id <= r.event + 1000 AND o.destination = r.destination),
                    (SELECT max(o.delivered_at) FROM outbox_delivery o
                     WHERE o.event_id > (SELECT n.event_id FROM outbox_delivery n ORDER BY n.event_id DESC LIMIT 1) - 1000 AND o.destination = r.destination)) AS accepted
) a
WHERE NOT r.person AND greatest(r.since, a.accepted) < now() - make_interval(secs => greatest($4, 120))
  AND ((a.accepted > r.since) IS NOT TRUE OR (SELECT count(*) FROM unnest(r.attempted) t (at) WHERE t.at > a.accepted) >= 2)`

// Relays of one host have one name: each is then told apart by its number.
const namedRelays = `(SELECT id, reload_error, reload_failed_at,
    name || CASE WHEN count(*) OVER (PARTITION BY name) > 1 THEN ' (id ' || id || ')' ELSE '' END AS name FROM outbox_relay)`

// Whose settings of a destination differ: the relays of each digest. Relays that serve the same
// with the same settings cost one comparison.
const watchDiffer = `
SELECT jsonb_agg(jsonb_build_object('destination', x.destination, 'secrets', x.secrets, 'relays', x.relays) ORDER BY x.destination)
FROM (
    SELECT g.destination, count(DISTINCT g.settings) = 1 AS secrets, jsonb_agg(g.relays ORDER BY g.relays) AS relays
    FROM (SELECT d.destination, d.settings, array_agg(r.name ORDER BY r.name) AS relays
          FROM outbox_relay_destination d JOIN ` + namedRelays + ` r ON r.id = d.relay_id
          WHERE d.settings <> '' GROUP BY d.destination, d.settings, d.secrets) g
    GROUP BY g.destination HAVING count(*) > 1 ORDER BY g.destination LIMIT 100
) x
WHERE (SELECT count(*) FROM outbox_relay) > 1`

// Differences lists the destinations of which relays have different settings.
func Differences(ctx context.Context, q pg.DB) ([]Difference, error) {
	return rows.Value[[]Difference](ctx, q, "compare relays", watchDiffer)
}

// RefusedAlone is true of a row d of outbox_relay_destination whose relay lives and is refused,
// while another relay that lives may be accepted. No other relay may if one was refused in the same
// way since, with too few events to hold the destination. The beginning of an error, such as a
// status, says in which way.
const RefusedAlone = `(d.refused_at IS NOT NULL AND EXISTS (SELECT FROM outbox_relay r WHERE r.id = d.relay_id AND ` + pg.IsAlive + `)
    AND EXISTS (SELECT FROM outbox_relay_destination o JOIN outbox_relay r ON r.id = o.relay_id
                WHERE o.destination = d.destination AND o.refused_at IS NULL AND r.quarantined IS NULL AND ` + pg.IsAlive + `)
    AND NOT EXISTS (SELECT FROM outbox_destination s WHERE s.destination = d.destination AND s.breaker <> 'closed')
    AND NOT EXISTS (SELECT FROM (SELECT * FROM outbox_attempt ORDER BY id DESC LIMIT 1000) a
                    WHERE a.destination = d.destination AND a.relay_id <> d.relay_id AND a.started_at >= d.refused_at
                      AND left(a.error, 3) = left(d.refused_error, 3)))`

// Which relays a destination refuses alone.
const watchRefusals = `
SELECT jsonb_agg(jsonb_build_object('destination', x.destination, 'relays', x.relays, 'error', x.error, 'seconds', x.seconds) ORDER BY x.destination)
FROM (
    SELECT d.destination, array_agg(r.name ORDER BY r.name) AS relays, (array_agg(d.refused_error ORDER BY d.refused_at DESC))[1] AS error,
           extract(epoch FROM now() - min(d.refused_at)) AS seconds
    FROM outbox_relay_destination d JOIN ` + namedRelays + ` r ON r.id = d.relay_id
    WHERE ` + RefusedAlone + `
    GROUP BY d.destination ORDER BY d.destination LIMIT 100
) x`

// Refusals lists the destinations that refuse some relays while another relay may be accepted.
func Refusals(ctx context.Context, q pg.DB) ([]Refusal, error) {
	return rows.Value[[]Refusal](ctx, q, "compare relays", watchRefusals)
}

const watchParked = `
SELECT jsonb_build_object('count', (SELECT count(*) FROM (
           SELECT FROM outbox_delivery d WHERE d.destination = '' AND d.status = 'pending' LIMIT 10001) p),
       'seconds', greatest(extract(epoch FROM now() - d.next_attempt_at), 0), 'event', d.event_id,
       'type', coalesce((SELECT e.event_type FROM outbox e WHERE e.id = d.event_id), ''))
FROM outbox_delivery d WHERE d.destination = '' AND ` + pg.IsDue + `
ORDER BY d.destination, d.replay, d.next_attempt_at, d.event_id LIMIT 1`

// Who keeps VACUUM from removing rows of this database: transactions that have changed something or
// hold a snapshot. A session that is idle in a transaction and has neither is harmless, VACUUM
// itself is left out by the server, and what relays do is bounded by their statement_timeout.
const watchVacuumBlockers = `
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
    ) blockers ORDER BY seconds DESC LIMIT 5
) h`

// Slots and standbys have no time at which they began to block vacuum, so what they blocked at the
// last look is remembered. So is the oldest transaction of the server, for when the session it
// belongs to cannot be seen.
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
    WHERE held.pid = waiting.pid AND held.relation = ANY (` + watchedTables + `::oid[])
      AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database()))`

// countedLag is for how long the oldest due delivery of each destination has waited while nothing
// held it. The time between two looks counts if neither found the destination held. The wait that
// it asks for counts, a minute at most at a time: no other alert tells of a receiver that takes too
// little. The time does not count if no relay looked for long, or could not ($6): the database was
// away, or every relay. Where only an older relay has looked, all counts.
const countedLag = `
SELECT jsonb_object_agg(l.destination, CASE WHEN w.sample -> 'counted' IS NULL THEN l.seconds
    ELSE least(l.seconds, coalesce((w.sample -> 'counted' ->> l.destination)::float8, 0)
        + CASE WHEN $6 AND NOT l.held AND NOT w.sample -> 'held' @> to_jsonb(l.destination) AND w.watched_at > now() - interval '5 minutes'
               THEN greatest(0, extract(epoch FROM now() - w.watched_at)) ELSE 0 END) END)
FROM lanes, jsonb_to_recordset(lanes.list) AS l (destination text, seconds float8, held boolean)
WHERE l.seconds > 0`

// lookParts is the WITH of newSample, which reads what is needed of the last one from a row w of
// outbox_watch.
const lookParts = `
WITH RECURSIVE most AS MATERIALIZED (SELECT 10001 AS events), lenient AS MATERIALIZED (SELECT unnest($2::text[]) AS destination), ` + Lag + `, ` + failingLanes + `,
lanes AS MATERIALIZED (SELECT (` + watchLanes + `) AS list)`

const newSample = `jsonb_build_object(
        'database', current_database(),
        'lenient', (SELECT jsonb_agg(l.destination) FROM lenient l),
        'terms', $5::jsonb,
        'lanes', (SELECT list FROM lanes),
        'counted', (` + countedLag + `),
        'held', (SELECT coalesce(jsonb_agg(l.destination), '[]') FROM lanes, jsonb_to_recordset(lanes.list) AS l (destination text, held boolean) WHERE l.held),
        'untaken', (` + watchUntaken + `),
        'parked', (` + watchParked + `),
        'misconfigured', (` + watchMisconfigured + `),
        'failing', (` + watchFailing + `),
        'undelivered', (SELECT jsonb_build_object('count', cardinality(u.missing), 'event', u.missing[1])
                        FROM outbox_undelivered u WHERE u.missing <> '{}'),
        'holders', (` + watchVacuumBlockers + `),
        'tracked', (` + watchTracked + `),
        'hidden', (SELECT count(*) FROM pg_stat_activity a
                   WHERE a.datname = current_database() AND a.query = '<insufficient privilege>'),
        'dead', (SELECT jsonb_object_agg(t.relname, pg_stat_get_dead_tuples(t.oid)) FROM pg_class t WHERE t.oid = ANY (` + watchedTables + `::oid[])),
        'lock_waits', (` + watchLockWaits + `),
        'unserved', (SELECT jsonb_agg(u) FROM (` + pg.UnservedOf + `) u),
        'refused', (SELECT jsonb_agg(jsonb_build_object('relay', r.name, 'error', r.reload_error, 'seconds', extract(epoch FROM now() - r.reload_failed_at)))
                    FROM ` + namedRelays + ` r WHERE r.reload_error IS NOT NULL),
        'differ', (` + watchDiffer + `),
        'refusals', (` + watchRefusals + `),
        'archive', jsonb_build_object('at', w.archived_at, 'error', coalesce(w.archive_error, '')),
        'rescues', (SELECT jsonb_build_object('relays', count(*))
                    FROM (SELECT FROM outbox_rescue WHERE at > now() - make_interval(secs => $3) LIMIT 1001) r),
        'alerts', (SELECT jsonb_agg(jsonb_build_object('rule', a.rule, 'subject', a.subject, 'failed', a.rule = 'failed' AND EXISTS (
                       SELECT FROM outbox_delivery f WHERE f.destination = a.subject AND f.status = 'failed'),
                       'event', coalesce(a.first_event_id, 0), 'last_at', a.last_at,
                       'left', CASE a.rule
                           -- A destination that was removed, also if deliveries are left that the alert unserved tells of; or an operator's reset that was right.
                           WHEN 'breaker_open' THEN NOT EXISTS (SELECT FROM outbox_route r WHERE r.destination = a.subject)
                               AND (NOT EXISTS (SELECT FROM (VALUES (a.subject)) ` + pg.PendingOf + `)
                                    OR EXISTS (SELECT FROM outbox_alert u WHERE u.rule = 'unserved' AND u.subject = a.subject AND u.resolved_at IS NULL AND u.opened_at < now() - interval '10 seconds'))
                               OR a.last_at < now() - CASE WHEN EXISTS (SELECT FROM (VALUES (a.subject)) ` + pg.PendingOf + `) THEN interval '1 minute' ELSE interval '10 seconds' END
                               AND NOT EXISTS (SELECT FROM outbox_destination d WHERE d.destination = a.subject AND d.breaker <> 'closed')
                           WHEN 'reconcile' THEN NOT EXISTS (SELECT FROM outbox_route r WHERE r.destination = a.subject)
                           -- Not at once, or a relay that came and went would never be reported.
                           WHEN 'routes_changed' THEN a.last_at < now() - interval '10 seconds' AND NOT ` + pg.RelaysDisagree + `
                           ELSE false END))
                   FROM (SELECT rule, subject, last_at, first_event_id FROM outbox_alert WHERE resolved_at IS NULL LIMIT 1001) a))`

// One relay looks, the others read what it saw. The subselects run only where the row is updated.
// The lock of the row keeps two from looking at once: unlike an advisory lock, no login without
// rights on the table can take it. A look in the future was taken before the clock was set back.
const TakeWatch = lookParts + `, due AS MATERIALIZED (
    SELECT ctid FROM outbox_watch WHERE watched_at <= now() - make_interval(secs => $1) OR watched_at > now() + interval '10 seconds' FOR NO KEY UPDATE SKIP LOCKED
), watched AS (
    UPDATE outbox_watch w SET watched_at = now(), sample = ` + newSample + `
    WHERE w.ctid = ANY (ARRAY (SELECT ctid FROM due))
    RETURNING w.watched_at, w.sample
)
SELECT true, watched_at, sample, now() FROM watched
UNION ALL
SELECT false, greatest(watched_at, now() - interval '24 hours'), sample, now() FROM outbox_watch WHERE NOT EXISTS (SELECT FROM watched)`

// take looks around the database, or returns what another relay saw if that is not older than the
// given age. lenient are the destinations where a failed delivery does not block its ordering key.
func (w *Watcher) take(ctx context.Context, age time.Duration, lenient []string, t terms) (seen sample, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	var own bool
	var at, now time.Time
	err = w.DB.QueryRow(ctx, TakeWatch, age.Seconds(), lenient, stormWithin.Seconds(), t.LagOverSeconds, t.encode(), !w.interrupted.Load()).
		Scan(&own, &at, &seen, &now) // seen is replaced as a whole
	if w.interrupted.Store(err != nil); err != nil {
		return sample{}, fmt.Errorf("look around the database: %w", err)
	}
	seen.own, seen.at, seen.now = own, at, now
	return seen, nil
}

const inspectWatch = lookParts + `
SELECT now(), ` + newSample + ` FROM outbox_watch w WHERE w.watched_at <= now() - make_interval(secs => $1)`

const selectTerms = `SELECT coalesce(sample -> 'terms', 'null'), ARRAY(SELECT jsonb_array_elements_text(coalesce(nullif(sample -> 'lenient', 'null'), '[]'))) FROM outbox_watch`

// inspect returns what a look would see now. It returns false if a look has just seen it, or if no
// relay has said by which limits to look.
func inspect(ctx context.Context, q pg.DB) (seen sample, known bool, err error) {
	var t *terms
	var lenient []string
	if err := q.QueryRow(ctx, selectTerms).Scan(&t, &lenient); err != nil || t == nil {
		return sample{}, false, ignoreNoRows(err)
	}
	var at time.Time
	err = q.QueryRow(ctx, inspectWatch, freshFor.Seconds(), lenient, stormWithin.Seconds(), t.LagOverSeconds, t.encode(), true).Scan(&at, &seen)
	if err != nil {
		return sample{}, false, ignoreNoRows(err)
	}
	seen.at = at
	return seen, true, nil
}

const selectRelaysDisagree = `SELECT ` + pg.RelaysDisagree

// relaysDisagree reports whether a relay is configured without some of the stored routes.
func relaysDisagree(ctx context.Context, q pg.DB) (bool, error) {
	return pg.Value[bool](ctx, q, "compare routes", selectRelaysDisagree)
}

func ignoreNoRows(err error) error {
	if err == nil || errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	return fmt.Errorf("inspect the database: %w", err)
}

// What another relay has found since the look may be more than what the look saw, and is not ended
// by it. What was found in the future was found before the clock was set back. A hold that an
// operator's reset has ended, ended at that time, which is the last one of its alert.
const applyConditions = `
WITH fired AS (
    INSERT INTO outbox_alert AS a (rule, subject, level, detail, first_event_id, first_error, opened_at, began_at)
    SELECT rule, subject, level, detail, nullif(event_id, 0), nullif(error, ''), now() - make_interval(secs => age), now() - make_interval(secs => age)
    FROM unnest($1::text[], $2::text[], $3::bigint[], $4::text[], $5::bigint[], $6::text[], $7::float8[]) AS f (rule, subject, level, detail, event_id, error, age)
    ON CONFLICT (rule, subject) DO UPDATE
    SET last_at = now(), detail = excluded.detail, level = excluded.level, resolved_at = NULL,
        first_error = coalesce(excluded.first_error, a.first_error),
        opened_at = CASE WHEN a.resolved_at IS NOT NULL THEN excluded.opened_at ELSE a.opened_at END,
        first_event_id = CASE WHEN a.resolved_at IS NOT NULL THEN excluded.first_event_id ELSE a.first_event_id END
)
UPDATE outbox_alert a
SET detail = CASE WHEN a.rule = 'breaker_open' AND NOT EXISTS (SELECT FROM outbox_relay_destination s WHERE s.destination = a.subject)
                  THEN 'it was removed, no running relay has it' ELSE a.detail END,
    resolved_at = CASE WHEN a.rule = 'breaker_open' AND EXISTS (SELECT FROM outbox_destination d WHERE d.destination = a.subject AND d.breaker = 'closed')
                       THEN least(a.last_at, now()) ELSE now() END
FROM unnest($8::text[], $9::text[], $10::timestamptz[]) AS e (rule, subject, last_at)
WHERE a.rule = e.rule AND a.subject = e.subject AND a.resolved_at IS NULL AND a.last_at = e.last_at`

// applyConditions opens an alert, or keeps it open and true, for every condition that holds, and
// resolves those that have ended, unless they were noted again since the look: perhaps by a
// transaction that began before it.
func (w *Watcher) applyConditions(ctx context.Context, hold []condition, ended []alertSample) error {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	var f struct {
		rules, subjects, details, errors []string
		levels, events                   []int64
		ages                             []float64
	}
	for _, c := range hold {
		f.rules, f.subjects, f.details, f.errors = append(f.rules, c.Rule), append(f.subjects, c.Subject), append(f.details, c.detail), append(f.errors, c.failure)
		f.levels, f.events, f.ages = append(f.levels, c.level), append(f.events, c.event), append(f.ages, max(0, c.age.Seconds()))
	}
	var endedRules, endedSubjects []string
	var endedAt []time.Time
	for _, e := range ended {
		endedRules, endedSubjects, endedAt = append(endedRules, e.Rule), append(endedSubjects, e.Subject), append(endedAt, e.LastAt)
	}
	_, err := w.DB.Exec(ctx, applyConditions, f.rules, f.subjects, f.levels, f.details, f.events, f.errors, f.ages, endedRules, endedSubjects, endedAt)
	if err != nil {
		return fmt.Errorf("apply conditions: %w", err)
	}
	return nil
}
