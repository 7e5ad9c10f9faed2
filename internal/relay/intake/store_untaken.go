package intake

import (
	"context"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

// Columns of an event o that is counted. It is due from at on. Times of creation are moved into the
// past since 2000: the age of an infinite one is no number.
const untakenColumns = `o.id, o.event_type::text AS event_type, greatest(o.created_at::timestamptz, o.available_at, '2000-01-01') AS at,
    least(greatest(o.created_at::timestamptz, '2000-01-01'), now()) AS created_at`

// Untaken is the part of a WITH that finds the events which are committed and in no range, as
// untaken (id, event_type, at, created_at). The statement says in "most (events)", which comes
// before, up to how many.
//
// They are the transactions that the last target does not see: the few that were open, and all from
// its xmax on. While the last range has more, they are also the rest of its difference, which
// takeCut takes next. Each part is read in the order of an index and stops at the bound. The rest
// is found by id: by xid, all that is taken already would be passed. The scan passes events that
// are not of the difference, at most eight for each that is counted.
const Untaken = `last AS MATERIALIZED (
    SELECT more, base, target, upto, new_above FROM outbox_range ORDER BY seq DESC LIMIT 1
), untaken AS MATERIALIZED (
    SELECT u.id, u.event_type, u.at, u.created_at FROM (
        (SELECT n.* FROM last l CROSS JOIN LATERAL pg_snapshot_xip(l.target) AS late (xid) CROSS JOIN LATERAL (
            SELECT ` + untakenColumns + ` FROM outbox o WHERE o.xid >= late.xid AND o.xid <= late.xid AND o.xid > '2'
            ORDER BY o.xid, o.id LIMIT (SELECT events FROM most)) n
         LIMIT (SELECT events FROM most))
        UNION ALL
        (SELECT n.* FROM last l CROSS JOIN LATERAL pg_snapshot_xip(l.base) AS late (xid) CROSS JOIN LATERAL (
            SELECT ` + untakenColumns + ` FROM outbox o
            WHERE l.more AND pg_visible_in_snapshot(late.xid, l.target) AND (o.xid, o.id) > (late.xid, l.upto) AND o.xid <= late.xid AND o.xid > '2'
            ORDER BY o.xid, o.id LIMIT (SELECT events FROM most)) n
         LIMIT (SELECT events FROM most))
        UNION ALL
        (SELECT s.id, s.event_type, s.at, s.created_at FROM last l CROSS JOIN LATERAL (
            SELECT ` + untakenColumns + `, o.xid FROM outbox o WHERE l.more AND o.id > greatest(l.upto, l.new_above)
            ORDER BY o.id LIMIT (SELECT 8 * events FROM most)) s
         WHERE s.xid >= pg_snapshot_xmax(l.base) AND pg_visible_in_snapshot(s.xid, l.target)
         LIMIT (SELECT events FROM most))
        UNION ALL
        (SELECT n.* FROM last l CROSS JOIN LATERAL (
            SELECT ` + untakenColumns + ` FROM outbox o WHERE o.xid >= pg_snapshot_xmax(l.target) AND o.xid > '2'
            ORDER BY o.xid, o.id LIMIT (SELECT events FROM most)) n)
    ) u LIMIT (SELECT events FROM most)
)`

// Stuck is the part of a WITH, behind [Untaken], that finds the events which a relay has had in
// hand for more than ten seconds and which have no delivery yet, as stuck (id, event_type, at,
// created_at): about a second is usual, so that the relay is dead or cannot continue. It reads the
// ten oldest ranges, each as a rescue does, up to the same bound. OFFSET 0 keeps PostgreSQL from a
// join with all deliveries.
const Stuck = `owned AS MATERIALIZED (
    SELECT h.* FROM (SELECT oldest_open_seq FROM outbox_range ORDER BY seq DESC LIMIT 1) l CROSS JOIN LATERAL (
        SELECT o.base, o.target, o.low, o.upto, o.new_above FROM outbox_range o
        WHERE o.seq >= l.oldest_open_seq AND o.ended_at IS NULL AND o.taken_at < now() - interval '10 seconds' ORDER BY o.seq LIMIT 10) h
), stuck AS MATERIALIZED (
    SELECT e.id, e.event_type, e.at, e.created_at FROM owned h CROSS JOIN LATERAL (` + eventsOfRange + `) e
    WHERE NOT EXISTS (SELECT FROM outbox_delivery d WHERE d.event_id = e.id OFFSET 0)
)`

// eventsOfRange selects the events of a range h, as a rescue does, up to the bound of the
// statement.
const eventsOfRange = `
        (SELECT n.* FROM pg_snapshot_xip(h.base) AS late (xid) CROSS JOIN LATERAL (
            SELECT ` + untakenColumns + ` FROM outbox o
            WHERE pg_visible_in_snapshot(late.xid, h.target) AND (o.xid, o.id) > (late.xid, h.low) AND (o.xid, o.id) <= (late.xid, h.upto) AND o.xid > '2'
            ORDER BY o.xid, o.id LIMIT (SELECT events FROM most)) n)
        UNION ALL
        (SELECT ` + untakenColumns + ` FROM outbox o
         WHERE h.new_above IS NULL AND o.xid >= pg_snapshot_xmax(h.base) AND o.xid < pg_snapshot_xmax(h.target) AND o.xid > '2' AND pg_visible_in_snapshot(o.xid, h.target)
         ORDER BY o.xid, o.id LIMIT (SELECT events FROM most))
        UNION ALL
        (SELECT s.id, s.event_type, s.at, s.created_at FROM (
            SELECT ` + untakenColumns + `, o.xid FROM outbox o WHERE h.new_above IS NOT NULL AND o.id > greatest(h.low, h.new_above) AND o.id <= h.upto
            ORDER BY o.id LIMIT (SELECT 8 * events FROM most)) s
         WHERE s.xid >= pg_snapshot_xmax(h.base) AND pg_visible_in_snapshot(s.xid, h.target))`

// InHand is the part of a WITH, behind "most (events)", that counts the deliveries of events which
// relays have in hand and which have no row yet, as in_hand (relay_id, destination, deliveries): a
// living relay writes it within about a second, and what a dead one had in hand waits for another.
// It reads the hundred oldest open ranges.
const InHand = `open AS MATERIALIZED (
    SELECT h.* FROM (SELECT oldest_open_seq FROM outbox_range ORDER BY seq DESC LIMIT 1) l CROSS JOIN LATERAL (
        SELECT o.relay_id, o.base, o.target, o.low, o.upto, o.new_above FROM outbox_range o
        WHERE o.seq >= l.oldest_open_seq AND o.ended_at IS NULL ORDER BY o.seq LIMIT 100) h
), hand AS MATERIALIZED (
    SELECT h.relay_id, e.id, e.event_type FROM open h CROSS JOIN LATERAL (` + eventsOfRange + `) e LIMIT (SELECT events FROM most)
), in_hand AS MATERIALIZED (
    SELECT c.relay_id, c.destination, sum(c.deliveries)::bigint AS deliveries FROM (
        SELECT t.relay_id, r.destination, t.deliveries FROM (SELECT h.relay_id, h.event_type, count(*) AS deliveries FROM hand h GROUP BY h.relay_id, h.event_type LIMIT 100) t
        CROSS JOIN LATERAL (SELECT DISTINCT o.destination FROM outbox_route o WHERE t.event_type LIKE o.like_pattern OFFSET 0) r
        UNION ALL
        SELECT h.relay_id, d.destination, -1 FROM hand h CROSS JOIN LATERAL (SELECT d.destination FROM outbox_delivery d WHERE d.event_id = h.id OFFSET 0) d
    ) c GROUP BY c.relay_id, c.destination HAVING sum(c.deliveries) > 0
)`

// SettledSnapshot selects the snapshot in which each event that is visible has its deliveries: any
// that is not in outbox_delivery is missing for good. The function outbox_is_routed asks this of
// one event. Of one that is not visible a relay may write deliveries yet.
const SettledSnapshot = `
SELECT coalesce((SELECT o.base FROM outbox_range o WHERE o.seq >= l.oldest_open_seq AND o.ended_at IS NULL ORDER BY o.seq LIMIT 1),
                CASE WHEN l.more THEN l.base ELSE l.target END) AS snapshot
FROM (SELECT * FROM outbox_range ORDER BY seq DESC LIMIT 1) l`

const countUntaken = `
WITH most AS MATERIALIZED (SELECT $1::int AS events), ` + Untaken + `
SELECT count(*), coalesce(extract(epoch FROM now() - min(u.created_at)), 0)::float8 FROM untaken u`

// Unrouted are the events that no relay has taken yet.
type Unrouted struct {
	Events int           // up to the limit that was given
	Oldest time.Duration // since its transaction began; 0 without an event
}

// CountUntaken counts the events that are committed and in no range, up to limit, and returns the
// age of the oldest among them. Its cost does not depend on the history.
func CountUntaken(ctx context.Context, db pg.DB, limit int) (u Unrouted, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	var age float64
	if err := db.QueryRow(ctx, countUntaken, limit).Scan(&u.Events, &age); err != nil {
		return Unrouted{}, fmt.Errorf("count events that are not taken: %w", err)
	}
	u.Oldest = max(0, seconds(&age))
	return u, nil
}
