package watch

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
)

// The snapshot of the statement decides: an event that is settled in it has all its deliveries in
// it. Both walks read the primary keys of both tables. What was found before is searched again, so
// that it goes as soon as it has deliveries. An event that is not settled is left to a later round.
const searchUndelivered = `
WITH state AS MATERIALIZED (
    SELECT coalesce(u.recent_id, (SELECT max(o.id) - $1 FROM outbox o), 0) AS recent_id, u.round_id, u.missing
    FROM outbox_undelivered u WHERE u.searched_at <= now() - make_interval(secs => $2)
    FOR UPDATE SKIP LOCKED
), recent AS MATERIALIZED (
    SELECT e.id FROM state s CROSS JOIN LATERAL (SELECT o.id FROM outbox o WHERE o.id > s.recent_id ORDER BY o.id LIMIT $1) e
), round AS MATERIALIZED (
    SELECT e.id FROM state s CROSS JOIN LATERAL (SELECT o.id FROM outbox o WHERE o.id > s.round_id ORDER BY o.id LIMIT $1) e
), settled AS MATERIALIZED (` + intake.SettledSnapshot + `
), missing AS MATERIALIZED (
    SELECT c.id FROM (SELECT id FROM recent UNION SELECT id FROM round UNION SELECT unnest(missing) FROM state) c
    WHERE NOT EXISTS (SELECT FROM outbox_delivery d WHERE d.event_id = c.id)
      AND EXISTS (SELECT FROM outbox o WHERE o.id = c.id AND pg_visible_in_snapshot(o.xid, (SELECT snapshot FROM settled)))
    ORDER BY c.id LIMIT $3
)
UPDATE outbox_undelivered u
SET searched_at = now(), recent_id = coalesce((SELECT max(id) FROM recent), s.recent_id),
    round_id = CASE WHEN (SELECT count(*) FROM round) = $1 THEN (SELECT max(id) FROM round) ELSE 0 END,
    missing = ARRAY(SELECT id FROM missing ORDER BY id)
FROM state s
RETURNING (SELECT count(*) FROM recent) = $1`

// searchNext looks at the next events of both walks, unless a relay has done so within the given
// age. It reports whether newer events are left.
func (w *Watcher) searchNext(ctx context.Context, age time.Duration, batch int) (more bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	err = w.DB.QueryRow(ctx, searchUndelivered, batch, age.Seconds(), MaxUndelivered+1).Scan(&more)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return false, fmt.Errorf("search events without deliveries: %w", err)
	}
	return more, nil
}
