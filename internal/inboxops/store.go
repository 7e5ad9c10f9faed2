package inboxops

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// The planner must walk indexes also where statistics are from a time when the tables were small. A statement that runs for
// longer than half a minute is ended: none of this package needs as long, and vacuum waits for it.
const pinSQL = `
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
       set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true),
       set_config('jit', 'off', true), set_config('synchronous_commit', 'on', true),
       set_config('statement_timeout', '30s', true), set_config('lock_timeout', '2s', true)`

func pin(ctx context.Context, tx pgx.Tx) error {
	if _, err := tx.Exec(ctx, pinSQL); err != nil {
		return fmt.Errorf("prepare transaction: %w", err)
	}
	return nil
}

const selectSchemaVersion = `
SELECT coalesce(max(version_id), 0)
FROM (SELECT DISTINCT ON (version_id) version_id, is_applied
      FROM inbox_schema_version ORDER BY version_id, id DESC) v
WHERE is_applied`

func (o *Ops) schemaVersion(ctx context.Context) (version int64, err error) {
	err = o.pool.QueryRow(ctx, selectSchemaVersion).Scan(&version)
	return version, err
}

const selectNow = `SELECT clock_timestamp()`

func databaseTime(ctx context.Context, tx pgx.Tx, now *time.Time) error {
	if err := tx.QueryRow(ctx, selectNow).Scan(now); err != nil {
		return fmt.Errorf("read the database's time: %w", err)
	}
	return nil
}

// sendersOf finds the pairs of receiver and source of a table, one after the other by its primary key, without reading the rows between
// them. %[1]s is the table, $1 and $2 narrow the pairs unless they are empty.
const sendersOf = `
SELECT receiver, source FROM (
    WITH RECURSIVE pair AS (
        (SELECT receiver, source FROM %[1]s ORDER BY receiver, source LIMIT 1)
        UNION ALL
        SELECT n.receiver, n.source
        FROM pair p CROSS JOIN LATERAL (
            SELECT t.receiver, t.source FROM %[1]s t
            WHERE (t.receiver, t.source) > (p.receiver, p.source) ORDER BY t.receiver, t.source LIMIT 1) n
    )
    SELECT receiver, source FROM pair LIMIT 10000
) p
WHERE ($1::text = '' OR receiver = $1::text) AND ($2::text = '' OR source = $2::text)`

const (
	eventsTable = "inbox_events"
	memoryTable = "processed_events"
)

// senders returns the pairs of receiver and source in a table, in their order, at most 10,000.
func senders(ctx context.Context, tx pgx.Tx, table, receiver, source string) ([]Sender, error) {
	rows, err := tx.Query(ctx, fmt.Sprintf(sendersOf, table), receiver, source)
	if err != nil {
		return nil, fmt.Errorf("list receivers and sources: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Sender])
	if err != nil {
		return nil, fmt.Errorf("list receivers and sources: %w", err)
	}
	return list, nil
}

// columns returns the two columns of a list of senders, as unnest takes them.
func columns(list []Sender) (receivers, sources []string) {
	for _, s := range list {
		receivers, sources = append(receivers, s.Receiver), append(sources, s.Source)
	}
	return receivers, sources
}
