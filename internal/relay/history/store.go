package history

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// Relays that write the same rows do so in one order, so that none waits for another in a circle.
// What was counted since half a minute ago belongs to the minute that lay around it.
const addCounts = `
WITH given AS MATERIALIZED (
    SELECT g.* FROM jsonb_to_recordset($1) AS g (destination text, event_type text, delivered bigint, failed bigint, retried bigint, probes bigint,
                                                 took integer[], latency integer[])
), backlog AS MATERIALIZED (
    SELECT n.destination, (SELECT count(*) FROM (VALUES (n.destination)) ` + pg.PendingOf + `) AS pending FROM unnest($2::text[]) n (destination)
), counted AS (
    SELECT coalesce(g.destination, b.destination) AS destination, coalesce(g.event_type, '') AS event_type, coalesce(g.delivered, 0) AS delivered,
           coalesce(g.failed, 0) AS failed, coalesce(g.retried, 0) AS retried, coalesce(g.probes, 0) AS probes, b.pending,
           coalesce(g.took, '{}') AS took, coalesce(g.latency, '{}') AS latency
    FROM given g FULL JOIN (SELECT destination, '' AS event_type, pending FROM backlog UNION ALL SELECT '', '', sum(pending) FROM backlog) b
        ON b.destination = g.destination AND b.event_type = g.event_type
), pruned AS (
    DELETE FROM outbox_history h WHERE $3 AND h.at < now() - make_interval(hours => CASE h.step WHEN 1 THEN 25 ELSE 14 * 24 + 1 END)
)
INSERT INTO outbox_history AS h (step, destination, at, event_type, delivered, failed, retried, probes, backlog, took, latency)
SELECT s.step, c.destination, date_bin(make_interval(mins => s.step), now() - interval '30 seconds', timestamptz 'epoch'), c.event_type,
       c.delivered, c.failed, c.retried, c.probes, c.pending, c.took, c.latency
FROM counted c CROSS JOIN (VALUES (1), (60)) s (step)
WHERE c.pending > 0 OR c.delivered + c.failed + c.retried + c.probes > 0
ORDER BY s.step, c.destination, c.event_type
ON CONFLICT (step, destination, at, event_type) DO UPDATE
SET delivered = h.delivered + excluded.delivered, failed = h.failed + excluded.failed, retried = h.retried + excluded.retried,
    probes = h.probes + excluded.probes, backlog = greatest(h.backlog, excluded.backlog),
    took = ARRAY(SELECT coalesce(t.a, 0) + coalesce(t.b, 0) FROM unnest(h.took, excluded.took) WITH ORDINALITY t (a, b, i) ORDER BY t.i),
    latency = ARRAY(SELECT coalesce(t.a, 0) + coalesce(t.b, 0) FROM unnest(h.latency, excluded.latency) WITH ORDINALITY t (a, b, i) ORDER BY t.i)`

// row is one of those that are added.
type row struct {
	Destination string `json:"destination"`
	EventType   string `json:"event_type"`
	*Counts
}

// pruneEvery is after how many flushes one also removes what is too old.
const pruneEvery = 60

// Flush adds what was counted since the last flush, and the backlog of the given destinations, to
// the database. What could not be written is kept for the next one. Only one flush may run at a
// time.
func (r *Recorder) Flush(ctx context.Context, db pg.DB, destinations []string) error {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	taken := r.take()
	sums := sum(taken)
	written := []row{}
	for _, key := range busiest(sums) {
		written = append(written, row{key.Destination, key.EventType, sums[key]})
	}
	busy := func(name string) int64 {
		if c := sums[Key{Destination: name}]; c != nil {
			return c.Attempts()
		}
		return 0
	}
	names := slices.Clone(destinations)
	slices.SortStableFunc(names, func(a, b string) int { return int(min(1, max(-1, busy(b)-busy(a)))) })
	text, err := json.Marshal(written) // a string, since bytes become a bytea behind a pooler
	if err == nil {
		_, err = db.Exec(ctx, addCounts, string(text), names[:min(backlogs, len(names))], r.flushes%pruneEvery == 0)
	}
	if err != nil {
		r.giveBack(taken)
		return fmt.Errorf("write history: %w", err)
	}
	r.flushes++
	return nil
}

// A Point is what is stored of one step.
type Point struct {
	Destination string
	EventType   string
	At          time.Time
	Backlog     *int64
	Counts
}

const selectPoints = `
SELECT destination, event_type, at, backlog, delivered, failed, retried, probes, took, latency
FROM outbox_history WHERE step = $1 AND destination = $2 AND at > now() - make_interval(secs => $3) ORDER BY at, event_type`

// Read returns what is stored of a destination; the empty name stands for all together.
func Read(ctx context.Context, db pg.DB, destination string, span Span) ([]Point, error) {
	return rows.Structs[Point](ctx, db, "read history", selectPoints, span.rows, destination, span.Back.Seconds())
}

const selectEach = `
SELECT h.destination, h.event_type, h.at, h.backlog, h.delivered, h.failed, h.retried, h.probes, h.took, h.latency
FROM unnest($1::text[]) n (destination) JOIN outbox_history h ON h.step = 1 AND h.destination = n.destination
     AND h.at > now() - interval '1 hour' AND h.event_type = ''
ORDER BY h.at`

// ReadEach returns what is stored of the last hour of destinations.
func ReadEach(ctx context.Context, db pg.DB, destinations []string) ([]Point, error) {
	return rows.Structs[Point](ctx, db, "read history", selectEach, destinations)
}
