package inbox

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// rescueSQL gives back what dead workers had claimed. The row of an event that is being worked is
// locked, so a row that can be locked has no worker. But a worker may be about to begin, or have
// rolled back and be about to settle. Therefore rescueSQL gives back only the events that the last
// inspection, a second ago, found unlocked under the same fence ($4 and $5).
//
// An event whose workers keep dying fails in the end. Otherwise it would end workers for ever.
const rescueSQL = `
WITH unattended AS MATERIALIZED (
    SELECT e.ctid AS place, e.idempotency_key, e.claim
    FROM inbox_events e
    WHERE e.receiver = $1::text AND e.source = $2::text AND e.processing_state = 'processing' AND e.claimed_at < now() - interval '1 second'
    ORDER BY e.claimed_at
    LIMIT $3::integer
    FOR UPDATE SKIP LOCKED
), abandoned AS MATERIALIZED (
    SELECT u.place
    FROM unattended u JOIN unnest($4::text[], $5::bigint[]) AS s (idempotency_key, claim)
      ON s.idempotency_key = u.idempotency_key AND s.claim = u.claim
), rescued AS (
    UPDATE inbox_events e
    SET interruptions = e.interruptions + 1,
        processing_state = CASE WHEN e.interruptions + 1 < $6::integer THEN 'pending' ELSE 'failed' END,
        next_attempt_at = CASE WHEN e.interruptions + 1 < $6::integer THEN e.next_attempt_at END,
        processed_at = CASE WHEN e.interruptions + 1 < $6::integer THEN NULL ELSE clock_timestamp() END,
        last_error = CASE WHEN e.interruptions + 1 < $6::integer THEN e.last_error ELSE $7::text END
    WHERE e.ctid = ANY (ARRAY(SELECT place FROM abandoned))
    RETURNING e.idempotency_key, e.claim, e.event_type, coalesce(e.ordering_key, '') AS ordering_key, e.processing_state
)
SELECT u.idempotency_key, u.claim, r.idempotency_key IS NOT NULL, coalesce(r.event_type, ''), coalesce(r.ordering_key, ''),
       coalesce(r.processing_state, '')
FROM unattended u LEFT JOIN rescued r ON r.idempotency_key = u.idempotency_key`

// sighting is an event that was found without a worker.
type sighting struct {
	key         string
	fence       int64
	rescued     bool
	eventType   string
	orderingKey string
	state       State
}

// rescueBatch bounds one rescue; what is left over has its turn a second later.
const rescueBatch = 1000

// rescueUnattended gives back what was suspected already, and returns all that has no worker now.
func (s *runner) rescueUnattended(ctx context.Context, suspects map[string]int64) (found []sighting, err error) {
	keys, fences := make([]string, 0, len(suspects)), make([]int64, 0, len(suspects))
	for key, fence := range suspects {
		keys, fences = append(keys, key), append(fences, fence)
	}
	err = s.inTransaction(ctx, "rescue events", "on", func(batch *pgx.Batch) {
		batch.Queue(rescueSQL, s.Receiver, s.Source, rescueBatch, keys, fences, maxInterruptions, crashLoopText).Query(func(rows pgx.Rows) (err error) {
			found, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (sighting, error) {
				var f sighting
				return f, row.Scan(&f.key, &f.fence, &f.rescued, &f.eventType, &f.orderingKey, &f.state)
			})
			return err
		})
	})
	return found, err
}

// sweepSQL finds ordering keys with waiting events of which none is released and none has failed
// before. They remain if a process dies between a commit and release, or if an operator changes
// rows by hand. It visits at most $4 keys after $3, from key to key by the index. OFFSET 0 prevents
// a plan that first reads all released events into a temporary table.
const sweepSQL = `
WITH RECURSIVE line AS (
    (SELECT w.ordering_key, 1 AS number FROM inbox_events w
     WHERE w.receiver = $1::text AND w.source = $2::text AND w.processing_state = 'pending' AND w.next_attempt_at IS NULL AND w.ordering_key > $3::text
     ORDER BY w.ordering_key LIMIT 1)
    UNION ALL
    SELECT (SELECT w.ordering_key FROM inbox_events w
            WHERE w.receiver = $1::text AND w.source = $2::text AND w.processing_state = 'pending' AND w.next_attempt_at IS NULL AND w.ordering_key > line.ordering_key
            ORDER BY w.ordering_key LIMIT 1), line.number + 1
    FROM line WHERE line.ordering_key IS NOT NULL AND line.number <= $4::integer
)
SELECT line.ordering_key,
       NOT EXISTS (SELECT FROM inbox_events g WHERE g.receiver = $1::text AND g.source = $2::text AND g.ordering_key = line.ordering_key
           AND (g.processing_state = 'processing' OR g.processing_state = 'pending' AND g.next_attempt_at IS NOT NULL) OFFSET 0)
       AND NOT ($5::boolean AND EXISTS (SELECT FROM inbox_events f WHERE f.receiver = $1::text AND f.source = $2::text AND f.ordering_key = line.ordering_key
           AND f.processing_state = 'failed' AND (f.sequence, f.inbox_id) < (
               SELECT w.sequence, w.inbox_id FROM inbox_events w
               WHERE w.receiver = $1::text AND w.source = $2::text AND w.ordering_key = line.ordering_key AND w.processing_state = 'pending' AND w.next_attempt_at IS NULL
               ORDER BY w.sequence, w.inbox_id LIMIT 1) OFFSET 0))
FROM line
WHERE line.ordering_key IS NOT NULL
ORDER BY line.ordering_key`

// sweepBatch is how many ordering keys one sweep visits.
const sweepBatch = 1000

// stalled returns ordering keys after the given one whose next event must be released, and the last
// key that it has visited, or "" at the end.
func (s *runner) stalled(ctx context.Context, after string) (keys []string, last string, err error) {
	visited := 0
	err = s.inTransaction(ctx, "sweep ordering keys", "off", func(batch *pgx.Batch) {
		batch.Queue(sweepSQL, s.Receiver, s.Source, after, sweepBatch, s.cfg.OnFailure == FailureBlocks).Query(func(rows pgx.Rows) error {
			var key string
			var stalled bool
			_, err := pgx.ForEachRow(rows, []any{&key, &stalled}, func() error {
				visited++
				last = key
				if stalled {
					keys = append(keys, key)
				}
				return nil
			})
			return err
		})
	})
	if visited < sweepBatch {
		last = ""
	}
	return keys, last, err
}

// adoptSQL makes due what an operator has set to pending by hand without next_attempt_at and
// without an ordering key.
const adoptSQL = `
UPDATE inbox_events
SET next_attempt_at = now()
WHERE ctid = ANY (ARRAY(
    SELECT e.ctid FROM inbox_events e
    WHERE e.receiver = $1::text AND e.source = $2::text AND e.ordering_key IS NULL AND e.processing_state = 'pending' AND e.next_attempt_at IS NULL
    ORDER BY e.receiver, e.source, e.ordering_key, e.sequence, e.inbox_id
    LIMIT $3::integer
    FOR UPDATE SKIP LOCKED))`

func (s *runner) adopt(ctx context.Context) (some bool, err error) {
	err = s.inTransaction(ctx, "sweep events", "on", func(batch *pgx.Batch) {
		batch.Queue(adoptSQL, s.Receiver, s.Source, sweepBatch).Exec(func(changed pgconn.CommandTag) error {
			some = changed.RowsAffected() > 0
			return nil
		})
	})
	return some, err
}
