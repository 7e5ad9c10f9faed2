package intake

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

// Status is what a delivery has become when its row is written.
type Status string

// The states that a relay gives to a delivery without a row.
const (
	Pending   Status = "pending"
	Delivered Status = "delivered"
)

// NewRows are what one relay writes together.
type NewRows struct {
	Relay int32
	// Ranges names each range of which there are deliveries, and each that ends, in ascending
	// order.
	Ranges []RangeRef
	// Ended are those of Ranges of which each delivery has a row after this settlement.
	Ended      []RangeRef
	Deliveries []NewRow
	// Witnesses name one row of each earlier transaction that wrote rows of a range that ends. One
	// that is missing was lost in a crash of the server, with all of its transaction, and the range
	// does not end.
	Witnesses []Witness
}

// A Witness is a row of outbox_delivery that was written before.
type Witness struct {
	Range       RangeRef
	EventID     int64
	Destination string
}

// A RangeRef names a range as one relay has it. The number alone names no range: a crash of the
// server that undoes a take gives it out again, perhaps to the same relay.
type RangeRef struct{ Seq, Fence int64 }

// Ref names the range as its relay has it.
func (r *Range) Ref() RangeRef { return RangeRef{Seq: r.Seq, Fence: r.Fence} }

// A NewRow is a row of outbox_delivery that does not exist yet.
type NewRow struct {
	Range       RangeRef
	EventID     int64
	Destination string // "": no route matches, the event waits for one
	Status      Status
	Attempts    int
	// Wait is how long a pending delivery waits for its next attempt.
	Wait time.Duration
	// DueAt is when a pending delivery joins its ordering key, by the database's clock. Until then
	// it holds no other one. Zero: it has joined its key, and Wait counts.
	DueAt time.Time
	// Since is how long ago the last attempt began.
	Since        time.Duration
	Code         int16 // status code of the answer; 0: none
	Reason       string
	Error        string
	OrderingKey  *string
	PayloadBytes int
	NotAfter     time.Time // what the receiver was promised; zero: nothing
	BlockedBy    int64     // the head of its ordering key behind which a pending delivery waits; 0: none
	Rescues      int       // how often a relay died that may have had it in flight
	// Lease makes a pending delivery one that the relay has claimed, under the range's fence: an
	// attempt is still in flight, and the range ends without waiting for it. 0: free.
	Lease time.Duration
}

// Settled is what became of a settlement.
type Settled struct {
	// Lost are ranges that are not this relay's any more. Nothing of them was written.
	Lost []RangeRef
	// Existing are the indexes of deliveries that had a row already.
	Existing []int
	// Missing are the witnesses that have no row.
	Missing []Witness
}

// owned are the ranges that are still this relay's. They are locked, so that no rescue comes in
// between. One that another session has locked fails the statement at once: a wait would hold up
// all destinations, each time. Rows and witnesses name their range by its place in the list: two of
// the list may have one number (see [RangeRef]). missing are witnesses without a row, each looked
// up alone, whatever the planner believes; a parked one may have been given its destinations since.
// moved are the ordering keys with rows that joined them when they became due. What comes from a
// later range stands behind these.
const settleRanges = `
WITH owned AS MATERIALIZED (
    SELECT w.number, w.ended, r.seq, r.fence FROM unnest($2::bigint[], $3::bigint[], $4::bool[]) WITH ORDINALITY AS w (seq, fence, ended, number) CROSS JOIN LATERAL (
        SELECT o.seq, o.fence FROM outbox_range o
        WHERE o.seq = w.seq AND o.fence = w.fence AND o.relay_id = $1::int AND o.ended_at IS NULL LIMIT 1 FOR NO KEY UPDATE NOWAIT) r
), missing AS MATERIALIZED (
    SELECT w.range, w.event_id, w.destination FROM unnest($22::int[], $23::bigint[], $24::text[]) AS w (range, event_id, destination)
    WHERE (SELECT d.event_id FROM outbox_delivery d WHERE d.event_id = w.event_id AND (d.destination = w.destination OR w.destination = '') LIMIT 1) IS NULL
), moved AS MATERIALIZED (
    SELECT k.destination, k.ordering_key, first.joined
    FROM (SELECT DISTINCT s.destination, s.ordering_key FROM unnest($7::text[], $8::text[], $15::text[], $21::timestamptz[])
          AS s (destination, status, ordering_key, due_at) WHERE s.ordering_key IS NOT NULL AND s.status = 'pending' AND s.due_at IS NULL) k
    CROSS JOIN LATERAL (
        (SELECT d.joined FROM outbox_delivery d
         WHERE d.destination = k.destination AND d.ordering_key = k.ordering_key AND d.status = 'pending' AND d.joined > 0
         ORDER BY d.joined, d.event_id LIMIT 1)
        UNION ALL
        (SELECT d.joined FROM outbox_delivery d
         WHERE d.destination = k.destination AND d.ordering_key = k.ordering_key AND d.status = 'failed' AND d.joined > 0
         ORDER BY d.joined, d.event_id LIMIT 1)) first
), ended AS (
    UPDATE outbox_range SET ended_at = now() WHERE seq = ANY (ARRAY (SELECT o.seq FROM owned o WHERE o.ended
        AND o.number <> ALL (ARRAY (SELECT m.range FROM missing m))))
), written AS (
    INSERT INTO outbox_delivery (event_id, destination, status, claim, attempts, next_attempt_at, delivered_at, last_attempt_at,
        last_http_status, last_reason, last_error, ordering_key, payload_bytes, not_after, blocked_by, claimed_by, lease_expires_at, rescues, joined)
    SELECT s.event_id, s.destination, s.status, o.fence, s.attempts, coalesce(s.due_at, now() + make_interval(secs => s.wait)),
           CASE WHEN s.status = 'delivered' THEN now() END, now() - make_interval(secs => s.since),
           s.code, s.reason, s.error, s.ordering_key, s.bytes, s.not_after, s.blocked_by,
           CASE WHEN s.lease IS NOT NULL THEN $1 END, now() + make_interval(secs => s.lease), s.rescues,
           CASE WHEN s.due_at IS NULL THEN CASE WHEN EXISTS (
               SELECT FROM moved m WHERE m.destination = s.destination AND m.ordering_key = s.ordering_key AND m.joined <= o.seq << 22)
               THEN o.seq << 22 ELSE 0 END END
    FROM unnest($5::int[], $6::bigint[], $7, $8, $9::int[], $10::float8[], $11::float8[], $12::smallint[],
                $13::text[], $14::text[], $15, $16::int[], $17::timestamptz[], $18::bigint[], $19::float8[], $20::smallint[], $21)
        AS s (range, event_id, destination, status, attempts, wait, since, code, reason, error, ordering_key, bytes, not_after, blocked_by, lease, rescues, due_at)
    CROSS JOIN LATERAL (SELECT o.seq, o.fence FROM owned o WHERE o.number = s.range LIMIT 1) o
    ON CONFLICT DO NOTHING
    RETURNING event_id, destination
)
SELECT 'lost', n, '' FROM generate_series(1, cardinality($2)) AS n WHERE NOT EXISTS (SELECT FROM owned o WHERE o.number = n)
UNION ALL
SELECT 'missing', event_id, destination FROM missing
UNION ALL
(SELECT 'written', event_id, destination FROM written)`

// SettleRanges writes deliveries whose outcome is known, each once, and ends the ranges that have
// no others. It is one transaction, or part of the caller's, and its order of locks is that of the
// ranges given. What belongs to a range that is no longer this relay's is not written.
func SettleRanges(ctx context.Context, db pg.DB, s NewRows) (done Settled, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	rows, err := db.Query(ctx, settleRanges, s.arguments()...)
	if err == nil {
		done, err = s.read(rows)
	}
	if err != nil {
		return Settled{}, fmt.Errorf("settle ranges: %w", err)
	}
	return done, nil
}

// Queue adds the statement of [SettleRanges] to a batch, which sets done when it is sent.
func (s *NewRows) Queue(batch *pgx.Batch, done *Settled) {
	batch.Queue(settleRanges, s.arguments()...).Query(func(rows pgx.Rows) (err error) {
		*done, err = s.read(rows)
		return err
	})
}

func (s *NewRows) read(rows pgx.Rows) (done Settled, err error) {
	var what, destination string
	var number int64
	lost, missing, written := map[RangeRef]bool{}, map[target]bool{}, map[target]bool{}
	if _, err := pgx.ForEachRow(rows, []any{&what, &number, &destination}, func() error {
		switch what {
		case "lost":
			of := s.Ranges[number-1]
			lost[of] = true
			done.Lost = append(done.Lost, of)
		case "missing":
			missing[target{number, destination}] = true
		default:
			written[target{number, destination}] = true
		}
		return nil
	}); err != nil {
		return Settled{}, err
	}
	for _, w := range s.Witnesses {
		if missing[target{w.EventID, w.Destination}] {
			done.Missing = append(done.Missing, w)
		}
	}
	for i := range s.Deliveries {
		d := &s.Deliveries[i]
		switch key := (target{d.EventID, d.Destination}); {
		case lost[d.Range]:
		case !written[key]:
			done.Existing = append(done.Existing, i)
		default:
			delete(written, key) // the same delivery given twice is written once
		}
	}
	return done, nil
}

type target struct {
	event       int64
	destination string
}

func (s *NewRows) arguments() []any {
	var ranges, fences []int64
	var ended []bool
	numbers := make(map[RangeRef]int32, len(s.Ranges))
	for i, h := range s.Ranges {
		ranges, fences, ended = append(ranges, h.Seq), append(fences, h.Fence), append(ended, slices.Contains(s.Ended, h))
		numbers[h] = int32(i + 1)
	}
	n := len(s.Deliveries)
	of, events, destinations, statuses := make([]int32, n), make([]int64, n), make([]string, n), make([]string, n)
	attempts, waits, since, codes := make([]int32, n), make([]float64, n), make([]*float64, n), make([]*int16, n)
	reasons, errors, keys, sizes := make([]*string, n), make([]*string, n), make([]*string, n), make([]int32, n)
	notAfter, blocked, leases, rescues, dueAt := make([]*time.Time, n), make([]*int64, n), make([]*float64, n), make([]int16, n), make([]*time.Time, n)
	for i := range s.Deliveries {
		d := &s.Deliveries[i]
		of[i], events[i], destinations[i], statuses[i] = numbers[d.Range], d.EventID, d.Destination, string(d.Status)
		attempts[i], waits[i], codes[i], reasons[i], errors[i] = int32(d.Attempts), d.Wait.Seconds(), set(d.Code), set(d.Reason), set(d.Error)
		if d.Attempts > 0 {
			since[i] = new(d.Since.Seconds())
		}
		keys[i], sizes[i], blocked[i] = d.OrderingKey, int32(d.PayloadBytes), set(d.BlockedBy)
		if !d.NotAfter.IsZero() {
			notAfter[i] = &d.NotAfter
		}
		if !d.DueAt.IsZero() {
			dueAt[i] = &d.DueAt
		}
		leases[i], rescues[i] = set(d.Lease.Seconds()), int16(d.Rescues)
	}
	m := len(s.Witnesses)
	witnessed, witnessedEvents, witnessedDestinations := make([]int32, m), make([]int64, m), make([]string, m)
	for i, w := range s.Witnesses {
		witnessed[i], witnessedEvents[i], witnessedDestinations[i] = numbers[w.Range], w.EventID, w.Destination
	}
	return []any{
		s.Relay, ranges, fences, ended, of, events, destinations, statuses, attempts, waits, since, codes, reasons, errors, keys, sizes,
		notAfter, blocked, leases, rescues, dueAt, witnessed, witnessedEvents, witnessedDestinations,
	}
}

// set returns a pointer to a value that is set, for a column that is null otherwise.
func set[T comparable](value T) *T {
	if zero := *new(T); value == zero {
		return nil
	}
	return &value
}
