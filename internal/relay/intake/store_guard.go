package intake

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

const selectOrigin = `
SELECT i.system_identifier, i.timeline, (SELECT system_identifier FROM pg_control_system()), (SELECT timeline_id FROM pg_control_checkpoint()), i.recorded_at,
       l.target IS NOT NULL, coalesce(pg_snapshot_xmax(l.target) > pg_snapshot_xmax(pg_current_snapshot()), false)
FROM outbox_intake i LEFT JOIN (SELECT target FROM outbox_range ORDER BY seq DESC LIMIT 1) l ON true`

// Some servers let only superusers read the control file.
const selectOriginWithoutControl = `
SELECT i.system_identifier, i.timeline, 0::bigint, 0, i.recorded_at,
       l.target IS NOT NULL, coalesce(pg_snapshot_xmax(l.target) > pg_snapshot_xmax(pg_current_snapshot()), false)
FROM outbox_intake i LEFT JOIN (SELECT target FROM outbox_range ORDER BY seq DESC LIMIT 1) l ON true`

// ErrNoIntake says that outbox_range or outbox_intake lacks the row that the migrations insert.
var ErrNoIntake = errors.New("the table outbox_range or outbox_intake is empty: restore both from a backup")

// CheckOrigin returns a [ForeignError] if the transaction ids in the tables are not this server's.
// A relay calls it whenever it connects, before its first take.
func CheckOrigin(ctx context.Context, db pg.DB) error {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	var e ForeignError
	var begun bool
	into := []any{&e.Recorded.SystemIdentifier, &e.Recorded.Timeline, &e.Found.SystemIdentifier, &e.Found.Timeline, &e.Found.recordedBefore, &begun, &e.Future}
	err := db.QueryRow(ctx, selectOrigin).Scan(into...)
	if pg.HasCode(err, pg.LacksPrivilege) { // on the tables it comes again
		err = db.QueryRow(ctx, selectOriginWithoutControl).Scan(into...)
	}
	switch {
	case errors.Is(err, pgx.ErrNoRows), err == nil && !begun:
		return ErrNoIntake
	case err != nil:
		return fmt.Errorf("check origin of the transaction ids: %w", err)
	case e.Future, differ(e.Recorded.SystemIdentifier, e.Found.SystemIdentifier), differ(e.Recorded.Timeline, e.Found.Timeline):
		return &e
	}
	return nil
}

const recordTimeline = `
UPDATE outbox_intake SET timeline = $2, recorded_at = now() WHERE system_identifier = $1 AND timeline = $3`

// AcceptTimeline records the timeline of a server that was promoted, and keeps the progress.
func AcceptTimeline(ctx context.Context, db pg.DB, e *ForeignError) error {
	if !e.IsFailover() {
		return fmt.Errorf("accept timeline: %w", e)
	}
	if _, err := db.Exec(ctx, recordTimeline, e.Recorded.SystemIdentifier, e.Found.Timeline, e.Recorded.Timeline); err != nil {
		return fmt.Errorf("accept timeline: %w", err)
	}
	return nil
}

const selectSnapshot = `SELECT pg_current_snapshot()::text`

// The lock comes first, since the function has its result. It lets others do the same, and lets
// destinations be paused, which counts in that row.
const coverEvents = `
SELECT c.last_id, c.finished, c.deliveries
FROM (SELECT $1::bigint AS after_id FROM outbox_intake WHERE recorded_at = $4 FOR KEY SHARE) i
CROSS JOIN LATERAL outbox_cover_events(i.after_id, $2::integer, $3::text::pg_snapshot) c`

// The lock waits for batches of coverEvents. Those that come after it find another recorded_at.
const insertBaseline = `
WITH alone AS MATERIALIZED (
    SELECT FROM outbox_intake WHERE recorded_at = $4 FOR UPDATE
), ended AS (
    UPDATE outbox_range SET ended_at = now() WHERE ended_at IS NULL AND EXISTS (SELECT FROM alone)
), recorded AS (
    UPDATE outbox_intake SET system_identifier = $2, timeline = $3, recorded_at = now() WHERE EXISTS (SELECT FROM alone)
)
INSERT INTO outbox_range (seq, relay_id, fence, base, target, low, upto, more, oldest_open_seq, ended_at)
SELECT l.seq + 1, 0, 0, $1::text::pg_snapshot, $1::text::pg_snapshot, 0, 0, false, l.seq + 1, now()
FROM (SELECT seq FROM outbox_range ORDER BY seq DESC LIMIT 1) l WHERE EXISTS (SELECT FROM alone)`

// Rebase makes the server that was found the origin: every event that may not be settled gets
// pending deliveries, and relays begin with what is committed from now on. It goes through all
// events in batches, each committed for itself if db is a pool; found is what [CheckOrigin] found.
// It may be repeated when it was interrupted: until its end, CheckOrigin refuses.
//
// Several relays may do it at once. When one has come to the end, or has accepted another timeline,
// the others stop: what they would cover it may have in hand by then.
//
// The snapshot comes first. An event is committed before it, and covered, or after it, and covered
// or taken: what a batch covers is marked as visible.
func Rebase(ctx context.Context, db pg.DB, found Origin, batch int) (deliveries int64, err error) {
	var since string
	if err := db.QueryRow(ctx, selectSnapshot).Scan(&since); err != nil {
		return 0, fmt.Errorf("rebase: %w", err)
	}
	last, finished := int64(-1<<63), false
	for !finished {
		var n int64
		err := db.QueryRow(ctx, coverEvents, last, batch, since, found.recordedBefore).Scan(&last, &finished, &n)
		if errors.Is(err, pgx.ErrNoRows) {
			return deliveries, CheckOrigin(ctx, db)
		}
		if err != nil {
			return deliveries, fmt.Errorf("rebase: cover events: %w", err)
		}
		deliveries += n
	}
	tag, err := db.Exec(ctx, insertBaseline, since, found.SystemIdentifier, found.Timeline, found.recordedBefore)
	if err != nil {
		return deliveries, fmt.Errorf("rebase: %w", err)
	}
	if tag.RowsAffected() == 0 {
		return deliveries, CheckOrigin(ctx, db)
	}
	return deliveries, nil
}
