package watch

import (
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
)

// firstPending is the first due delivery of every destination with pending ones, found by skipping
// through the hot index: live deliveries stand before replays there, and parked ones, whose
// destination is empty, first of all. A destination where everything waits behind a head has no
// such delivery, only its name. A statement finds them once, and nothing in it reads in front of
// them again: while vacuum is blocked, what was delivered still stands there, entry by entry.
const firstPending = `pending (destination, replay, next_attempt_at, event_id) AS (
    SELECT first.* FROM (SELECT * FROM (
        (SELECT d.destination, d.replay, d.next_attempt_at, d.event_id FROM outbox_delivery d
         WHERE ` + pg.IsDue + ` AND d.destination >= ''
         ORDER BY d.destination, d.replay, d.next_attempt_at, d.event_id LIMIT 1)
        UNION ALL
        (SELECT d.destination, NULL, NULL, NULL FROM outbox_delivery d WHERE ` + pg.IsWaiting + ` ORDER BY d.destination LIMIT 1)) x
        ORDER BY x.destination, x.event_id LIMIT 1) first
    UNION ALL
    SELECT following.* FROM pending CROSS JOIN LATERAL (SELECT * FROM (
        (SELECT d.destination, d.replay, d.next_attempt_at, d.event_id FROM outbox_delivery d
         WHERE ` + pg.IsDue + ` AND d.destination > pending.destination
         ORDER BY d.destination, d.replay, d.next_attempt_at, d.event_id LIMIT 1)
        UNION ALL
        (SELECT d.destination, NULL, NULL, NULL FROM outbox_delivery d
         WHERE ` + pg.IsWaiting + ` AND d.destination > pending.destination ORDER BY d.destination LIMIT 1)) x
        ORDER BY x.destination, x.event_id LIMIT 1) following
)`

// Lag is the part of a WITH RECURSIVE that says since when each destination lags, as lag
// (destination, since, event_id), and how many events are not routed yet, as [intake.Untaken],
// which says what has to come before. The statement says in "lenient", as for [Blocked], where a
// failed delivery blocks nothing. It is the only definition of lag: status, page and metrics
// show it, and alerts count of it what nothing held, see countedLag (store.go). A destination lags
// since
//
//   - its oldest due delivery that no earlier one of its ordering key blocks was due, of the first
//     1,000. What waits behind a head stands among what is due until a relay has marked it, so the
//     one before it is looked up. That one is next to it in the index. Only before the first that
//     nothing blocks dead entries may stand, and there the search ends. Replays do not count, since
//     they wait by design;
//   - or the oldest event was available that a route leads there and that is not taken yet, or is
//     stuck in a relay's hand. Events of the last second are on their way. The 100 types of event
//     that have waited for longest are compared with the routes.
const Lag = firstPending + `, ` + intake.Untaken + `, ` + intake.Stuck + `, lag (destination, since, event_id) AS MATERIALIZED (
    SELECT DISTINCT ON (c.destination) c.destination, c.since, c.event_id FROM (
        SELECT p.destination, x.since, x.event_id FROM pending p CROSS JOIN LATERAL (
            SELECT z.next_attempt_at AS since, z.event_id
            FROM (SELECT d.ordering_key, d.joined, d.next_attempt_at, d.event_id FROM outbox_delivery d
                  WHERE d.destination = p.destination AND d.replay = false AND ` + pg.IsDue + `
                    AND (d.next_attempt_at, d.event_id) >= (p.next_attempt_at, p.event_id) AND d.next_attempt_at <= now()
                  ORDER BY d.next_attempt_at, d.event_id LIMIT 1000) z
            WHERE z.ordering_key IS NULL OR (
                    SELECT k.event_id FROM outbox_delivery k
                    WHERE k.destination = p.destination AND k.ordering_key = z.ordering_key AND k.status = 'pending' AND k.joined IS NOT NULL
                      AND (k.joined, k.event_id) < (z.joined, z.event_id)
                    ORDER BY k.joined DESC, k.event_id DESC LIMIT 1) IS NULL AND (
                    SELECT f.event_id FROM outbox_delivery f
                    WHERE p.destination NOT IN (SELECT l.destination FROM lenient l)
                      AND f.destination = p.destination AND f.ordering_key = z.ordering_key AND f.status = 'failed'
                      AND (f.joined, f.event_id) < (z.joined, z.event_id)
                    ORDER BY f.joined DESC, f.event_id DESC LIMIT 1) IS NULL
            ORDER BY z.next_attempt_at, z.event_id LIMIT 1) x
        WHERE p.destination <> '' AND NOT p.replay AND p.next_attempt_at <= now()
        UNION ALL
        SELECT r.destination, t.since, t.event_id FROM (
            SELECT u.event_type, min(u.at) AS since, (array_agg(u.id ORDER BY u.at, u.id))[1] AS event_id
            FROM (SELECT * FROM untaken UNION ALL SELECT * FROM stuck) u WHERE u.at <= now() - interval '1 second' GROUP BY u.event_type ORDER BY since LIMIT 100) t
        CROSS JOIN LATERAL (SELECT o.destination FROM outbox_route o WHERE t.event_type LIKE o.like_pattern OFFSET 0) r
    ) c ORDER BY c.destination, c.since, c.event_id
)`

// Blocked is a subselect of a FROM, behind a "lane (destination)", of the ordering keys that wait
// there behind a failed delivery: how many, up to 10,001, for how many seconds at most (since the
// failure, or since the next delivery was due if that is later), and the three that have waited for
// longest, as JSON. The statement says in "lenient (destination)" where
// a failed delivery blocks nothing; [Lenient] is what the relay that looked last has configured. It
// is the only definition, like that of [Lag]. With EXISTS, a plan without statistics compares each
// head with all that is pending and has a key.
const Blocked = `LATERAL (
    SELECT count(*) AS keys, coalesce(extract(epoch FROM now() - min(later.since)), 0)::float8 AS seconds,
           coalesce(to_jsonb((array_agg(jsonb_build_object('key', h.ordering_key, 'event_id', h.event_id::text, 'reason', coalesce(h.last_reason, ''))
                                        ORDER BY later.since, h.event_id))[1:3]), '[]') AS heads
    FROM (WITH RECURSIVE head AS (
              (SELECT f.ordering_key, f.joined, f.event_id, f.last_reason, coalesce(f.last_attempt_at, f.next_attempt_at) AS since FROM outbox_delivery f
               WHERE f.destination = lane.destination AND f.ordering_key >= '' AND f.status = 'failed'
                 AND lane.destination NOT IN (SELECT destination FROM lenient)
               ORDER BY f.ordering_key, f.joined, f.event_id LIMIT 1)
              UNION ALL
              SELECT following.* FROM head CROSS JOIN LATERAL (
                  SELECT f.ordering_key, f.joined, f.event_id, f.last_reason, coalesce(f.last_attempt_at, f.next_attempt_at) FROM outbox_delivery f
                  WHERE f.destination = lane.destination AND f.ordering_key > head.ordering_key AND f.status = 'failed'
                  ORDER BY f.ordering_key, f.joined, f.event_id LIMIT 1) following
          ) SELECT * FROM head LIMIT 10001) h
    CROSS JOIN LATERAL (
        SELECT least(greatest(h.since, p.next_attempt_at), now()) AS since FROM outbox_delivery p
        WHERE p.destination = lane.destination AND p.ordering_key = h.ordering_key AND p.status = 'pending' AND p.joined IS NOT NULL
          AND (p.joined, p.event_id) > (h.joined, h.event_id)
        ORDER BY p.joined, p.event_id LIMIT 1) later
)`

// Lenient is the part of a WITH that names the destinations where a failed delivery blocks nothing,
// as the relay that looked last has them in its configuration.
const Lenient = `lenient AS MATERIALIZED (
    SELECT jsonb_array_elements_text(coalesce(nullif(w.sample -> 'lenient', 'null'), '[]')) AS destination FROM outbox_watch w
)`

const watchUntaken = `
SELECT jsonb_build_object('count', count(*), 'seconds', coalesce(extract(epoch FROM now() - min(u.created_at)), 0)) FROM untaken u`
