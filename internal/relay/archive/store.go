package archive

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// An archiveWalk is one of the statements that go through a table batch by batch. They take where
// the last batch ended, how much to look at, an age in seconds and whether it is a dry run,
// and return the same five columns.
type archiveWalk struct {
	name      string
	statement string
	from      int64 // where the first batch begins
	batch     int
}

// A batchResult is what one batch of a walk did.
type batchResult struct {
	Mine     bool // false: another session archives at the moment, and nothing was done
	Cursor   int64
	Examined int32
	Finished bool // nothing more to examine
	Done     int32
}

// The functions see for themselves what is settled: a relay has no right to remove an event.
const archiveEvents = `
SELECT mine, last_id, examined, finished, settled FROM outbox_archive_batch($1::bigint, $2::int, make_interval(secs => $3::float8), $4::bool)`

const pruneAttempts = `
SELECT mine, last_id, examined, finished, removed
FROM outbox_prune_attempts($1::bigint, $2::int, make_interval(secs => $3::float8), $4::bool)`

const pruneProcessedEvents = `
SELECT mine, next_page, examined, finished, removed
FROM outbox_prune_processed_events($1::bigint, $2::int, make_interval(secs => $3::float8), $4::bool)`

// step does one batch. Once begun it is not cut off when ctx ends, because it is short and then
// need not be done again.
func (w archiveWalk) step(ctx context.Context, q pg.DB, cursor int64, olderThan time.Duration, dryRun bool) (batchResult, error) {
	result, err := pg.Struct[batchResult](context.WithoutCancel(ctx), q, w.name, w.statement, cursor, w.batch, olderThan.Seconds(), dryRun)
	return result, pg.WithRoleHint(err)
}

// A partition is dropped as a whole: nothing of it is read, and nothing is left for vacuum.
const dropPartition = `SELECT outbox_drop_archive(make_interval(secs => $1::float8), $2::bool, $3::text)`

// dropOldest drops the oldest partition of the archive of which all is older, and returns its name;
// empty: there is none. A dry run returns the one after the given name.
func dropOldest(ctx context.Context, q pg.DB, olderThan time.Duration, dryRun bool, after string) (string, error) {
	name, err := pg.Value[*string](context.WithoutCancel(ctx), q, "drop month of the archive", dropPartition, olderThan.Seconds(), dryRun, after)
	return plain.OrBlank(name), pg.WithRoleHint(err)
}

const readClock = `SELECT clock_timestamp()`

// checkClock returns an error if the database's clock is far from this host's.
func checkClock(ctx context.Context, q pg.DB) error {
	return webhook.AskClock(func() (time.Time, error) { return pg.Value[time.Time](ctx, q, "read the database's clock", readClock) })
}

const noteRun = `
UPDATE outbox_watch SET archived_at = CASE WHEN $1 = '' THEN now() ELSE archived_at END, archive_error = nullif($1, '')`

// recordRun records that a run has ended, or why it could not.
func recordRun(ctx context.Context, q pg.DB, problem string) error {
	return pg.Exec(context.WithoutCancel(ctx), q, "record run", noteRun, plain.Clip(problem))
}
