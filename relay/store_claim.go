package relay

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outbox-relay/outbox-relay/relay/pg"
)

// A claimRequest is what a claim wants for one destination.
type claimRequest struct {
	destination string
	scans       []scan
	keys        []readyKey
	run         int           // how many deliveries of one ordering key may come together; 0: one
	skipFailed  bool          // a failed delivery does not block its ordering key
	promise     time.Duration // from now until when a delivery that is claimed for the first time may be sent
	reordered   int64         // of the destination, when the floors of the keys were learnt
}

// A scan is the part of the due deliveries of one class that a claim reads.
type scan struct {
	class class
	free  int    // how many deliveries without an ordering key it may bring
	after keyset // zero: from the very front
	until keyset // zero: to the end
	back  bool   // it looks once at what the walk of its class has passed
}

// A readyKey is an ordering key whose next delivery may be claimed.
type readyKey struct {
	key   string
	class class // of what was found waiting
	floor int64 // every delivery of the key up to this event is settled; see floors
}

// A claimResult is what a claim found.
type claimResult struct {
	at         time.Time // the database's
	deliveries []delivery
	scans      []scanResult  // of all scans of all requests, in their order
	heads      []keyHead     // of keys that were asked for and brought nothing
	reordered  map[int]int64 // by the index of a request, where it differs
}

// A scanResult says how far a scan came.
type scanResult struct {
	last keyset // the last delivery it looked at; zero: there was none
	more bool   // there may be due deliveries behind last
	keys []foundKey

	unread bool // it was put off
}

// A foundKey is an ordering key of which a scan saw a delivery that waits, the earliest one it saw.
type foundKey struct {
	key     string
	eventID int64
}

// A keyHead is where the unsettled deliveries of an ordering key begin.
type keyHead struct {
	request int
	key     string
	eventID int64
}

// scanExtra is how many deliveries a scan may look at beyond those it may bring: with an ordering key, or claimed already.
const scanExtra = 100

// A claim reads a bounded number of rows, whatever the history of a lane or of an ordering key.
//
// A scan walks the due index. It takes deliveries without an ordering key; of the others it only notes the keys. A delivery
// with an ordering key is claimed by its key alone: the first pending one behind the key's floor, if no failed or parked
// one stands before it, together with those that follow it without a gap. LIMIT bounds both. The floor keeps dead index
// entries from being read again and again while a long transaction blocks vacuum.
//
// The rows are locked in a materialised step and then updated by where they lie. Locking inside "IN (SELECT … LIMIT …)"
// may run again for each row and claim more than its limit; joining back by key can flip to a scan of the table. LIMIT
// keeps the lookup of each event a lookup: a plan that was made when outbox was small may otherwise read all of it.
//
// A claim keeps its relay's row from being deleted until it has committed, so that a rescue, which deletes the row
// first, waits for a claim that its dead relay left running; and it takes nothing once the row is gone.
//
// The fence grows with the clock: after a crash of the database that lost claims, no number is given out twice.
//
// A head that may have killed relays comes alone, or what follows would be suspected with it.
//
// The promise is made here and not by the settle: a relay that dies between request and settle would leave nothing of it,
// and the next one, perhaps much later, would promise the receiver what it no longer remembers. A settle that knows that
// the receiver was told nothing takes it back.
const claimDue = `
WITH claimant AS MATERIALIZED (
    SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS fence FROM outbox_relay WHERE instance = $1 FOR KEY SHARE
), lane AS MATERIALIZED (
    SELECT l.*, now() + make_interval(secs => l.promised_for) AS promise, coalesce(s.reordered, 0) AS reordered_now, s.parked_after
    FROM unnest($2::text[], $3::int[], $4::bool[], $5::float8[], $6::bigint[], $7::int[], $8::int[], $9::int[], $10::int[])
        WITH ORDINALITY AS l (destination, run, skip_failed, promised_for, reordered, first_scan, last_scan, first_key, last_key, number)
    LEFT JOIN LATERAL (SELECT * FROM outbox_destination s WHERE s.destination = l.destination LIMIT 1) s ON true
    WHERE EXISTS (SELECT FROM claimant) AND (s.paused OR s.breaker = 'open' OR s.breaker_owner <> $1) IS NOT TRUE
), seen AS MATERIALIZED (
    SELECT lane.first_scan + scan.number - 1 AS scan, scan.free, lane.promise, d.*
    FROM lane
    CROSS JOIN LATERAL unnest(($11::bool[])[lane.first_scan:lane.last_scan], ($12::int[])[lane.first_scan:lane.last_scan],
        ($13::timestamptz[])[lane.first_scan:lane.last_scan], ($14::bigint[])[lane.first_scan:lane.last_scan],
        ($15::timestamptz[])[lane.first_scan:lane.last_scan], ($16::bigint[])[lane.first_scan:lane.last_scan])
        WITH ORDINALITY AS scan (replay, free, after_at, after_id, until_at, until_id, number)
    CROSS JOIN LATERAL (
        SELECT x.*, lead(x.taken) OVER (ORDER BY x.next_attempt_at, x.event_id) AS taken_next
        FROM (
          SELECT x.*, row_number() OVER w AS nth, count(*) FILTER (WHERE x.available AND x.ordering_key IS NULL) OVER w AS taken
          FROM (
            SELECT d.ctid AS place, d.event_id, d.next_attempt_at, d.ordering_key,
                   ` + pg.IsFree + ` AS available
            FROM outbox_delivery d
            WHERE d.destination = lane.destination AND d.replay = scan.replay AND d.status = 'pending'
              AND (d.next_attempt_at, d.event_id) > (scan.after_at, scan.after_id)
              AND (d.next_attempt_at, d.event_id) <= (least(scan.until_at, now()), scan.until_id)
            ORDER BY d.next_attempt_at, d.event_id
            LIMIT scan.free + $20
          ) x
          WINDOW w AS (ORDER BY x.next_attempt_at, x.event_id ROWS UNBOUNDED PRECEDING)
        ) x
    ) d
), key AS MATERIALIZED (
    SELECT lane.number AS lane, lane.destination, lane.run, lane.promise, k.ordering_key, k.floor, least(failed.event_id, parked.event_id) AS barrier
    FROM lane
    CROSS JOIN LATERAL (
        SELECT n.ordering_key, CASE WHEN lane.reordered = lane.reordered_now THEN n.floor ELSE -9223372036854775808 END AS floor
        FROM unnest(($17::text[])[lane.first_key:lane.last_key], ($18::bigint[])[lane.first_key:lane.last_key]) AS n (ordering_key, floor)
    ) k
    LEFT JOIN LATERAL (
        SELECT f.event_id FROM outbox_delivery f
        WHERE NOT lane.skip_failed AND f.destination = lane.destination AND f.ordering_key = k.ordering_key AND f.status = 'failed' AND f.event_id > k.floor
        ORDER BY f.event_id LIMIT 1
    ) failed ON true
    LEFT JOIN LATERAL (
        SELECT p.event_id FROM outbox_delivery p
        WHERE lane.parked_after IS NOT NULL AND p.destination = '' AND p.ordering_key = k.ordering_key AND p.status = 'pending' AND p.event_id > lane.parked_after
        ORDER BY p.event_id LIMIT 1
    ) parked ON true
), run AS MATERIALIZED (
    SELECT key.lane, key.ordering_key, key.promise, least(r.event_id, key.barrier) AS begins, r.place, r.event_id, r.nth, r.before,
           r.sendable AND (r.event_id < key.barrier) IS NOT FALSE AS sendable
    FROM key
    CROSS JOIN LATERAL (
        SELECT x.place, x.event_id, row_number() OVER w AS nth, coalesce(lag(x.event_id) OVER w, 0) AS before,
               bool_and(x.available) OVER w AND (row_number() OVER w = 1 OR bool_and(x.rescues < 3) OVER w) AS sendable
        FROM (
            SELECT d.ctid AS place, d.event_id, d.rescues, d.next_attempt_at <= now() AND ` + pg.IsFree + ` AS available
            FROM outbox_delivery d
            WHERE d.destination = key.destination AND d.ordering_key = key.ordering_key AND d.status = 'pending' AND d.event_id > key.floor
            ORDER BY d.event_id LIMIT key.run
        ) x
        WINDOW w AS (ORDER BY x.event_id ROWS UNBOUNDED PRECEDING)
    ) r
), locked AS MATERIALIZED (
    SELECT c.scan, c.before, c.promise, d.place
    FROM (
        SELECT scan, 0::bigint AS before, promise, place, event_id FROM seen WHERE available AND ordering_key IS NULL AND taken <= free
        UNION ALL
        SELECT 0, before, promise, place, event_id FROM run WHERE sendable
    ) c
    CROSS JOIN LATERAL (
        SELECT d.ctid AS place FROM outbox_delivery d
        WHERE d.ctid = c.place AND d.event_id = c.event_id AND d.status NOT IN ('delivered', 'failed', 'discarded')
          AND d.next_attempt_at <= now() AND ` + pg.IsFree + `
        FOR UPDATE OF d SKIP LOCKED
    ) d
), claimed AS (
    UPDATE outbox_delivery d
    SET claim = greatest(d.claim + 1, (SELECT fence FROM claimant)), claimed_by = $1, lease_expires_at = now() + make_interval(secs => $19),
        rescues = ` + rescuesAfterClaim + `, not_after = coalesce(d.not_after, l.promise)
    FROM locked l WHERE d.ctid = l.place
    RETURNING d.event_id, d.destination, d.claim, d.attempts, d.rescues, d.next_attempt_at, d.payload_bytes, d.replay,
              d.not_after, d.not_after = l.promise AS promised, l.scan, l.before
)
SELECT 'delivery', c.scan, c.event_id, c.destination, c.claim, c.attempts, c.rescues, c.next_attempt_at, c.payload_bytes, c.replay,
       c.not_after, c.promised, c.before, ` + wasLost + `,
       e.event_type, e.event_version, e.idempotency_key, e.ordering_key, e.related_reference,
       nullif(e.headers, '{}'), e.created_at, CASE WHEN c.payload_bytes <= $21 THEN e.payload END, now()
FROM claimed c LEFT JOIN LATERAL (SELECT * FROM outbox WHERE id = c.event_id LIMIT 1) e ON true
UNION ALL
SELECT 'scan', scan, event_id, '', 0, 0, 0, next_attempt_at, 0, taken_next IS NOT NULL OR nth = free + $20, NULL, false, 0, false,
       NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, now()
FROM seen WHERE taken <= free AND (taken_next > free) IS NOT FALSE
UNION ALL
SELECT 'key', scan, event_id, '', 0, 0, 0, now(), 0, false, NULL, false, 0, false, NULL, NULL, NULL, ordering_key, NULL, NULL, NULL, NULL, now()
FROM (SELECT scan, ordering_key, min(event_id) AS event_id FROM seen WHERE taken <= free AND available AND ordering_key IS NOT NULL GROUP BY 1, 2) k
UNION ALL
SELECT 'head', lane, begins, '', 0, 0, 0, now(), 0, false, NULL, false, 0, false, NULL, NULL, NULL, ordering_key, NULL, NULL, NULL, NULL, now()
FROM run WHERE nth = 1 AND NOT sendable
UNION ALL
SELECT 'reordered', number, reordered_now, '', 0, 0, 0, now(), 0, false, NULL, false, 0, false, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, now()
FROM lane WHERE reordered_now <> reordered
UNION ALL
SELECT 'time', 0, 0, '', 0, 0, 0, now(), 0, false, NULL, false, 0, false, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, now()`

// claim leases, for every request, at most the free deliveries of each scan that have no ordering key, and the next of each of
// its keys with those that follow it. The deliveries are returned in the order in which they became due.
func (s *store) claim(ctx context.Context, instance int32, lease time.Duration, requests []claimRequest) (result claimResult, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	args := newClaimArguments(requests)
	// Lease and promise are counted from before the statement, so that this clock's view of them ends before the database's.
	begun := time.Now()
	rows, err := s.pool.Query(ctx, claimDue, append([]any{instance}, append(args.columns(), lease.Seconds(), scanExtra, inlinePayload)...)...)
	if err != nil {
		return claimResult{}, fmt.Errorf("claim: %w", err)
	}
	defer rows.Close()
	result.scans = make([]scanResult, len(args.free))
	for rows.Next() {
		var kind string
		var number int
		var notAfter pgtype.Timestamptz
		d := delivery{leaseEnds: begun.Add(lease)}
		e := &d.event
		if err := rows.Scan(&kind, &number, &d.eventID, &d.destination, &d.fence, &d.attempts, &d.rescues, &d.nextAttemptAt, &d.payloadBytes,
			&d.replay, &notAfter, &d.promised, &d.after, &d.lost, &e.EventType, &e.Version, &e.Key, &e.OrderingKey, &e.RelatedReference, &e.Headers,
			&e.CreatedAt, &e.Payload, &result.at); err != nil {
			return claimResult{}, fmt.Errorf("claim: %w", err)
		}
		switch kind {
		case "delivery":
			d.scan, d.notAfter = number, notAfter.Time
			d.promiseEnds = begun.Add(d.notAfter.Sub(result.at))
			result.deliveries = append(result.deliveries, d)
		case "scan":
			result.scans[number-1].last, result.scans[number-1].more = d.place(), d.replay
		case "key":
			result.scans[number-1].keys = append(result.scans[number-1].keys, foundKey{*e.OrderingKey, d.eventID})
		case "head":
			result.heads = append(result.heads, keyHead{request: number - 1, key: *e.OrderingKey, eventID: d.eventID})
		case "reordered":
			if result.reordered == nil {
				result.reordered = map[int]int64{}
			}
			result.reordered[number-1] = d.eventID
		}
	}
	if err := rows.Err(); err != nil {
		return claimResult{}, fmt.Errorf("claim: %w", err)
	}
	slices.SortFunc(result.deliveries, func(a, b delivery) int { return a.place().compare(b.place()) })
	return result, nil
}

// claimArguments are the requests of a claim as columns. Scans and keys of a request are a slice of their columns.
type claimArguments struct {
	destinations                           []string
	runs                                   []int32
	skipFailed                             []bool
	promises                               []float64
	reordered                              []int64
	firstScan, lastScan, firstKey, lastKey []int32

	replay           []bool
	free             []int32
	afterAt, untilAt []pgtype.Timestamptz
	afterID, untilID []int64

	keys   []string
	floors []int64
}

func newClaimArguments(requests []claimRequest) (a claimArguments) {
	for _, r := range requests {
		a.destinations = append(a.destinations, r.destination)
		a.runs = append(a.runs, int32(max(r.run, 1)))
		a.skipFailed = append(a.skipFailed, r.skipFailed)
		a.promises = append(a.promises, r.promise.Seconds())
		a.reordered = append(a.reordered, r.reordered)
		a.firstScan, a.firstKey = append(a.firstScan, int32(len(a.free)+1)), append(a.firstKey, int32(len(a.keys)+1))
		for _, s := range r.scans {
			a.replay = append(a.replay, s.class == replays)
			a.free = append(a.free, int32(s.free))
			a.afterAt, a.afterID = append(a.afterAt, s.after.bound(pgtype.NegativeInfinity)), append(a.afterID, s.after.id)
			until := s.until
			if until == (keyset{}) {
				until.id = math.MaxInt64
			}
			a.untilAt, a.untilID = append(a.untilAt, s.until.bound(pgtype.Infinity)), append(a.untilID, until.id)
		}
		for _, k := range r.keys {
			a.keys, a.floors = append(a.keys, k.key), append(a.floors, k.floor)
		}
		a.lastScan, a.lastKey = append(a.lastScan, int32(len(a.free))), append(a.lastKey, int32(len(a.keys)))
	}
	return a
}

// columns returns the parameters of the statement in their order.
func (a *claimArguments) columns() []any {
	return []any{
		a.destinations, a.runs, a.skipFailed, a.promises, a.reordered, a.firstScan, a.lastScan, a.firstKey, a.lastKey,
		a.replay, a.free, a.afterAt, a.afterID, a.untilAt, a.untilID, a.keys, a.floors,
	}
}
