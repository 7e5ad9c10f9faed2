package intake

import (
	"context"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

// The columns of an event o that a relay needs, from event_type on as text: a domain has no type
// that a driver knows. Producers may write values of any size. One that is longer than its rule
// allows is cut one character behind that, or one event could take all of the relay's memory.
const eventColumns = `o.id, o.event_type::text AS event_type, o.event_version, o.idempotency_key::text AS idempotency_key,
    left(o.ordering_key, 256) AS ordering_key, left(o.related_reference, 256) AS related_reference,
    left(nullif(o.headers, '{}')::text, 8193) AS headers, o.created_at::timestamptz AS created_at, o.available_at, o.payload`

// The columns with the size of the payload. $3 is Terms.Inline.
const sizedColumns = eventColumns + `, CASE WHEN $3::int >= 0 THEN octet_length(o.payload::text) END AS bytes`

// What a statement returns of an event e. The difference of infinite times is an error, that of
// their seconds is none.
const eventResults = `e.id, e.event_type, e.event_version, e.idempotency_key, e.ordering_key, e.related_reference, e.headers, e.created_at,
    e.available_at, (extract(epoch FROM e.available_at) - extract(epoch FROM now()))::float8, coalesce(e.bytes, 0), CASE WHEN e.bytes <= $3::int THEN e.payload END`

// The destinations for which an event has a row already, since it was beyond a cut. A blind take
// does not read them, and the list is empty.
const rowsBeyond = `CASE WHEN l.beyond AND $3 >= 0 THEN (SELECT array_agg(d.destination) FROM outbox_delivery d WHERE d.event_id = e.id) WHEN l.beyond THEN '{}' END`

// What tells a relay whether the routes and the states of destinations that it remembers are those
// of the statement's snapshot.
const counts = `(SELECT i.routes FROM outbox_intake i), (SELECT i.destinations FROM outbox_intake i)`

// One statement has one snapshot, so that pg_current_snapshot() says exactly which events the rest
// of it sees.
//
// late are the transactions that were open at base and have ended since. All others that base does
// not see are at or above its xmax. LIMIT keeps a backlog from being read here; takeCut takes it.
//
// Each part has two bounds of xid and the order of outbox_by_xid, also for one transaction: by "xid
// =", and statistics of a table in which most rows have xid 2, PostgreSQL would go through the
// primary key.
const takeWhole = `
WITH last AS MATERIALIZED (
    SELECT seq, more, beyond, oldest_open_seq, target AS base, pg_current_snapshot() AS target FROM outbox_range ORDER BY seq DESC LIMIT 1
), late AS MATERIALIZED (
    SELECT x.xid FROM last l CROSS JOIN LATERAL pg_snapshot_xip(l.base) AS x (xid)
    WHERE NOT l.more AND pg_visible_in_snapshot(x.xid, l.target)
), found AS MATERIALIZED (
    (SELECT n.* FROM late CROSS JOIN LATERAL (
        SELECT ` + sizedColumns + ` FROM outbox o WHERE o.xid >= late.xid AND o.xid <= late.xid AND o.xid > '2' ORDER BY o.xid, o.id LIMIT $2::int + 1) n
     LIMIT $2 + 1)
    UNION ALL
    SELECT n.* FROM last l CROSS JOIN LATERAL (
        SELECT ` + sizedColumns + ` FROM outbox o
        WHERE NOT l.more AND o.xid >= pg_snapshot_xmax(l.base) AND o.xid < pg_snapshot_xmax(l.target) AND o.xid > '2'
          AND pg_visible_in_snapshot(o.xid, l.target)
        ORDER BY o.xid, o.id LIMIT $2 + 1) n
), size AS MATERIALIZED (
    SELECT count(*) AS events, min(f.id) - 1 AS low, max(f.id) AS upto,
           array_agg(DISTINCT hashtext(f.ordering_key)) FILTER (WHERE f.ordering_key IS NOT NULL) AS keys FROM found f
), ` + openRanges + `, taken AS (
    INSERT INTO outbox_range AS r (seq, relay_id, fence, base, target, low, upto, more, oldest_open_seq, keys, promised, taken_at)
    SELECT l.seq + 1, $1::int, ` + fenceNow + `, l.base, l.target, s.low, s.upto, false, coalesce(p.oldest_open_seq, l.seq + 1), s.keys, make_interval(secs => $4), now()
    FROM last l CROSS JOIN size s CROSS JOIN open p
    WHERE NOT l.more AND s.events BETWEEN 1 AND $2 AND NOT (p.busy AND s.keys IS NOT NULL)
    ON CONFLICT DO NOTHING
    RETURNING r.seq, r.fence
)
SELECT CASE WHEN t.seq IS NOT NULL THEN '' WHEN l.more OR s.events > $2 THEN 'cut' WHEN s.events = 0 THEN 'none'
            WHEN p.busy AND s.keys IS NOT NULL THEN 'busy' ELSE 'beaten' END,
       coalesce(t.seq, 0), coalesce(t.fence, 0), false, now(), ` + counts + `, ` + eventResults + `, ` + rowsBeyond + `
FROM last l CROSS JOIN size s CROSS JOIN open p LEFT JOIN taken t ON true LEFT JOIN found e ON t.seq IS NOT NULL
ORDER BY e.id`

// The oldest open range, and whether another relay has ordering keys in hand and continues taking.
// Were relays to take keys in turns, each would wait for the other with each of its ranges.
const openRanges = `open AS MATERIALIZED (
    SELECT min(o.seq) AS oldest_open_seq, coalesce(bool_or(
        o.relay_id <> $1 AND o.keys IS NOT NULL AND o.taken_at > clock_timestamp() - interval '250 milliseconds'), false) AS busy
    FROM last l CROSS JOIN LATERAL (SELECT * FROM outbox_range r WHERE r.seq >= l.oldest_open_seq AND r.ended_at IS NULL OFFSET 0) o
)`

// fenceNow is even; that of a claim is odd (pg.IsFree).
const fenceNow = `(((extract(epoch FROM clock_timestamp()) * 1000000)::bigint | 1) + 1)`

// What does not fit one range is cut by id, never by xid: a transaction with an older xid may
// insert an event of a key after one with a younger xid has committed.
//
// start finds, once for a difference, the lowest id of the transactions from xmax(base) on; it
// reads their entries in the index. OFFSET 0 keeps PostgreSQL from looking for the minimum in the
// primary key, from the oldest event on. near follows the primary key from there and passes events
// that are not of the difference; at most eight for each event that may be taken, so that a range
// may also be empty. span is where near ended for that reason.
const takeCut = `
WITH last AS MATERIALIZED (
    SELECT seq, more, beyond, oldest_open_seq, CASE WHEN more THEN upto ELSE -9223372036854775807 END AS low, CASE WHEN more THEN new_above END AS new_above,
           CASE WHEN more THEN base ELSE target END AS base, CASE WHEN more THEN target ELSE pg_current_snapshot() END AS target
    FROM outbox_range ORDER BY seq DESC LIMIT 1
), late AS MATERIALIZED (
    SELECT x.xid FROM last l CROSS JOIN LATERAL pg_snapshot_xip(l.base) AS x (xid) WHERE pg_visible_in_snapshot(x.xid, l.target)
), start AS MATERIALIZED (
    SELECT coalesce(l.new_above, (
        SELECT min(f.id) - 1 FROM (
            SELECT o.id FROM outbox o
            WHERE o.xid >= pg_snapshot_xmax(l.base) AND o.xid < pg_snapshot_xmax(l.target) AND o.xid > '2' AND pg_visible_in_snapshot(o.xid, l.target)
            ORDER BY o.xid, o.id OFFSET 0) f), 9223372036854775807) AS new_above
    FROM last l
), near AS MATERIALIZED (
    SELECT n.id FROM last l CROSS JOIN start s CROSS JOIN LATERAL (
        SELECT o.id, o.xid FROM outbox o WHERE o.id > greatest(l.low, s.new_above) ORDER BY o.id LIMIT 8 * $2::int) n
    WHERE n.xid >= pg_snapshot_xmax(l.base) AND pg_visible_in_snapshot(n.xid, l.target) LIMIT $2 + 1
), span AS MATERIALIZED (
    SELECT CASE WHEN (SELECT count(*) FROM near) <= $2 THEN (
        SELECT CASE WHEN count(*) = 8 * $2 THEN max(n.id) END FROM last l CROSS JOIN start s CROSS JOIN LATERAL (
            SELECT o.id FROM outbox o WHERE o.id > greatest(l.low, s.new_above) ORDER BY o.id LIMIT 8 * $2::int) n) END AS upto
), candidate AS MATERIALIZED (
    SELECT c.id FROM (
        SELECT near.id FROM near
        UNION ALL
        SELECT n.id FROM last l CROSS JOIN late CROSS JOIN LATERAL (
            SELECT o.id FROM outbox o WHERE (o.xid, o.id) > (late.xid, l.low) AND o.xid <= late.xid AND o.xid > '2' ORDER BY o.xid, o.id LIMIT $2 + 1) n
    ) c CROSS JOIN span WHERE (c.id <= span.upto) IS NOT FALSE ORDER BY c.id LIMIT $2 + 1
), found AS MATERIALIZED (
    SELECT n.* FROM (SELECT candidate.id FROM candidate ORDER BY candidate.id LIMIT $2) c
    CROSS JOIN LATERAL (SELECT ` + sizedColumns + ` FROM outbox o WHERE o.id = c.id LIMIT 1) n
), size AS MATERIALIZED (
    SELECT count(*) AS events, max(f.id) AS upto, count(*) < (SELECT count(*) FROM candidate) AS cut,
           array_agg(DISTINCT hashtext(f.ordering_key)) FILTER (WHERE f.ordering_key IS NOT NULL) AS keys FROM found f
), ` + openRanges + `, taken AS (
    INSERT INTO outbox_range AS r (seq, relay_id, fence, base, target, low, upto, new_above, more, oldest_open_seq, keys, promised, taken_at, ended_at, beyond)
    SELECT l.seq + 1, $1::int, ` + fenceNow + `, l.base, l.target, l.low,
           CASE WHEN s.cut THEN s.upto ELSE coalesce(span.upto, s.upto, l.low) END,
           start.new_above, s.cut OR span.upto IS NOT NULL, coalesce(p.oldest_open_seq, l.seq + 1), s.keys, make_interval(secs => $4), now(),
           CASE WHEN s.events = 0 THEN clock_timestamp() END, l.beyond
    FROM last l CROSS JOIN start CROSS JOIN span CROSS JOIN size s CROSS JOIN open p
    WHERE (s.events > 0 OR l.more OR span.upto IS NOT NULL) AND NOT (p.busy AND s.keys IS NOT NULL)
    ON CONFLICT DO NOTHING
    RETURNING r.seq, r.fence, r.more
)
SELECT CASE WHEN t.seq IS NOT NULL THEN '' WHEN s.events = 0 AND NOT l.more THEN 'none'
            WHEN p.busy AND s.keys IS NOT NULL THEN 'busy' ELSE 'beaten' END,
       coalesce(t.seq, 0), coalesce(t.fence, 0), coalesce(t.more, false), now(), ` + counts + `, ` + eventResults + `, ` + rowsBeyond + `
FROM last l CROSS JOIN size s CROSS JOIN open p LEFT JOIN taken t ON true LEFT JOIN found e ON t.seq IS NOT NULL
ORDER BY e.id`

// Terms are those on which a relay takes a range.
type Terms struct {
	Events int // at most; at least 1
	// Inline is up to which size payloads come along, in bytes. 0: none comes, but their sizes do.
	// Blind: neither their sizes are read, nor rows that events beyond a cut have.
	Inline int
	// Promised is the shortest X-Outbox-Not-After, from the take on, that the relay may tell a
	// receiver of an event before it has a row.
	Promised time.Duration
}

// Blind is the Terms.Inline of a take that meets a payload or a row which cannot be read.
const Blind = -1

// TakeRange takes the next events for a relay. It tries the whole difference first, or, if cut is
// set, as the last range had More, the continuation. While nothing is new it writes nothing.
func TakeRange(ctx context.Context, db pg.DB, relay int32, terms Terms, cut bool) (r Range, err error) {
	if !cut {
		if r, err = queryRange(ctx, db, takeWhole, relay, terms.Events, terms.Inline, terms.Promised.Seconds()); err != nil || r.Found != mustCut {
			r.Whole = r.Found == Taken
			return r, err
		}
	}
	return queryRange(ctx, db, takeCut, relay, terms.Events, terms.Inline, terms.Promised.Seconds())
}

func queryRange(ctx context.Context, db pg.DB, statement string, args ...any) (r Range, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	rows, err := db.Query(ctx, statement, args...)
	if err != nil {
		return takeFailed(err)
	}
	defer rows.Close()
	r.Found = Missing
	var id *int64
	for rows.Next() {
		var e Event
		var wait *float64
		var settled []string
		if err := rows.Scan(&r.Found, &r.Seq, &r.Fence, &r.More, &r.TakenAt, &r.Routes, &r.Destinations, &id, &e.EventType, &e.Version, &e.Key, &e.OrderingKey, &e.RelatedReference,
			&e.Headers, &e.CreatedAt, &e.AvailableAt, &wait, &e.PayloadBytes, &e.Payload, &settled); err != nil {
			return Range{}, fmt.Errorf("take events: %w", err)
		}
		if id != nil {
			e.ID = *id
			e.Wait, e.Settled = seconds(wait), settled
			r.Unsure = r.Unsure || settled != nil && len(settled) == 0
			r.Events = append(r.Events, e)
		}
	}
	if err := rows.Err(); err != nil {
		return takeFailed(err)
	}
	return r, nil
}

// takeFailed returns Beaten for a wait that was too long: the relay that takes has not committed
// yet.
func takeFailed(err error) (Range, error) {
	if pg.HasCode(err, pg.LockNotAvailable) {
		return Range{Found: Beaten}, nil
	}
	return Range{}, fmt.Errorf("take events: %w", err)
}

// seconds returns a duration that the database has measured; infinite ones are the longest.
func seconds(s *float64) time.Duration {
	const most = 100 * 366 * 24 * 3600
	if s == nil {
		return 0
	}
	return time.Duration(min(max(*s, -most), most) * float64(time.Second))
}

// A range is removed a minute after its end. A take with an older snapshot, which lasts no longer
// than the limit of a statement, must meet its number: the primary key is what takers meet at.
const pruneRanges = `
WITH last AS MATERIALIZED (SELECT seq, oldest_open_seq FROM outbox_range ORDER BY seq DESC LIMIT 1),
gone AS (
    DELETE FROM outbox_range WHERE seq = ANY (ARRAY (
        SELECT r.seq FROM last l CROSS JOIN LATERAL (
            SELECT o.seq FROM outbox_range o WHERE o.seq >= $1 AND o.seq < l.oldest_open_seq AND o.seq < l.seq AND o.ended_at < now() - interval '1 minute'
            ORDER BY o.seq LIMIT 10000) r))
    RETURNING seq
)
SELECT coalesce((SELECT max(seq) + 1 FROM gone), $1::bigint)`

// PruneRanges removes ranges that ended a minute ago from the given one on, some 10,000 at most,
// and returns where the next call begins. The last range stays: it is the progress of all relays.
func PruneRanges(ctx context.Context, db pg.DB, from int64) (next int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	if err := db.QueryRow(ctx, pruneRanges, from).Scan(&next); err != nil {
		return from, fmt.Errorf("prune ranges: %w", err)
	}
	return next, nil
}
