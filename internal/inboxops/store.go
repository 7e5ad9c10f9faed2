package inboxops

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// The planner must walk indexes also where statistics are from a time when the tables were small. A
// statement that runs for longer than half a minute is ended: none of this package needs as long,
// and vacuum waits for it. What others have put into the schema is not called.
const pinSQL = `
SELECT pg_catalog.set_config('enable_seqscan', 'off', true), pg_catalog.set_config('enable_bitmapscan', 'off', true),
       pg_catalog.set_config('enable_hashjoin', 'off', true), pg_catalog.set_config('enable_mergejoin', 'off', true),
       pg_catalog.set_config('jit', 'off', true), pg_catalog.set_config('synchronous_commit', 'on', true),
       pg_catalog.set_config('statement_timeout', '30s', true), pg_catalog.set_config('lock_timeout', '2s', true),
       pg_catalog.set_config('search_path', 'pg_catalog', true)`

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

// The oldest schema version whose programs work with the schema.
const selectCompatibleSince = `SELECT inbox_compatible_since()`

// Whether the database is that of a producer.
const selectHasOutbox = `SELECT EXISTS (SELECT FROM pg_class WHERE relname = 'outbox_schema_version')`

// value reads one value in a new transaction.
func value[T any](ctx context.Context, o *Ops, statement string) (v T, err error) {
	err = o.read(ctx, func(tx pgx.Tx) error { return tx.QueryRow(ctx, statement).Scan(&v) })
	return v, err
}

const selectTables = `
SELECT c.relname::text, quote_ident(n.nspname) || '.' || quote_ident(c.relname)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND n.nspname <> 'information_schema' AND NOT starts_with(n.nspname, 'pg_')
ORDER BY n.nspname, c.relname LIMIT 10000`

// Tables returns the tables and views of the database by name: each as SQL writes it, with its
// schema.
func (o *Ops) Tables(ctx context.Context) (tables map[string]string, err error) {
	tables = map[string]string{}
	err = o.read(ctx, func(tx pgx.Tx) error {
		found, err := tx.Query(ctx, selectTables)
		if err != nil {
			return err
		}
		var name, written string
		_, err = pgx.ForEachRow(found, []any{&name, &written}, func() error { tables[name] = written; return nil })
		return err
	})
	return tables, err
}

const selectNow = `SELECT clock_timestamp()`

func databaseTime(ctx context.Context, tx pgx.Tx, now *time.Time) error {
	if err := tx.QueryRow(ctx, selectNow).Scan(now); err != nil {
		return fmt.Errorf("read the database's time: %w", err)
	}
	return nil
}

// sendersOf finds the pairs of receiver and source, one after the other by an index, without
// reading the rows between them. %[1]s is the table and %[2]s the condition of the index; $1 and $2
// narrow the pairs unless they are empty.
const sendersOf = `
SELECT receiver, source FROM (
    WITH RECURSIVE pair AS (
        (SELECT receiver, source FROM %[1]s WHERE %[2]s ORDER BY receiver, source LIMIT 1)
        UNION ALL
        SELECT n.receiver, n.source
        FROM pair p CROSS JOIN LATERAL (
            SELECT t.receiver, t.source FROM %[1]s t
            WHERE %[2]s AND (t.receiver, t.source) > (p.receiver, p.source) ORDER BY t.receiver, t.source LIMIT 1) n
    )
    SELECT receiver, source FROM pair LIMIT 10000
) p
WHERE ($1::text = '' OR receiver = $1::text) AND ($2::text = '' OR source = $2::text)`

// openEvents are the conditions of the indexes of inbox_events that begin with receiver and source.
// What succeeded is in none: its senders stand in processed_events.
var openEvents = [...]string{
	`processing_state = 'pending' AND next_attempt_at IS NOT NULL`,
	`processing_state = 'pending' AND next_attempt_at IS NULL`,
	`processing_state = 'processing'`,
	`processing_state IN ('failed', 'ignored')`,
}

// remembered returns the pairs of receiver and source in processed_events, in their order, at most
// 10,000.
func remembered(ctx context.Context, tx pgx.Tx, receiver, source string) ([]Sender, error) {
	return senders(ctx, tx, receiver, source, "processed_events", "true")
}

// withOpenEvents returns the pairs of receiver and source that have events in inbox_events which
// did not succeed, in their order, at most 10,000 for each state.
func withOpenEvents(ctx context.Context, tx pgx.Tx, receiver, source string) (all []Sender, err error) {
	for _, condition := range openEvents {
		list, err := senders(ctx, tx, receiver, source, "inbox_events", condition)
		if err != nil {
			return nil, err
		}
		all = append(all, list...)
	}
	return sortedOnce(all), nil
}

func senders(ctx context.Context, tx pgx.Tx, receiver, source, table, condition string) ([]Sender, error) {
	return rows.Structs[Sender](ctx, tx, "list receivers and sources", fmt.Sprintf(sendersOf, table, condition), receiver, source)
}

// sortedOnce sorts a list of senders, each once.
func sortedOnce(list []Sender) []Sender {
	slices.SortFunc(list, func(a, b Sender) int {
		return cmp.Or(cmp.Compare(a.Receiver, b.Receiver), cmp.Compare(a.Source, b.Source))
	})
	return slices.Compact(list)
}

// columns returns the two columns of a list of senders, as unnest takes them.
func columns(list []Sender) (receivers, sources []string) {
	for _, s := range list {
		receivers, sources = append(receivers, s.Receiver), append(sources, s.Source)
	}
	return receivers, sources
}
