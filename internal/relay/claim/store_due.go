package claim

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/capacity"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
)

// A Request is what a claim wants for one destination.
type Request struct {
	Destination string
	Scans       []lane.Scan
	Keys        []lane.ReadyKey
	Run         int           // how many deliveries of one ordering key may come together; 0: one
	skipFailed  bool          // a failed delivery does not block its ordering key
	Promise     time.Duration // from now until when a delivery that is claimed for the first time may be sent
	reordered   int64         // of the destination, when the floors of the keys were learnt
	only        []int64       // the events that scans may claim; nil: all
	reads       int32         // how many rows each scan may read; 0: as it says
}

// A Result is what a claim found.
type Result struct {
	at         time.Time // the database's
	Deliveries []lane.Delivery
	scans      []lane.ScanResult     // of all scans of all requests, in their order
	heads      []keyHead             // of keys that were asked for and brought nothing
	reordered  map[int]int64         // by the index of a request, where it differs
	newest     int64                 // the last range, if it is not that of the floors and keys were asked for; 0: it is
	inHand     map[ordering.Key]bool // of the keys that were asked for: an open range may have events of them
	apart      bool                  // it was found by several statements, which have seen different rows
	contended  bool                  // another session held the front's lock, so that shared scans have read nothing
	free       []int64               // what scans told which events to claim (only) could claim of these
}

// A keyHead is where the unsettled deliveries of an ordering key begin.
type keyHead struct {
	request int
	key     string
	place   ordering.Place
	holds   bool // it has failed, is parked, or is not due for a while: what waits behind it need not be found again
	waits   bool // for events of the key that are in hand
}

// A claim reads a bounded number of rows, whatever the history of a lane or of an ordering key.
//
// The rows are locked in a materialised step and then updated by their ctid. Locking inside "IN
// (SELECT … LIMIT …)" may run again for each row and claim more than its limit; a join by key can
// become a scan of the table. LIMIT keeps the lookup of each event a lookup: a plan that was made
// when outbox was small may otherwise read all of it.
//
// A claim keeps its relay's row from being deleted until it has committed, so that a rescue, which
// deletes the row first, waits for a claim that its dead relay left running; and it takes nothing
// once the row is gone. A claim that finds nothing locks nothing, and writes nothing.
//
// The fence grows with the clock: after a crash of the database that lost claims, no number is
// given out twice. It is odd; that of a range is even (pg.IsFree).
//
// The claim writes the promise, before the request that makes it: otherwise a relay that dies
// between request and settle would leave no trace of it, and the next one would make a later
// promise. A settle takes it back if no request reached the receiver.
const (
	claimant = `
    SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS fence FROM outbox_relay WHERE id = $1`

	// lockFound locks the deliveries d of the candidates c that are still free, all in one node of
	// the plan: with one node for each, PostgreSQL prepares again (30 µs) for each row that another
	// relay has claimed meanwhile. CASE makes ctid the only way to a row. Conditions on d alone let
	// a plan that was made on a small table read all of a large one.
	lockFound = `, outbox_delivery d
    WHERE d.ctid = c.place AND CASE WHEN d.event_id = c.event_id
        THEN d.status NOT IN ('delivered', 'failed', 'discarded') AND d.next_attempt_at <= now() AND ` + pg.IsFree + ` END
    FOR UPDATE OF d SKIP LOCKED`

	// claimLocked claims the locked rows and returns them with their events. A value that is longer
	// than its rule allows is cut, as by a take.
	claimLocked = `
), claimed AS (
    UPDATE outbox_delivery d
    SET claim = greatest(d.claim + 1, (SELECT fence FROM claimant)) | 1, claimed_by = $1, lease_expires_at = now() + make_interval(secs => $2),
        rescues = ` + rescuesAfterClaim + `, not_after = coalesce(d.not_after, l.promise), blocked_by = NULL
    FROM locked l WHERE d.ctid = l.place
    RETURNING l.number, l.before, l.was_claimed, d.event_id, d.joined, d.claim, d.attempts, d.rescues, d.next_attempt_at, d.payload_bytes, d.replay,
              d.not_after, d.not_after = l.promise AS promised
)
SELECT c.number, c.before, c.event_id, c.joined, c.claim, c.attempts, c.rescues, c.next_attempt_at, c.payload_bytes, c.replay, c.not_after, c.promised,
       c.was_claimed, e.event_type, e.event_version, e.idempotency_key, left(e.ordering_key, 256), left(e.related_reference, 256),
       left(nullif(e.headers, '{}')::text, 8193), e.created_at, greatest(e.created_at::timestamptz, e.available_at), CASE WHEN c.payload_bytes <= $3 THEN e.payload END, now(),
       NULL::bigint[], NULL::bigint[], NULL::text[], NULL::timestamptz[], NULL::boolean[], NULL::bigint[], NULL::boolean, NULL::bigint[], NULL::boolean[]
FROM claimed c LEFT JOIN LATERAL (SELECT * FROM outbox WHERE id = c.event_id LIMIT 1) e ON true
UNION ALL
SELECT NULL::bigint, coalesce((SELECT fence FROM claimant), 0), 0::bigint, 0::bigint, 0::bigint, 0, 0::smallint, NULL::timestamptz, 0, false, NULL::timestamptz, false, false,
       NULL::text COLLATE "C", NULL::integer, NULL::text COLLATE "C", NULL::text COLLATE "C", NULL::text, NULL::text, NULL::timestamptz, NULL::timestamptz, NULL::json, now(),
       `
)

// Claim leases, for every request, at most the free deliveries of each scan that have no ordering
// key, and the next of each of its keys with those that follow it, in one transaction. The
// deliveries are returned in the order in which they became due.
func (c *Rows) Claim(ctx context.Context, relayID int32, requests []Request) (Result, error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	// Lease and promise are counted from before the statement, so that this clock's view of them
	// ends before the database's.
	reader := claimReader{requests: requests, begun: time.Now(), lease: c.Lease, after: c.floors.Range}
	reader.result.Deliveries = make([]lane.Delivery, 0, c.claimed)
	var queries pgx.Batch
	reader.queueKeys(&queries, relayID) // first, or the scans would find the same keys
	reader.queueDue(&queries, relayID)
	if err := c.DB.SendBatch(ctx, &queries).Close(); err != nil {
		return Result{}, fmt.Errorf("claim: %w", err)
	}
	c.claimed = len(reader.result.Deliveries)
	slices.SortFunc(reader.result.Deliveries, func(a, b lane.Delivery) int { return a.Place().Compare(b.Place()) })
	return reader.result, nil
}

// A claimReader collects the result of a claim.
type claimReader struct {
	requests []Request
	begun    time.Time
	lease    time.Duration
	after    int64 // the range of the floors
	result   Result
}

// A claimedRow is a row of either statement: a delivery, with the number of its scan or request,
// or, without a number, what the scans saw.
type claimedRow struct {
	lane.Delivery
	number     *int64
	wasClaimed bool
	seen       struct {
		numbers, eventIDs []int64
		keys              []*string
		dueAt             []pgtype.Timestamptz
		beyond            []bool   // the scan has no room for it; of a head: it holds
		read              []int64  // its position within its scan; negative: it is in flight
		contended         *bool    // another session holds the front's lock
		joined            []*int64 // nil: it has not joined its key
		waits             []bool   // of a head: for events of the key that are in hand
	}
}

// read calls each with every row, which it must not keep.
func (c *claimReader) read(rows pgx.Rows, each func(r *claimedRow)) error {
	var r claimedRow
	var notAfter pgtype.Timestamptz
	e, seen := &r.Event, &r.seen
	into := []any{
		&r.number, &r.After, &r.EventID, &r.Joined, &r.Fence, &r.Attempts, &r.Rescues, &r.NextAttemptAt, &r.PayloadBytes, &r.Replay,
		&notAfter, &r.Promised, &r.wasClaimed, &e.EventType, &e.Version, &e.Key, &e.OrderingKey, &e.RelatedReference, &e.Headers,
		&e.CreatedAt, &r.FirstDue, &e.Payload, &c.result.at, &seen.numbers, &seen.eventIDs, &seen.keys, &seen.dueAt, &seen.beyond, &seen.read, &seen.contended,
		&seen.joined, &seen.waits,
	}
	for rows.Next() {
		r = claimedRow{}
		if err := rows.Scan(into...); err != nil {
			return err
		}
		r.LeaseEnds = c.begun.Add(c.lease)
		r.Lost = r.wasClaimed && r.Rescues >= capacity.SuspectFrom
		r.NotAfter, r.PromiseEnds = notAfter.Time, c.begun.Add(notAfter.Time.Sub(c.result.at))
		each(&r)
	}
	return rows.Err()
}

// ClaimDue claims for the scans. A scan reads the index of due deliveries. It takes those without
// an ordering key, and only notes the keys of the others. It passes deliveries in flight, but
// returns the last one that it may read: this is how far it came.
const ClaimDue = `
WITH front AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock(427020085613 # 'outbox_delivery'::regclass::oid::bigint) AS mine
), scan AS MATERIALIZED (
    SELECT *
    FROM unnest($4::int[], $5::text[], $6::bool[], $7::int[], $8::timestamptz[], $9::bigint[], $10::timestamptz[], $11::bigint[], $12::float8[],
                $13::int[], $14::bool[])
        WITH ORDINALITY AS asked (candidates, destination, replay, free, after_at, after_id, until_at, until_id, promised_for, reads, shared, number)
    WHERE (NOT asked.shared OR (SELECT mine FROM front)) AND (SELECT ` + pg.IsHeld + ` FROM outbox_destination s WHERE s.destination = asked.destination LIMIT 1) IS NOT TRUE
), seen AS MATERIALIZED (
    SELECT scan.number, scan.free, scan.promised_for, d.*
    FROM scan
    CROSS JOIN LATERAL (
        SELECT y.*
        FROM (
            SELECT x.*, count(*) FILTER (WHERE x.available AND x.ordering_key IS NULL) OVER w AS taken, row_number() OVER w AS read
            FROM (
                SELECT d.ctid AS place, d.event_id, d.next_attempt_at, d.ordering_key, d.joined, ` + pg.IsFree + ` AS available
                FROM outbox_delivery d
                WHERE d.destination = scan.destination AND d.replay = scan.replay AND ` + pg.IsDue + `
                  AND (d.next_attempt_at, d.event_id) > (scan.after_at, scan.after_id)
                  AND (d.next_attempt_at, d.event_id) <= (least(scan.until_at, now()), scan.until_id)
                ORDER BY d.next_attempt_at, d.event_id
                LIMIT scan.reads
            ) x
            WINDOW w AS (ORDER BY x.next_attempt_at, x.event_id ROWS UNBOUNDED PRECEDING)
        ) y
        WHERE y.available OR y.read = scan.reads
        ORDER BY y.next_attempt_at, y.event_id
        LIMIT scan.candidates
    ) d
), claimant AS MATERIALIZED (` + claimant + ` AND EXISTS (SELECT FROM seen) FOR KEY SHARE
), locked AS MATERIALIZED (
    SELECT c.number, 0::bigint AS before, now() + make_interval(secs => c.promised_for) AS promise, d.ctid AS place, d.claimed_by IS NOT NULL AS was_claimed
    FROM (
        SELECT number, promised_for, place, event_id FROM seen
        WHERE available AND ordering_key IS NULL AND taken <= free AND ($15::bigint[] IS NULL OR event_id = ANY ($15)) AND EXISTS (SELECT FROM claimant)
    ) c` + lockFound + `
` + claimLocked + `array_agg(number), array_agg(event_id), array_agg(CASE WHEN available THEN ordering_key END), array_agg(next_attempt_at),
       array_agg(taken > free), array_agg(CASE WHEN available THEN read ELSE -read END), true = ANY ($14) AND NOT (SELECT mine FROM front),
       array_agg(joined), NULL
FROM seen`

func (c *claimReader) queueDue(queries *pgx.Batch, relayID int32) {
	a := newDueArguments(c.requests)
	if len(a.free) == 0 {
		return
	}
	c.result.scans = make([]lane.ScanResult, len(a.free))
	queries.Queue(ClaimDue, append([]any{relayID, c.lease.Seconds(), lane.InlinePayload}, a.columns()...)...).Query(func(rows pgx.Rows) error {
		return c.read(rows, func(r *claimedRow) {
			if r.number == nil {
				if r.seen.contended != nil && *r.seen.contended {
					c.result.contended = true
					for i := range a.shared {
						c.result.scans[i].Unread = a.shared[i]
					}
				}
				if r.After > 0 { // the fence: without its row, the relay could claim nothing of what was seen and must not move past it
					c.noteSeen(r, &a)
				}
				return
			}
			r.Scan, r.Destination = int(*r.number), a.destinations[*r.number-1]
			c.result.Deliveries = append(c.result.Deliveries, r.Delivery)
		})
	})
}

// noteSeen notes how far each scan came, and the ordering keys that it found.
func (c *claimReader) noteSeen(r *claimedRow, a *dueArguments) {
	type scanKey struct {
		number int64
		key    string
	}
	first := map[scanKey]lane.FoundKey{}
	free, read := make([]int32, len(a.candidates)), make([]int32, len(a.candidates))
	for i, number := range r.seen.numbers {
		scan, id := &c.result.scans[number-1], r.seen.eventIDs[i]
		isFree := r.seen.read[i] > 0
		if read[number-1] = int32(max(r.seen.read[i], -r.seen.read[i])); isFree {
			free[number-1]++
		}
		if r.seen.beyond[i] {
			scan.More = true
			continue
		}
		if place := (lane.Keyset{At: r.seen.dueAt[i].Time, ID: id}); scan.Last.Compare(place) < 0 {
			scan.Last = place
		}
		if key := r.seen.keys[i]; key != nil {
			k := scanKey{number, *key}
			found, known := first[k]
			found.Key = *key
			if joined := r.seen.joined[i]; joined == nil {
				found.Joins = true
			} else if place := (ordering.Place{Joined: *joined, Event: id}); !known || found.Place == (ordering.Place{}) || place.Compare(found.Place) < 0 {
				found.Place = place
			}
			first[k] = found
		} else if isFree {
			scan.Unkeyed++
			if a.only != nil {
				c.result.free = append(c.result.free, id)
			}
		}
		if isFree {
			scan.Candidates++
		}
	}
	for i := range c.result.scans {
		scan := &c.result.scans[i]
		scan.Passed = int(read[i] - free[i])
		scan.More = scan.More || free[i] == a.candidates[i] || read[i] == a.reads[i]
	}
	for k, found := range first {
		scan := &c.result.scans[k.number-1]
		scan.Keys = append(scan.Keys, found)
	}
}

// dueArguments are the scans of a claim as columns.
type dueArguments struct {
	candidates       []int32
	destinations     []string
	replay           []bool
	free             []int32
	afterAt, untilAt []pgtype.Timestamptz
	afterID, untilID []int64
	promises         []float64
	reads            []int32
	shared           []bool
	only             []int64
}

func newDueArguments(requests []Request) (a dueArguments) {
	for _, r := range requests {
		a.only = r.only
		for _, s := range r.Scans {
			until := s.Until
			if until == (lane.Keyset{}) {
				until.ID = math.MaxInt64
			}
			a.candidates = append(a.candidates, s.MaxCandidates())
			a.destinations, a.promises = append(a.destinations, r.Destination), append(a.promises, r.Promise.Seconds())
			a.replay, a.free = append(a.replay, s.Class == lane.Replays), append(a.free, int32(s.Free))
			a.afterAt, a.afterID = append(a.afterAt, s.After.Bound(pgtype.NegativeInfinity)), append(a.afterID, s.After.ID)
			a.untilAt, a.untilID = append(a.untilAt, s.Until.Bound(pgtype.Infinity)), append(a.untilID, until.ID)
			a.reads, a.shared = append(a.reads, s.Reads()), append(a.shared, s.Shared && !s.Alone)
			if n := len(a.reads) - 1; r.reads > 0 {
				a.reads[n], a.candidates[n] = r.reads, min(r.reads, a.candidates[n])
			}
		}
	}
	return a
}

// columns returns the parameters of the statement from the fourth on.
func (a *dueArguments) columns() []any {
	return []any{a.candidates, a.destinations, a.replay, a.free, a.afterAt, a.afterID, a.untilAt, a.untilID, a.promises, a.reads, a.shared, a.only}
}

// rescuesAfterClaim counts the claim that this claim of d replaces, if a relay died with it or let
// its lease end. Above capacity.AloneFrom only requests that were sent alone count.
const rescuesAfterClaim = `
    CASE WHEN d.claimed_by IS NULL OR EXISTS (
             SELECT FROM outbox_void v
             WHERE v.relay_id = d.claimed_by AND NOT v.died AND d.lease_expires_at > v.after AND d.lease_expires_at <= v.until AND ` + pg.VoidReaches + `)
         THEN d.rescues ELSE greatest(d.rescues, least(d.rescues + 1, 6)) END`
