package watch

import (
	"context"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/pg"
)

// Each count reads one index and stops at the limit, so that the statement costs the same however much waits. Failed ones are
// asked for in the words of their index, which stands for the status then: with the status alone, the row of each would be read,
// and those lie far apart: so they are counted up to 1,000, for until VACUUM was there, the page of each is read nevertheless. The seconds of a lane come from what the watcher looks at.
const CountBacklog = `
WITH RECURSIVE ` + firstPending + `
SELECT now(), jsonb_build_object(
    'lanes', (SELECT jsonb_agg(jsonb_build_object('destination', n.destination,
        'pending', (SELECT count(*) FROM (SELECT FROM outbox_delivery d
                                          WHERE d.destination = n.destination AND d.status = 'pending' LIMIT $3) pending),
        'failed', (SELECT count(*) FROM (SELECT FROM outbox_delivery aside
                                         WHERE aside.destination = n.destination AND n.destination <> ''
                                           AND (aside.status = 'failed' OR aside.status = 'pending' AND aside.destination = '')
                                         LIMIT least($3, 1000)) failed),
        'paused', coalesce(s.paused, false), 'held', coalesce(s.paused OR s.breaker <> 'closed', false)))
        FROM unnest($1::text[]) n (destination) LEFT JOIN outbox_destination s ON s.destination = n.destination),
    'seen', (` + watchLanes + `),
    'parked', (` + watchParked + `),
    'unserved', (SELECT count(*) FROM (` + pg.UnservedOf + `) u),
    'undelivered', (SELECT jsonb_build_object('count', cardinality(u.missing)) FROM outbox_undelivered u))`

func (w *Watcher) countBacklog(ctx context.Context, destinations, lenient []string, limit int, lagOver time.Duration) (at time.Time, content []byte, err error) {
	if err = w.DB.QueryRow(ctx, CountBacklog, destinations, lenient, limit, lagOver.Seconds()).Scan(&at, &content); err != nil {
		return time.Time{}, nil, fmt.Errorf("count backlog: %w", err)
	}
	return at, content, nil
}
