package watch

import (
	"context"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

// Each count reads one index and stops at the limit, so that the statement costs the same however
// much waits. What is pending is counted in the order of its index: without the order, a plan that
// expects one pending row in ten reads the primary key, through all that was delivered. What failed
// is selected in the words of its index, which stand for the status then: with the status alone,
// the row of each would be read. The page of each is read nevertheless until VACUUM was there, so
// only up to 1,000 are counted. The seconds of a lane come from what the watcher looks at.
const CountBacklog = `
WITH RECURSIVE most AS MATERIALIZED (SELECT $3::int AS events), lenient AS MATERIALIZED (SELECT unnest($2::text[]) AS destination), ` + Lag + `
SELECT now(), jsonb_build_object(
    'lanes', (SELECT jsonb_agg(jsonb_build_object('destination', n.destination,
        'pending', (SELECT count(*) FROM (
            (SELECT FROM outbox_delivery d WHERE d.destination = n.destination AND ` + pg.IsDue + `
             ORDER BY d.destination, d.replay, d.next_attempt_at, d.event_id LIMIT $3)
            UNION ALL
            (SELECT FROM outbox_delivery d WHERE d.destination = n.destination AND ` + pg.IsWaiting + `
             ORDER BY d.destination, d.blocked_by, d.event_id LIMIT $3)
            LIMIT $3) pending),
        'waiting', (SELECT count(*) FROM (SELECT FROM outbox_delivery d WHERE d.destination = n.destination AND ` + pg.IsWaiting + `
                                          ORDER BY d.destination, d.blocked_by, d.event_id LIMIT $3) waiting),
        'failed', (SELECT count(*) FROM (SELECT FROM outbox_delivery aside
                                         WHERE aside.destination = n.destination AND n.destination <> ''
                                           AND (aside.status = 'failed' OR aside.status = 'pending' AND aside.destination = '')
                                         LIMIT least($3, 1000)) failed),
        'paused', coalesce(s.paused, false), 'held', coalesce(s.paused OR s.breaker <> 'closed', false)))
        FROM unnest($1::text[]) n (destination) LEFT JOIN outbox_destination s ON s.destination = n.destination),
    'seen', (` + watchLanes + `),
    'untaken', (` + watchUntaken + `),
    'parked', (` + watchParked + `),
    'unserved', (SELECT count(*) FROM (` + pg.UnservedOf + `) u),
    'undelivered', (SELECT jsonb_build_object('count', cardinality(u.missing)) FROM outbox_undelivered u))`

func (w *Watcher) countBacklog(ctx context.Context, destinations, lenient []string, limit int, lagOver time.Duration) (at time.Time, s backlogSample, err error) {
	if err = w.DB.QueryRow(ctx, CountBacklog, destinations, lenient, limit, lagOver.Seconds()).Scan(&at, &s); err != nil {
		return time.Time{}, backlogSample{}, fmt.Errorf("count backlog: %w", err)
	}
	return at, s, nil
}
