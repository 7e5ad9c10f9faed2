package claim

import (
	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
)

// A delivery with an ordering key is claimed by its key alone: the first pending one behind the
// key's floor, if no failed or parked one stands before it, together with those that follow it
// without a gap. LIMIT bounds both. The floor keeps dead index entries from being read again and
// again while a long transaction blocks vacuum. It does not count once another relay has taken a
// range: that may have an event below it, which was committed late.
//
// The empty destination, that of parked deliveries, stands in a subquery: the planner would see a
// constant, choose the small index of parked deliveries, and read all of it for each key.
//
// A head that may have killed relays comes alone, or what follows would be suspected with it.
//
// What a claim takes waits behind nothing any more, and neither does the next delivery of the key,
// which becomes its head: it must be found by any relay if this one dies. What waits behind a head
// that cannot be sent for a while is reported; see package waiting.
//
// One that joined its key when it became due is not clear while an open range that was taken before
// has events of the key: these have no rows, and come first. It is reported too.
const claimKeys = `
WITH claimant AS MATERIALIZED (` + claimant + ` FOR KEY SHARE
), ` + intake.KeysInHand + `, newest AS MATERIALIZED (
    SELECT seq FROM outbox_range ORDER BY seq DESC LIMIT 1
), lane AS MATERIALIZED (
    SELECT l.*, coalesce(s.reordered, 0) AS reordered_now, s.parked_after
    FROM unnest($4::text[], $5::int[], $6::bool[], $7::float8[], $8::bigint[], $9::int[], $10::int[])
        WITH ORDINALITY AS l (destination, run, skip_failed, promised_for, reordered, first_key, last_key, number)
    LEFT JOIN LATERAL (SELECT * FROM outbox_destination s WHERE s.destination = l.destination LIMIT 1) s ON true
    WHERE EXISTS (SELECT FROM claimant) AND ` + pg.IsHeld + ` IS NOT TRUE
), key AS MATERIALIZED (
    SELECT lane.number, lane.destination, lane.run, lane.promised_for, k.ordering_key, k.floor, barrier.joined AS barrier_joined, barrier.event_id AS barrier
    FROM lane
    CROSS JOIN LATERAL (
        SELECT n.ordering_key, CASE WHEN lane.reordered = lane.reordered_now AND (SELECT seq FROM newest) = $13::bigint THEN n.floor ELSE -9223372036854775808 END AS floor
        FROM unnest(($11::text[])[lane.first_key:lane.last_key], ($12::bigint[])[lane.first_key:lane.last_key]) AS n (ordering_key, floor)
    ) k
    LEFT JOIN LATERAL (
        SELECT * FROM (
            (SELECT f.joined, f.event_id FROM outbox_delivery f
             WHERE NOT lane.skip_failed AND f.destination = lane.destination AND f.ordering_key = k.ordering_key AND f.status = 'failed'
               AND (f.joined, f.event_id) > (0, k.floor)
             ORDER BY f.joined, f.event_id LIMIT 1)
            UNION ALL
            (SELECT p.joined, p.event_id FROM outbox_delivery p
             WHERE lane.parked_after IS NOT NULL AND p.destination = (SELECT '') AND p.ordering_key = k.ordering_key AND p.status = 'pending'
               AND p.joined = 0 AND p.event_id > lane.parked_after
             ORDER BY p.joined, p.event_id LIMIT 1)) b
        ORDER BY b.joined, b.event_id LIMIT 1
    ) barrier ON true
), run AS MATERIALIZED (
    SELECT key.number, key.ordering_key, key.promised_for, key.barrier, key.barrier_joined, r.*,
           ((r.joined, r.event_id) < (key.barrier_joined, key.barrier)) IS NOT FALSE AS unblocked
    FROM key
    CROSS JOIN LATERAL (
        SELECT y.*, lag(y.fits) OVER (ORDER BY y.joined, y.event_id) AS follows
        FROM (
            SELECT x.*, row_number() OVER w AS nth, coalesce(lag(x.event_id) OVER w, 0) AS before,
                   bool_and(x.free AND x.clear AND x.next_attempt_at <= now()) OVER w
                       AND (row_number() OVER w = 1 OR bool_and(x.rescues < 3) OVER w AND row_number() OVER w <= key.run) AS fits
            FROM (
                SELECT d.ctid AS place, d.event_id, d.rescues, d.next_attempt_at, d.blocked_by, d.joined, ` + pg.IsFree + ` AS free,
                       CASE WHEN d.joined = 0 OR (hashtext(key.ordering_key) IN (SELECT h.hash FROM hand h)) IS NOT TRUE THEN true
                            ELSE NOT EXISTS (SELECT FROM hand h WHERE h.hash = hashtext(key.ordering_key) AND h.seq << 22 < d.joined) END AS clear
                FROM outbox_delivery d
                WHERE d.destination = key.destination AND d.ordering_key = key.ordering_key AND d.status = 'pending'
                  AND d.joined IS NOT NULL AND (d.joined, d.event_id) > (0, key.floor)
                ORDER BY d.joined, d.event_id LIMIT key.run + 1
            ) x
            WINDOW w AS (ORDER BY x.joined, x.event_id ROWS UNBOUNDED PRECEDING)
        ) y
    ) r
), heir AS MATERIALIZED (
    SELECT d.ctid AS place FROM (SELECT * FROM run WHERE follows AND NOT fits AND unblocked AND blocked_by IS NOT NULL) c, outbox_delivery d
    WHERE d.ctid = c.place AND CASE WHEN d.event_id = c.event_id THEN d.blocked_by IS NOT NULL END
    FOR UPDATE OF d SKIP LOCKED
), released AS (
    UPDATE outbox_delivery SET blocked_by = NULL WHERE ctid = ANY (ARRAY (SELECT place FROM heir))
), locked AS MATERIALIZED (
    SELECT c.number, c.before, now() + make_interval(secs => c.promised_for) AS promise, d.ctid AS place, d.claimed_by IS NOT NULL AS was_claimed
    FROM (SELECT number, before, promised_for, place, event_id FROM run WHERE fits AND unblocked) c` + lockFound + `
` + claimLocked + `array_agg(number), array_agg(CASE WHEN unblocked THEN event_id ELSE barrier END), array_agg(ordering_key), NULL,
       array_agg(NOT unblocked OR free AND next_attempt_at > now() + interval '1 second'), NULL, NULL,
       array_agg(CASE WHEN unblocked THEN joined ELSE barrier_joined END), array_agg(NOT clear)
FROM run WHERE nth = 1 AND NOT (fits AND unblocked)
UNION ALL
SELECT number, reordered_now, 0, (SELECT seq FROM newest), 0, 0, 0, NULL, 0, false, NULL, false, false, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, now(),
       NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM lane WHERE reordered_now <> reordered OR (SELECT seq FROM newest) <> $13
UNION ALL
SELECT number, 0, 0, 0, 0, 0, 0, NULL, 0, false, NULL, false, false, NULL, NULL, NULL, ordering_key, NULL, NULL, NULL, NULL, NULL, now(),
       NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM key asked WHERE (hashtext(ordering_key) IN (SELECT h.hash FROM hand h)) IS TRUE`

func (c *claimReader) queueKeys(queries *pgx.Batch, relayID int32) {
	a := newKeyArguments(c.requests)
	if len(a.keys) == 0 {
		return
	}
	queries.Queue(claimKeys, append(append([]any{relayID, c.lease.Seconds(), lane.InlinePayload}, a.columns()...), c.after)...).Query(func(rows pgx.Rows) error {
		return c.read(rows, func(r *claimedRow) {
			switch {
			case r.number == nil:
				for i, request := range r.seen.numbers {
					c.result.heads = append(c.result.heads, keyHead{
						a.requests[request-1], *r.seen.keys[i], ordering.Place{Joined: *r.seen.joined[i], Event: r.seen.eventIDs[i]}, r.seen.beyond[i], r.seen.waits[i],
					})
				}
			case r.EventID == 0 && r.Event.OrderingKey != nil:
				if c.result.inHand == nil {
					c.result.inHand = map[ordering.Key]bool{}
				}
				c.result.inHand[ordering.Key{Destination: a.destinations[*r.number-1], Key: *r.Event.OrderingKey}] = true
			case r.EventID == 0:
				if c.result.reordered == nil {
					c.result.reordered = map[int]int64{}
				}
				c.result.reordered[a.requests[*r.number-1]], c.result.newest = r.After, r.Joined
			default:
				r.Destination = a.destinations[*r.number-1]
				c.result.Deliveries = append(c.result.Deliveries, r.Delivery)
			}
		})
	})
}

// keyArguments are the ordering keys of a claim as columns: those of each request, and of each key.
// The keys of a request are a slice of theirs.
type keyArguments struct {
	requests          []int // the index of each
	destinations      []string
	runs              []int32
	skipFailed        []bool
	promises          []float64
	reordered         []int64
	firstKey, lastKey []int32

	keys   []string
	floors []int64
}

// headAlone is the [Request.Run] of a claim that does not read what follows the first delivery of a
// key, either: that may be what fails it.
const headAlone = -1

func newKeyArguments(requests []Request) (a keyArguments) {
	for i, r := range requests {
		if len(r.Keys) == 0 {
			continue
		}
		a.requests, a.destinations = append(a.requests, i), append(a.destinations, r.Destination)
		run := max(r.Run, 1)
		if r.Run == headAlone {
			run = 0
		}
		a.runs = append(a.runs, int32(run))
		a.skipFailed = append(a.skipFailed, r.skipFailed)
		a.promises = append(a.promises, r.Promise.Seconds())
		a.reordered = append(a.reordered, r.reordered)
		a.firstKey = append(a.firstKey, int32(len(a.keys)+1))
		for _, k := range r.Keys {
			a.keys, a.floors = append(a.keys, k.Key), append(a.floors, k.Floor)
		}
		a.lastKey = append(a.lastKey, int32(len(a.keys)))
	}
	return a
}

// columns returns the parameters of the statement from the fourth on.
func (a *keyArguments) columns() []any {
	return []any{a.destinations, a.runs, a.skipFailed, a.promises, a.reordered, a.firstKey, a.lastKey, a.keys, a.floors}
}
