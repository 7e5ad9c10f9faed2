package compare

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// The planner must walk indexes also where statistics are from a time when the tables were small; a
// merge of two indexes is the fastest for a page. A page takes a fraction of a second where the
// database is not overloaded, and compiling its statement would take longer.
const pinSQL = `
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true), set_config('enable_hashjoin', 'off', true),
       set_config('jit', 'off', true), set_config('statement_timeout', '5min', true), set_config('lock_timeout', '2s', true)`

// within runs f in a transaction that only reads.
func within(ctx context.Context, db pg.Pool, f func(pgx.Tx) error) error {
	tx, err := db.Begin(ctx)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // nothing was changed
	if _, err := tx.Exec(ctx, pinSQL); err != nil {
		return fmt.Errorf("prepare transaction: %w", err)
	}
	return f(tx)
}

// The archive loses whole months, the oldest first. What was never archived stands in outbox.
const selectStart = `
SELECT clock_timestamp(), coalesce(f.id, 0), f.created_at
FROM (SELECT) one
LEFT JOIN LATERAL (
    SELECT * FROM (
        (SELECT 1 AS rank, a.id, a.created_at FROM outbox_archive a ORDER BY a.id LIMIT 1)
        UNION ALL
        (SELECT 2, o.id, o.created_at::timestamptz FROM outbox o ORDER BY o.id LIMIT 1)
    ) e ORDER BY e.rank LIMIT 1
) f ON true`

// start returns the time, and the oldest event that is kept by its id and time; nil: there is none.
func start(ctx context.Context, db pg.Pool) (now time.Time, id int64, oldest *time.Time, err error) {
	if err := db.QueryRow(ctx, selectStart).Scan(&now, &id, &oldest); err != nil {
		return now, 0, nil, fmt.Errorf("read the time of the outbox: %w", err)
	}
	return now, id, oldest, nil
}

// Keys at equal distances by id: a sample of sequential keys is spread evenly, and one of random
// keys is random.
const selectBounds = `
SELECT e.key
FROM (SELECT least((SELECT min(id) FROM outbox), (SELECT min(id) FROM outbox_archive)) AS low,
             greatest((SELECT max(id) FROM outbox), (SELECT max(id) FROM outbox_archive)) AS high) ends
CROSS JOIN LATERAL (SELECT least($1::bigint, 1 + (ends.high - ends.low) / 64) AS parts) p
CROSS JOIN LATERAL generate_series(1, p.parts) n
CROSS JOIN LATERAL (
    SELECT c.key FROM (
        (SELECT o.id, o.idempotency_key::text AS key FROM outbox o WHERE o.id >= ends.low + ((ends.high - ends.low)::float8 * n / (p.parts + 1))::bigint ORDER BY o.id LIMIT 1)
        UNION ALL
        (SELECT a.id, a.idempotency_key FROM outbox_archive a WHERE a.id >= ends.low + ((ends.high - ends.low)::float8 * n / (p.parts + 1))::bigint ORDER BY a.id LIMIT 1)
    ) c ORDER BY c.id LIMIT 1
) e`

// sample returns at most n keys, in no order.
func sample(ctx context.Context, db pg.Pool, n int) (keys []string, err error) {
	return keys, within(ctx, db, func(tx pgx.Tx) error {
		keys, err = rows.Values[string](ctx, tx, "sample keys", selectBounds, n)
		return err
	})
}

// How a delivery counts: see [class].
const (
	classify = ` CASE d.status
           WHEN 'delivered' THEN CASE WHEN d.delivered_at < $4::timestamptz THEN 2 WHEN d.delivered_at < $5::timestamptz THEN 0 WHEN d.delivered_at < $6::timestamptz THEN 1 ELSE 3 END
           WHEN 'pending' THEN 4 WHEN 'failed' THEN 5 ELSE 6 END`

	selectEnd = `
SELECT coalesce(max(p.id), 0), count(*) FROM (SELECT o.id FROM outbox o WHERE o.id > $1::bigint ORDER BY o.id LIMIT $2::integer) p`
	selectPage = `
SELECT o.id, o.idempotency_key::text,` + classify + `
FROM outbox o JOIN outbox_delivery d ON d.event_id = o.id
WHERE o.id > $1::bigint AND o.id <= $2::bigint AND d.event_id > $1::bigint AND d.event_id <= $2::bigint AND d.destination = ANY ($3::text[])
ORDER BY o.id`

	selectArchivedEnd = `
SELECT coalesce(max(p.id), 0), count(*) FROM (SELECT a.id FROM outbox_archive a WHERE a.id > $1::bigint ORDER BY a.id LIMIT $2::integer) p`
	selectArchivedPage = `
SELECT a.id, a.idempotency_key,` + classify + `
FROM outbox_archive a CROSS JOIN LATERAL jsonb_to_recordset(a.deliveries) AS d (destination text, status text, delivered_at timestamptz)
WHERE a.id > $1::bigint AND a.id <= $2::bigint AND d.destination = ANY ($3::text[])
ORDER BY a.id`
)

// A table has events and their deliveries.
type table struct{ end, page string }

// tables of events. The archive comes last: an event that moves there meanwhile counts twice, and
// its range is compared key by key.
func tables() []table {
	return []table{{selectEnd, selectPage}, {selectArchivedEnd, selectArchivedPage}}
}

// page calls visit for the deliveries of the next events of a table, in the order of the events.
// The key is valid until visit returns. It returns the id of the last event, and how many events
// there were.
func page(ctx context.Context, db pg.Pool, from table, after int64, limit int, w window, visit func(id int64, key []byte, c class)) (end, n int64, err error) {
	return end, n, within(ctx, db, func(tx pgx.Tx) error {
		if err := tx.QueryRow(ctx, from.end, after, limit).Scan(&end, &n); err != nil {
			return fmt.Errorf("find a page of events: %w", err)
		}
		return eachDelivery(ctx, tx, from.page, after, end, w, visit)
	})
}

func eachDelivery(ctx context.Context, tx pgx.Tx, statement string, after, end int64, w window, visit func(id int64, key []byte, c class)) error {
	found, err := tx.Query(ctx, statement, after, end, w.destinations, w.since, w.until, w.until.Add(w.fresh))
	if err != nil {
		return fmt.Errorf("read deliveries: %w", err)
	}
	defer found.Close()
	var id int64
	var key pgtype.DriverBytes
	var c int32
	for found.Next() {
		if err := found.Scan(&id, &key, &c); err != nil {
			return fmt.Errorf("read deliveries: %w", err)
		}
		visit(id, key, class(c))
	}
	if err := found.Err(); err != nil {
		return fmt.Errorf("read deliveries: %w", err)
	}
	return nil
}

// A sent is an event of the sender, wherever it went. An event of the archive may have the key of a
// later one.
type sent struct {
	Key         string
	ID          int64
	Type        string
	CreatedAt   time.Time
	Archived    bool
	Destination *string // of the first delivery that counts; nil: none was delivered
	DeliveredAt *time.Time
}

const (
	columns  = `e.key, e.id, e.type, e.created_at, e.archived, e.destination, e.delivered_at`
	inOutbox = `SELECT o.idempotency_key::text AS key, o.id, o.event_type::text AS type, o.created_at::timestamptz, false AS archived, s.destination, s.delivered_at
     FROM outbox o LEFT JOIN LATERAL (
         SELECT d.destination, d.delivered_at FROM outbox_delivery d
         WHERE d.event_id = o.id AND d.destination = ANY ($2::text[]) AND d.status = 'delivered' ORDER BY d.delivered_at LIMIT 1) s ON true
     WHERE o.idempotency_key`
	inArchive = `SELECT a.idempotency_key, a.id, a.event_type, a.created_at, true, s.destination, s.delivered_at
     FROM outbox_archive a LEFT JOIN LATERAL (
         SELECT d.destination, d.delivered_at FROM jsonb_to_recordset(a.deliveries) AS d (destination text, status text, delivered_at timestamptz)
         WHERE d.destination = ANY ($2::text[]) AND d.status = 'delivered' ORDER BY d.delivered_at LIMIT 1) s ON true
     WHERE a.idempotency_key`

	selectAfter = `SELECT ` + columns + ` FROM (
    (` + inOutbox + ` > $1::text ORDER BY o.idempotency_key LIMIT $3::integer)
    UNION ALL
    (` + inArchive + ` > $1::text ORDER BY a.idempotency_key LIMIT $3::integer)
) e ORDER BY e.key COLLATE "C", e.archived LIMIT $3::integer`

	selectKeys = `SELECT ` + columns + ` FROM (
    (` + inOutbox + ` = ANY ($1::text[]))
    UNION ALL
    (` + inArchive + ` = ANY ($1::text[]))
) e ORDER BY e.key COLLATE "C", e.archived`
)

// after returns the events whose keys follow one, in the order of keys.
func after(ctx context.Context, db pg.Pool, key string, destinations []string, limit int) (list []sent, err error) {
	return list, within(ctx, db, func(tx pgx.Tx) error {
		list, err = rows.Structs[sent](ctx, tx, "list events by key", selectAfter, key, destinations, limit)
		return err
	})
}

// withKeys returns the events that have one of the keys.
func withKeys(ctx context.Context, db pg.Pool, keys, destinations []string) (list []sent, err error) {
	return list, within(ctx, db, func(tx pgx.Tx) error {
		list, err = rows.Structs[sent](ctx, tx, "find events by key", selectKeys, keys, destinations)
		return err
	})
}
