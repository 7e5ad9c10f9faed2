package ops

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
)

// An event is in the range whose target sees its transaction and whose base does not, by its id if
// the range was cut. Ranges from the oldest open one on are read.
const selectRouteState = `
WITH settled AS MATERIALIZED (` + intake.SettledSnapshot + `)
SELECT coalesce(r.seq, 0), coalesce(r.relay_id, 0), coalesce(a.name, ''), coalesce(a.alive, false), r.taken_at, r.ended_at IS NOT NULL,
       ARRAY(SELECT d.destination FROM outbox_delivery d WHERE d.event_id = e.id ORDER BY d.destination),
       (SELECT count(*) FROM outbox_relay r WHERE ` + pg.IsAlive + ` AND quarantined IS NULL),
       EXISTS (SELECT FROM outbox_relay r WHERE ` + pg.IsAlive + ` AND quarantined IS NOT NULL)
FROM outbox e
LEFT JOIN LATERAL (
    SELECT n.* FROM (SELECT oldest_open_seq FROM outbox_range ORDER BY seq DESC LIMIT 1) l CROSS JOIN LATERAL (
        SELECT o.* FROM outbox_range o
        WHERE o.seq >= l.oldest_open_seq AND pg_visible_in_snapshot(e.xid, o.target) AND NOT pg_visible_in_snapshot(e.xid, o.base)
          AND e.id > o.low AND e.id <= o.upto
        ORDER BY o.seq LIMIT 1) n) r ON true
LEFT JOIN (SELECT r.id, r.name, ` + pg.IsAlive + ` AS alive FROM outbox_relay r) a ON a.id = r.relay_id
WHERE e.id = $1 AND NOT pg_visible_in_snapshot(e.xid, (SELECT snapshot FROM settled))`

// routeState is how far the relays have come with an event that may lack deliveries.
type routeState struct {
	Range       int64  // 0: no relay has taken it
	RelayID     int32  // of the relay that has taken it
	Name        string // of that relay; empty: it is gone
	Alive       bool   // that relay
	TakenAt     *time.Time
	Ended       bool     // each delivery has a row
	Settled     []string // destinations of the deliveries that have a row; an empty one is parked
	Relays      int64    // that run and are not quarantined
	Quarantined bool     // a relay that is quarantined runs
}

// routing returns the state of an event that is not routed yet, or in a relay's hand; false: all
// its deliveries have rows, or are missing for good.
func (o *Outbox) routing(ctx context.Context, eventID int64) (s routeState, open bool, err error) {
	rows, err := o.pool.Query(ctx, selectRouteState, eventID)
	if err == nil {
		s, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[routeState])
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return routeState{}, false, nil
	}
	if err != nil {
		return routeState{}, false, fmt.Errorf("find out whether an event is routed: %w", err)
	}
	return s, !s.Ended, nil
}

const selectNotRouted = `
WITH settled AS MATERIALIZED (` + intake.SettledSnapshot + `)
SELECT count(*), coalesce(array_agg(e.id) FILTER (WHERE e.id = ANY ($2::bigint[])), '{}')
FROM outbox e
WHERE e.id = ANY ($1::bigint[]) AND NOT pg_visible_in_snapshot(e.xid, (SELECT snapshot FROM settled))
  AND NOT EXISTS (SELECT FROM outbox_delivery d WHERE d.event_id = e.id)`

// notRouted counts those of the events that have no delivery yet, and returns which of among they
// are.
func (o *Outbox) notRouted(ctx context.Context, events, among []int64) (n int64, which []int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	if err := o.pool.QueryRow(ctx, selectNotRouted, events, among).Scan(&n, &which); err != nil {
		return 0, nil, fmt.Errorf("count events that are not routed: %w", err)
	}
	return n, which, nil
}

// Untaken counts the events that no relay has taken yet.
func (o *Outbox) Untaken(ctx context.Context) (Untaken, error) { return untaken(ctx, o.pool) }

func untaken(ctx context.Context, q pg.DB) (Untaken, error) {
	found, err := intake.CountUntaken(ctx, q, CountedTo+1)
	return Untaken{int64(found.Events), found.Oldest.Seconds()}, err
}
