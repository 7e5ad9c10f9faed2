package consumer

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
)

// changeBatch is how many events a replay changes in one transaction.
const changeBatch = 1000

// lookBatch is at how many events it looks for them, in one transaction.
const lookBatch = 10_000

// chosen is true of the events e that a Filter chooses, if their numbers are right.
const chosen = `
    ($6::text = '' OR e.event_type LIKE $6::text)
    AND e.processing_state = ANY ($7::text[])
    AND ($8::timestamptz IS NULL OR e.received_at >= $8::timestamptz) AND ($9::timestamptz IS NULL OR e.received_at < $9::timestamptz)
    AND ($10::text = '' OR e.idempotency_key = $10::text)
    AND ($11::text = '' OR e.ordering_key = $11::text)`

// numbered is true of the right numbers, behind $3. In numberedAside the index of the numbers does not answer it.
const (
	numbered      = `e.inbox_id > $3::bigint AND e.inbox_id >= $4::bigint AND ($5::bigint = 0 OR e.inbox_id <= $5::bigint)`
	numberedAside = `e.inbox_id + 0 > $3::bigint AND e.inbox_id + 0 >= $4::bigint AND ($5::bigint = 0 OR e.inbox_id + 0 <= $5::bigint)`
)

// workable is true of the events that a handler can work again, and of all where that does not matter.
const workable = ` AND (NOT $14::boolean OR e.payload IS NOT NULL)`

// Three ways to the same rows: whoever looks for one key must not read them all, nor whoever looks for the few that failed
// or were ignored read those that succeeded. One statement looks at no more than $13 of them, however few it finds: next is
// where the following one goes on.
const (
	chooseByKey = `
WITH reach AS (
    SELECT 0::bigint AS next WHERE $13::bigint > 0
), chosen AS MATERIALIZED (
    SELECT e.ctid AS place, e.inbox_id FROM inbox_events e
    WHERE ` + chosen + ` AND ` + numberedAside + ` AND e.receiver = $1::text AND e.source = $2::text AND e.idempotency_key = $10::text` + workable + `
    FOR UPDATE SKIP LOCKED
)`
	chooseForReview = reachHead + ` AND ` + forReview + reachTail + forReview + chosenTail
	chooseByNumber  = reachHead + reachTail + `e.receiver = $1::text AND e.source || '' = $2::text` + chosenTail // not by the primary key

	forReview = `e.receiver = $1::text AND e.source = $2::text AND e.processing_state IN ('failed', 'ignored')`

	reachHead = `
WITH reach AS MATERIALIZED (
    SELECT max(r.inbox_id) AS last, CASE WHEN count(*) < $13::bigint THEN 0 ELSE max(r.inbox_id) END AS next
    FROM (SELECT e.inbox_id FROM inbox_events e WHERE ` + numbered
	reachTail = ` ORDER BY e.inbox_id LIMIT $13::bigint) r
), chosen AS MATERIALIZED (
    SELECT e.ctid AS place, e.inbox_id FROM inbox_events e
    WHERE ` + chosen + ` AND ` + numbered + ` AND e.inbox_id <= (SELECT last FROM reach) AND `
	chosenTail = workable + `
    ORDER BY e.inbox_id LIMIT $12::bigint
    FOR UPDATE SKIP LOCKED
)`
)

// replaySQL makes what was chosen pending again. What has an ordering key waits: release decides whose turn it is.
const replaySQL = `, changed AS (
    UPDATE inbox_events e
    SET processing_state = 'pending', attempts = 0, interruptions = 0, processed_at = NULL,
        next_attempt_at = CASE WHEN e.ordering_key IS NULL THEN now() END
    WHERE e.ctid = ANY (ARRAY(SELECT place FROM chosen))
    RETURNING e.ordering_key
)` + changedSQL

// ignoreSQL sets what was chosen aside.
const ignoreSQL = `, changed AS (
    UPDATE inbox_events e
    SET processing_state = 'ignored', processed_at = clock_timestamp(), next_attempt_at = NULL
    WHERE e.ctid = ANY (ARRAY(SELECT place FROM chosen))
    RETURNING e.ordering_key
)` + changedSQL

const changedSQL = `
SELECT (SELECT count(*) FROM changed),
       CASE WHEN (SELECT count(*) FROM chosen) < $12::bigint THEN (SELECT next FROM reach) ELSE (SELECT max(inbox_id) FROM chosen) END,
       ARRAY(SELECT DISTINCT ordering_key FROM changed WHERE ordering_key IS NOT NULL)`

// changed is what one batch has done.
type changed struct {
	events       int64
	last         int64 // number of the last event that was visited; 0: there are no more
	orderingKeys []string
}

func (in *Inbox) changeSome(ctx context.Context, f Filter, query string, after, limit int64) (done changed, err error) {
	choose := chooseByNumber
	switch {
	case f.Key != "":
		choose = chooseByKey
	case !slices.ContainsFunc(f.States, func(s State) bool { return !slices.Contains(forPersons, s) }):
		choose = chooseForReview
	}
	ctx, cancel := context.WithTimeout(ctx, in.CommitTimeout)
	defer cancel()
	conn, err := in.pool.Acquire(ctx)
	if err != nil {
		return changed{}, fmt.Errorf("change events: %w", err)
	}
	defer conn.Release()
	batch := &pgx.Batch{}
	batch.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	batch.Queue(pinSQL, "on")
	batch.Queue(choose+query, append(f.args(&in.settings.Config, after), limit, lookBatch, query == replaySQL)...).QueryRow(func(row pgx.Row) error {
		return row.Scan(&done.events, &done.last, &done.orderingKeys)
	})
	batch.Queue("commit")
	if err := sendAll(ctx, conn, batch); err != nil {
		return changed{}, fmt.Errorf("change events: %w", err)
	}
	return done, nil
}

// args are those of chosen.
func (f Filter) args(of *Config, after int64) []any {
	states := make([]string, len(f.States))
	for i, state := range f.States {
		states[i] = string(state)
	}
	var since, until any
	if !f.Since.IsZero() {
		since = f.Since
	}
	if !f.Until.IsZero() {
		until = f.Until
	}
	return []any{of.Receiver, of.Source, after, f.FromID, f.ToID, f.like(), states, since, until, f.Key, f.OrderingKey}
}

// countSQL counts what a Filter chooses.
const countSQL = `
SELECT count(*) FROM (
    SELECT FROM inbox_events e
    WHERE ` + chosen + ` AND ` + numbered + ` AND e.receiver = $1::text AND e.source = $2::text
    LIMIT nullif($12::bigint, 0)
) e`

func (in *Inbox) count(ctx context.Context, f Filter) (events int64, err error) {
	if err := in.pool.QueryRow(ctx, countSQL, append([]any{plannedAnew}, append(f.args(&in.settings.Config, 0), f.Limit)...)...).Scan(&events); err != nil {
		return 0, fmt.Errorf("count events: %w", err)
	}
	return events, nil
}
