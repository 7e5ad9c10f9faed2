package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// store runs the engine's statements. It is safe for concurrent use.
type store struct {
	pool executor
	deaf bool        // nobody listens for notifications: producers are never asked for any
	idle atomic.Bool // as declared last
}

// statementTimeout bounds each statement, so that a half-open connection cannot hold a goroutine for ever.
const statementTimeout = 30 * time.Second

// keyset is a place in the order in which a lane is claimed.
type keyset struct {
	at time.Time
	id int64
}

// ask is what a claim wants of one class of a lane.
type ask struct {
	lane        *lane
	destination string
	class       class
	free        int
	run         int           // how many deliveries of one ordering key may come together; 0: one
	followers   int           // how many may come behind the heads of ordering keys, over all asks for the destination
	skipFailed  bool          // a failed delivery does not block its ordering key
	after       keyset        // zero: from the very front
	until       keyset        // zero: to the end
	chunk       bool          // until is the end of a chunk
	promise     time.Duration // from now until when a delivery that is claimed for the first time may be sent
	// unblocked are ordering keys whose next delivery may lie before after: the one before it has just been delivered.
	unblocked []string
}

// delivery is a claimed row with its event.
type delivery struct {
	eventID       int64
	destination   string
	fence         int64
	attempts      int
	rescues       int
	lost          bool // a suspect's previous claim was not settled
	alone         bool // a suspect is being sent with nothing beside it
	nextAttemptAt pgtype.Timestamptz
	payloadBytes  int
	replay        bool
	leaseEnds     time.Time // on this process's clock, never later than what the database holds
	notAfter      time.Time // the promise: no request is under way any more
	promiseEnds   time.Time // the same on this process's clock, like leaseEnds
	promised      bool      // by this claim: the receiver has not been told yet

	ask       int   // number of the ask that found it, from 1; 0: it is the next of its ordering key
	after     int64 // event before it in its run; 0: the first
	class     class
	lastOfRun bool

	event event
}

// event is the immutable half of a delivery. Nullable columns are pointers: the row may be gone from outbox.
type event struct {
	eventType        *string
	version          *int
	key              *string
	orderingKey      *string
	relatedReference *string
	headers          []byte // JSON object; nil when empty
	createdAt        pgtype.Timestamptz
	payload          []byte // nil when larger than inlinePayload: loaded when its turn comes
}

// inlinePayload is up to which size a claim brings the payload along, in bytes. It bounds what a claim can hold in
// memory.
const inlinePayload = 16 << 10

// behindParked is true of a delivery d before which another of its ordering key is parked that has a route to the same
// destination by now: it is to be released, and goes first.
const behindParked = `EXISTS (
    SELECT FROM outbox_delivery parked
    CROSS JOIN LATERAL (SELECT event_type FROM outbox WHERE id = parked.event_id LIMIT 1) e
    JOIN outbox_route r ON r.destination = lane.destination AND e.event_type LIKE r.like_pattern
    WHERE parked.destination = '' AND parked.ordering_key = d.ordering_key AND parked.event_id < d.event_id
      AND parked.status IN ('pending', 'failed'))`

// The rows are locked in a materialised step and then updated by where they lie. Locking inside "IN (SELECT … LIMIT …)"
// may run again for each row and claim more than its limit; joining back by key can flip to a scan of the table. LIMIT
// keeps the lookup of each event a lookup: a plan that was made when outbox was small may otherwise read all of it.
//
// A claim keeps its relay's row from being deleted until it has committed, so that a rescue, which deletes the row
// first, waits for a claim that its dead relay left running; and it takes nothing once the row is gone.
//
// What follows the head of an ordering key comes along, each with the event before it: where somebody had locked a
// delivery in between, the chain is broken, and what lies behind it is given back. A head that may have killed relays
// comes alone, or what follows would be suspected with it; so does one of whose key something is parked.
//
// The promise is made here and not by the settle: a relay that dies between request and settle would leave nothing of it,
// and the next one, perhaps much later, would promise the receiver what it no longer remembers. A settle that knows that
// the receiver was told nothing takes it back.
const claimDue = `
WITH claimant AS MATERIALIZED (
    SELECT FROM outbox_relay WHERE instance = $1 FOR KEY SHARE
), lane AS MATERIALIZED (
    SELECT l.*, now() + make_interval(secs => l.promised_for) AS promise, coalesce((
        SELECT true FROM outbox_delivery p WHERE p.destination = '' AND p.ordering_key IS NOT NULL AND p.status IN ('pending', 'failed')
        ORDER BY p.destination, p.ordering_key, p.event_id LIMIT 1), false) AS parked
    FROM unnest($2::text[], $3::bool[], $4::int[], $5::int[], $6::int[], $7::bool[], $8::timestamptz[], $9::bigint[], $10::timestamptz[], $11::bigint[], $16::float8[])
        WITH ORDINALITY AS l (destination, replay, free, run, followers, skip_failed, after_at, after_id, until_at, until_id, promised_for, number)
    WHERE EXISTS (SELECT FROM claimant)
      AND NOT EXISTS (SELECT FROM outbox_destination p WHERE p.destination = l.destination
                      AND (p.paused OR p.breaker = 'open' OR p.breaker_owner <> $1))
), due AS MATERIALIZED (
    SELECT lane.number, lane.destination, lane.run, lane.followers, lane.skip_failed, lane.parked, lane.promise, d.place, d.event_id, d.ordering_key, d.rescues
    FROM lane CROSS JOIN LATERAL (
        SELECT d.ctid AS place, d.event_id, d.ordering_key, d.rescues
        FROM outbox_delivery d
        WHERE d.destination = lane.destination AND d.replay = lane.replay AND d.status = 'pending'
          AND (d.next_attempt_at, d.event_id) > (lane.after_at, lane.after_id)
          AND (d.next_attempt_at, d.event_id) <= (lane.until_at, lane.until_id)
          AND d.next_attempt_at <= now()
          AND ` + isFree + `
          AND (d.ordering_key IS NULL OR NOT EXISTS (
              SELECT FROM outbox_delivery earlier
              WHERE earlier.destination = d.destination AND earlier.ordering_key = d.ordering_key
                AND earlier.status IN ('pending', 'failed') AND earlier.event_id < d.event_id
                AND (earlier.status = 'pending' OR NOT lane.skip_failed)))
          AND (NOT lane.parked OR d.ordering_key IS NULL OR NOT ` + behindParked + `)
        ORDER BY d.next_attempt_at, d.event_id
        LIMIT lane.free
        FOR UPDATE OF d SKIP LOCKED
    ) d
), successor AS MATERIALIZED (
    SELECT 0::bigint AS number, lane.destination, lane.run, lane.followers, lane.skip_failed, lane.parked, lane.promise, d.place, d.event_id, k.ordering_key, d.rescues
    FROM unnest($12::text[], $13::text[]) AS k (destination, ordering_key)
    CROSS JOIN LATERAL (SELECT * FROM lane WHERE lane.destination = k.destination LIMIT 1) lane
    CROSS JOIN LATERAL (
        SELECT o.event_id FROM outbox_delivery o
        WHERE o.destination = k.destination AND o.ordering_key = k.ordering_key AND o.status IN ('pending', 'failed')
          AND (o.status = 'pending' OR NOT lane.skip_failed)
        ORDER BY o.event_id LIMIT 1
    ) head
    CROSS JOIN LATERAL (
        SELECT d.ctid AS place, d.event_id, d.rescues FROM outbox_delivery d
        WHERE d.event_id = head.event_id AND d.destination = k.destination AND d.status NOT IN ('delivered', 'failed', 'discarded')
          AND d.next_attempt_at <= now() AND ` + isFree + `
          AND (NOT lane.parked OR NOT ` + behindParked + `)
        LIMIT 1
        FOR UPDATE OF d SKIP LOCKED
    ) d
), head AS MATERIALIZED (
    SELECT f.number, f.destination, f.skip_failed, f.promise, f.place, f.event_id, f.ordering_key,
           CASE WHEN f.ordering_key IS NULL OR f.rescues >= 3 OR f.parked AND EXISTS (
                   SELECT FROM outbox_delivery p
                   WHERE p.destination = '' AND p.ordering_key = f.ordering_key AND p.status IN ('pending', 'failed')) THEN 1
                ELSE least(f.run, 1 + f.followers / count(f.ordering_key) OVER (PARTITION BY f.destination)) END AS run
    FROM (SELECT * FROM due UNION ALL SELECT * FROM successor) f
), follower AS MATERIALIZED (
    SELECT d.place, o.before, h.promise
    FROM head h
    CROSS JOIN LATERAL (
        SELECT n.event_id, coalesce(lag(n.event_id) OVER (ORDER BY n.event_id), h.event_id) AS before
        FROM (
            SELECT n.event_id FROM outbox_delivery n
            WHERE n.destination = h.destination AND n.ordering_key = h.ordering_key AND n.status IN ('pending', 'failed')
              AND (n.status = 'pending' OR NOT h.skip_failed) AND n.event_id > h.event_id
            ORDER BY n.event_id LIMIT h.run - 1
        ) n
    ) o
    CROSS JOIN LATERAL (
        SELECT d.ctid AS place FROM outbox_delivery d
        WHERE d.event_id = o.event_id AND d.destination = h.destination AND d.status NOT IN ('delivered', 'failed', 'discarded')
          AND d.next_attempt_at <= now() AND ` + isFree + `
        LIMIT 1
        FOR UPDATE OF d SKIP LOCKED
    ) d
    WHERE h.run > 1
), chosen AS MATERIALIZED (
    SELECT DISTINCT ON (place) place, number, before, promise
    FROM (SELECT place, number, 0::bigint AS before, promise FROM head UNION ALL SELECT place, 0, before, promise FROM follower) c
    ORDER BY place, number DESC
), claimed AS (
    UPDATE outbox_delivery d
    SET claim = d.claim + 1, claimed_by = $1, lease_expires_at = now() + make_interval(secs => $14),
        rescues = ` + rescuesAfterClaim + `, not_after = coalesce(d.not_after, c.promise)
    FROM chosen c WHERE d.ctid = c.place
    RETURNING d.event_id, d.destination, d.claim, d.attempts, d.rescues, d.next_attempt_at, d.payload_bytes, d.replay,
              d.not_after, d.not_after = c.promise AS promised, c.number, c.before
)
SELECT c.event_id, c.destination, c.claim, c.attempts, c.rescues, c.next_attempt_at, c.payload_bytes, c.replay, c.not_after, c.promised,
       c.number, c.before, ` + wasLost + `,
       e.event_type, e.event_version, e.idempotency_key, e.ordering_key, e.related_reference,
       nullif(e.headers, '{}'), e.created_at, CASE WHEN c.payload_bytes <= $15 THEN e.payload END, now()
FROM claimed c LEFT JOIN LATERAL (SELECT * FROM outbox WHERE id = c.event_id LIMIT 1) e ON true
UNION ALL
SELECT 0, '', 0, 0, 0, now(), 0, false, now(), false, 0, 0, false, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, now()`

// claim leases, for every ask, at most its free deliveries that are due and lie between its keysets, and those that are
// next in its unblocked ordering keys; with each that has an ordering key come those that follow it. It returns them in
// the order in which they became due, and the database's time.
func (s *store) claim(ctx context.Context, instance int32, lease time.Duration, asks []ask) (claimed []delivery, at time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	n := len(asks)
	destinations, replayed, skip := make([]string, n), make([]bool, n), make([]bool, n)
	free, run, followers := make([]int32, n), make([]int32, n), make([]int32, n)
	afterAt, untilAt := make([]pgtype.Timestamptz, n), make([]pgtype.Timestamptz, n)
	afterID, untilID := make([]int64, n), make([]int64, n)
	promises := make([]float64, n)
	var keyDestinations, keys []string
	for i, a := range asks {
		destinations[i], replayed[i], skip[i] = a.destination, a.class == replays, a.skipFailed
		free[i], run[i], followers[i] = int32(a.free), int32(max(a.run, 1)), int32(a.followers)
		afterAt[i], afterID[i] = a.after.bound(pgtype.NegativeInfinity), a.after.id
		untilAt[i], untilID[i] = a.until.bound(pgtype.Infinity), a.until.id
		promises[i] = a.promise.Seconds()
		for _, key := range a.unblocked {
			keyDestinations, keys = append(keyDestinations, a.destination), append(keys, key)
		}
	}
	// Lease and promise are counted from before the statement, so that this clock's view of them ends before the database's.
	begun := time.Now()
	leaseEnds := begun.Add(lease)
	rows, err := s.pool.Query(ctx, claimDue, instance, destinations, replayed, free, run, followers, skip, afterAt, afterID, untilAt, untilID,
		keyDestinations, keys, lease.Seconds(), inlinePayload, promises)
	if err != nil {
		return nil, time.Time{}, fmt.Errorf("claim: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		d := delivery{leaseEnds: leaseEnds}
		e := &d.event
		if err := rows.Scan(&d.eventID, &d.destination, &d.fence, &d.attempts, &d.rescues, &d.nextAttemptAt, &d.payloadBytes,
			&d.replay, &d.notAfter, &d.promised, &d.ask, &d.after, &d.lost, &e.eventType, &e.version, &e.key, &e.orderingKey, &e.relatedReference, &e.headers,
			&e.createdAt, &e.payload, &at); err != nil {
			return nil, time.Time{}, fmt.Errorf("claim: %w", err)
		}
		d.promiseEnds = begun.Add(d.notAfter.Sub(at))
		if d.destination != "" { // the row that is always there tells the time
			claimed = append(claimed, d)
		}
	}
	if err := rows.Err(); err != nil {
		return nil, time.Time{}, fmt.Errorf("claim: %w", err)
	}
	slices.SortFunc(claimed, func(a, b delivery) int { return a.place().compare(b.place()) })
	return claimed, at, nil
}

// place returns where a delivery stands in the order in which a lane is claimed.
func (d *delivery) place() keyset { return keyset{at: d.nextAttemptAt.Time, id: d.eventID} }

func (k keyset) compare(other keyset) int {
	if order := k.at.Compare(other.at); order != 0 {
		return order
	}
	return cmp.Compare(k.id, other.id)
}

const selectTime = `SELECT now()`

// now returns the database's time.
func (s *store) now(ctx context.Context) (now time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	if err := s.pool.QueryRow(ctx, selectTime).Scan(&now); err != nil {
		return time.Time{}, fmt.Errorf("read the database's time: %w", err)
	}
	return now, nil
}

// bound returns the keyset's time as the database compares it; for the zero keyset, which is a time too, the given end.
func (k keyset) bound(end pgtype.InfinityModifier) pgtype.Timestamptz {
	if k == (keyset{}) {
		return pgtype.Timestamptz{InfinityModifier: end, Valid: true}
	}
	return pgtype.Timestamptz{Time: k.at, Valid: true}
}

const selectChunkEnd = `
SELECT next_attempt_at, event_id FROM outbox_delivery
WHERE destination = $1 AND replay = $5 AND status = 'pending' AND (next_attempt_at, event_id) > ($2, $3) AND next_attempt_at <= now()
ORDER BY next_attempt_at, event_id OFFSET $4 LIMIT 1`

// chunkEnd returns where n due deliveries of a destination end, counted from behind after; zero if there are fewer.
func (s *store) chunkEnd(ctx context.Context, destination string, replayed bool, after keyset, n int) (end keyset, err error) {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	err = s.pool.QueryRow(ctx, selectChunkEnd, destination, after.bound(pgtype.NegativeInfinity), after.id, n-1, replayed).Scan(&end.at, &end.id)
	if errors.Is(err, pgx.ErrNoRows) {
		return keyset{}, nil
	}
	if err != nil {
		return keyset{}, fmt.Errorf("find end of chunk: %w", err)
	}
	return end, nil
}

const selectPayload = `SELECT payload FROM outbox WHERE id = $1`

// payload loads a payload that was too large to come with the claim.
func (s *store) payload(ctx context.Context, eventID int64) (payload []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	if err := s.pool.QueryRow(ctx, selectPayload, eventID).Scan(&payload); err != nil {
		return nil, fmt.Errorf("load payload: %w", err)
	}
	return payload, nil
}
