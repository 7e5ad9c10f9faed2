package watch

import (
	"context"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/pg"
)

// Each count reads one index and stops at the limit, so that the statement costs the same however much waits. The seconds of a
// lane come from what the watcher looks at.
const CountBacklog = `
SELECT now(), jsonb_build_object(
    'lanes', (SELECT jsonb_agg(jsonb_build_object('destination', n.destination,
        'pending', (SELECT count(*) FROM (SELECT FROM outbox_delivery d
                                          WHERE d.destination = n.destination AND d.status = 'pending' LIMIT $3) pending),
        'failed', (SELECT count(*) FROM (SELECT FROM outbox_delivery d
                                         WHERE d.destination = n.destination AND d.status = 'failed' LIMIT $3) failed),
        'paused', coalesce(s.paused, false), 'held', coalesce(s.paused OR s.breaker <> 'closed', false)))
        FROM unnest($1::text[]) n (destination) LEFT JOIN outbox_destination s ON s.destination = n.destination),
    'seen', (` + watchLanes + `),
    'parked', (` + watchParked + `),
    'unserved', (SELECT count(*) FROM (` + pg.Unserved + `) u),
    'undelivered', (SELECT jsonb_build_object('count', cardinality(u.missing)) FROM outbox_undelivered u))`

func (w *Watcher) countBacklog(ctx context.Context, destinations, lenient []string, limit int, lagOver time.Duration) (at time.Time, content []byte, err error) {
	if err = w.DB.QueryRow(ctx, CountBacklog, destinations, lenient, limit, lagOver.Seconds()).Scan(&at, &content); err != nil {
		return time.Time{}, nil, fmt.Errorf("count backlog: %w", err)
	}
	return at, content, nil
}
