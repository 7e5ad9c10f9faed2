package reconcile

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

const boundSQL = `
SELECT pg_catalog.set_config('statement_timeout', $1::pg_catalog.text, true), pg_catalog.set_config('lock_timeout', '2s', true),
       pg_catalog.set_config('jit', 'off', true)`

// bound ends what takes too long. timeout is in milliseconds.
func bound(ctx context.Context, tx pgx.Tx, timeout string) error {
	if _, err := tx.Exec(ctx, boundSQL, timeout); err != nil {
		return fmt.Errorf("bound the statements: %w", err)
	}
	return nil
}

const describeSQL = `
SELECT clock_timestamp(), (SELECT f.received_before FROM inbox_forgotten f WHERE f.receiver = $1::text AND f.source = $2::text)`

func (r *Receiver) describe(ctx context.Context, tx pgx.Tx, a *Answer) error {
	var since *time.Time
	if err := tx.QueryRow(ctx, describeSQL, r.Receiver, r.Source).Scan(&a.Now, &since); err != nil {
		return fmt.Errorf("describe the receiver: %w", err)
	}
	if since != nil {
		a.RemembersSince = *since
	}
	return nil
}

const pagesSQL = `SELECT pg_relation_size('processed_events'::regclass) / current_setting('block_size')::bigint`

func pages(ctx context.Context, tx pgx.Tx) (n int64, err error) {
	if err := tx.QueryRow(ctx, pagesSQL).Scan(&n); err != nil {
		return 0, fmt.Errorf("measure processed_events: %w", err)
	}
	return n, nil
}

// In the order of the pages: that of the keys would read the table at random.
const digestSQL = `
SELECT p.idempotency_key, CASE WHEN p.processing_state IN ('succeeded', 'ignored', 'recorded') THEN NULL ELSE p.received_at END
FROM processed_events p
WHERE p.ctid >= $1::text::tid AND p.ctid < $2::text::tid AND p.receiver = $3::text AND p.source = $4::text
  AND p.received_at >= $5::timestamptz AND p.received_at < $6::timestamptz`

func (r *Receiver) addPages(ctx context.Context, tx pgx.Tx, q Request, page int64, d *Digest, a *Answer) error {
	rows, err := tx.Query(ctx, digestSQL, place(page), place(page+slicePages), r.Receiver, r.Source, finite(q.Since, pgtype.NegativeInfinity), finite(q.Until, pgtype.Infinity))
	if err != nil {
		return fmt.Errorf("digest processed_events: %w", err)
	}
	defer rows.Close()
	var key pgtype.DriverBytes
	var doubtful pgtype.Timestamptz
	for rows.Next() {
		if err := rows.Scan(&key, &doubtful); err != nil {
			return fmt.Errorf("digest processed_events: %w", err)
		}
		d.Add(key)
		if doubtful.Valid && len(a.Held) < MaxKeys {
			a.Held = append(a.Held, Held{Key: string(key), ReceivedAt: doubtful.Time, State: "failed"})
		}
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("digest processed_events: %w", err)
	}
	return nil
}

// place returns the beginning of a page, as SQL writes it. There are fewer than 2^32 pages.
func place(page int64) string { return fmt.Sprintf("(%d,0)", min(page, 1<<32-1)) }

// finite returns a bound that may be absent.
func finite(at time.Time, absent pgtype.InfinityModifier) pgtype.Timestamptz {
	if at.IsZero() {
		return pgtype.Timestamptz{InfinityModifier: absent, Valid: true}
	}
	return pgtype.Timestamptz{Time: at, Valid: true}
}

const listSQL = `
SELECT p.idempotency_key, p.received_at, p.processing_state, 0::bigint, 0::bigint FROM processed_events p
WHERE p.receiver = $1::text AND p.source = $2::text AND p.idempotency_key > $3::text
ORDER BY p.idempotency_key LIMIT $4::integer`

func (r *Receiver) list(ctx context.Context, tx pgx.Tx, q Request) ([]Held, error) {
	return collect(ctx, tx, "list the receiver's events", listSQL, r.Receiver, r.Source, q.After, q.Limit)
}

// What was removed from an inbox had been finished.
const findSQL = `
SELECT p.idempotency_key, p.received_at, CASE WHEN p.processing_state <> 'recorded' THEN p.processing_state ELSE coalesce((
    SELECT i.processing_state FROM inbox_events i WHERE i.receiver = p.receiver AND i.source = p.source AND i.idempotency_key = p.idempotency_key), 'succeeded') END, 0::bigint, coalesce(p.event_id, 0)
FROM processed_events p
WHERE p.receiver = $1::text AND p.source = $2::text AND p.idempotency_key = ANY ($3::text[]) ORDER BY p.idempotency_key`

func (r *Receiver) find(ctx context.Context, tx pgx.Tx, q Request) ([]Held, error) {
	return collect(ctx, tx, "find the receiver's events", findSQL, r.Receiver, r.Source, q.Keys)
}

// Each of the four has its index.
const unfinishedSQL = `
SELECT i.idempotency_key, i.received_at, i.processing_state, 0::bigint, 0::bigint
FROM (
    (SELECT f.idempotency_key, f.received_at, f.processing_state FROM inbox_events f WHERE f.processing_state = 'failed'
       AND f.receiver = $1::text AND f.source = $2::text AND f.received_at >= $3::timestamptz AND f.received_at < $4::timestamptz LIMIT $5::integer)
    UNION ALL
    (SELECT f.idempotency_key, f.received_at, f.processing_state FROM inbox_events f WHERE f.processing_state = 'processing'
       AND f.receiver = $1::text AND f.source = $2::text AND f.received_at >= $3::timestamptz AND f.received_at < $4::timestamptz LIMIT $5::integer)
    UNION ALL
    (SELECT f.idempotency_key, f.received_at, f.processing_state FROM inbox_events f WHERE f.processing_state = 'pending' AND f.next_attempt_at IS NOT NULL
       AND f.receiver = $1::text AND f.source = $2::text AND f.received_at >= $3::timestamptz AND f.received_at < $4::timestamptz LIMIT $5::integer)
    UNION ALL
    (SELECT f.idempotency_key, f.received_at, f.processing_state FROM inbox_events f WHERE f.processing_state = 'pending' AND f.next_attempt_at IS NULL
       AND f.receiver = $1::text AND f.source = $2::text AND f.received_at >= $3::timestamptz AND f.received_at < $4::timestamptz LIMIT $5::integer)
) i
ORDER BY i.idempotency_key LIMIT $5::integer`

func (r *Receiver) unfinished(ctx context.Context, tx pgx.Tx, q Request) ([]Held, error) {
	return collect(ctx, tx, "list what the inbox has not finished", unfinishedSQL, r.Receiver, r.Source, finite(q.Since, pgtype.NegativeInfinity), finite(q.Until, pgtype.Infinity), q.Limit)
}

// %[1]s is the schema, %[2]s is [Receiver.Effects], which may also return the effects of other
// senders. The few events that are doubled are found by the primary key: a join would read all
// events.
const doubledSQL = `
SELECT t.key, NULL::pg_catalog.timestamptz, ''::pg_catalog.text, t.effects, 0::pg_catalog.int8
FROM (SELECT e.key::pg_catalog.text COLLATE pg_catalog."C" AS key, pg_catalog.count(*) AS effects FROM (
%[2]s
) AS e (key) WHERE e.key IS NOT NULL GROUP BY 1 HAVING pg_catalog.count(*) OPERATOR(pg_catalog.>) 1) t
WHERE ($5::pg_catalog.text[] IS NULL OR t.key OPERATOR(pg_catalog.=) ANY ($5::pg_catalog.text[]))
  AND (SELECT p.received_at OPERATOR(pg_catalog.>=) $3::pg_catalog.timestamptz AND p.received_at OPERATOR(pg_catalog.<) $4::pg_catalog.timestamptz
       FROM %[1]s.processed_events p
       WHERE p.receiver OPERATOR(pg_catalog.=) $1::pg_catalog.text AND p.source OPERATOR(pg_catalog.=) $2::pg_catalog.text AND p.idempotency_key OPERATOR(pg_catalog.=) t.key)
ORDER BY t.key LIMIT $6::pg_catalog.int4`

const schemaSQL = `SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = 'processed_events'::regclass::oid`

// schema returns the quoted schema of the receiver's tables: the search_path of Effects may not
// lead to them.
func (r *Receiver) schema(ctx context.Context) (quoted string, err error) {
	return quoted, r.Read(ctx, func(tx pgx.Tx) error {
		var name string
		if err := tx.QueryRow(ctx, schemaSQL).Scan(&name); err != nil {
			return fmt.Errorf("find the schema of processed_events: %w", err)
		}
		quoted = pgx.Identifier{name}.Sanitize()
		return nil
	})
}

// Both tables are read once, in one snapshot, so that an event and its effect are seen together.
// Without nested loops, which read all effects for each event where no index has their keys.
const (
	hashSQL = `SELECT pg_catalog.set_config('enable_nestloop', 'off', true)`
	// %[1]s is the schema, %[2]s is [Receiver.Effects]. Of an inbox only what is still there is
	// known to have succeeded: what was removed may have been ignored.
	missingSQL = `
SELECT p.idempotency_key, p.received_at, 'succeeded'::pg_catalog.text, 0::pg_catalog.int8, 0::pg_catalog.int8
FROM %[1]s.processed_events p
WHERE p.receiver OPERATOR(pg_catalog.=) $1::pg_catalog.text AND p.source OPERATOR(pg_catalog.=) $2::pg_catalog.text
  AND p.received_at OPERATOR(pg_catalog.>=) $3::pg_catalog.timestamptz AND p.received_at OPERATOR(pg_catalog.<) $4::pg_catalog.timestamptz
  AND ($5::pg_catalog.text[] IS NULL OR p.idempotency_key OPERATOR(pg_catalog.=) ANY ($5::pg_catalog.text[]))
  AND (p.processing_state OPERATOR(pg_catalog.=) 'succeeded'::pg_catalog.text
       OR p.processing_state OPERATOR(pg_catalog.=) 'recorded'::pg_catalog.text AND EXISTS (
           SELECT FROM %[1]s.inbox_events i
           WHERE i.receiver OPERATOR(pg_catalog.=) p.receiver AND i.source OPERATOR(pg_catalog.=) p.source
             AND i.idempotency_key OPERATOR(pg_catalog.=) p.idempotency_key AND i.processing_state OPERATOR(pg_catalog.=) 'succeeded'::pg_catalog.text))
  AND NOT EXISTS (SELECT FROM (
%[2]s
  ) AS e (key) WHERE e.key::pg_catalog.text COLLATE pg_catalog."C" OPERATOR(pg_catalog.=) p.idempotency_key)
ORDER BY p.idempotency_key LIMIT $6::pg_catalog.int4`
)

// compareEffects runs one of the two statements above.
func (r *Receiver) compareEffects(ctx context.Context, tx pgx.Tx, what, statement, schema string, q Request) ([]Held, error) {
	if _, err := tx.Exec(ctx, hashSQL); err != nil {
		return nil, fmt.Errorf("prepare transaction: %w", err)
	}
	return collect(ctx, tx, what, fmt.Sprintf(statement, schema, r.Effects),
		r.Receiver, r.Source, finite(q.Since, pgtype.NegativeInfinity), finite(q.Until, pgtype.Infinity), q.Keys, q.Limit)
}

func collect(ctx context.Context, tx pgx.Tx, what, statement string, args ...any) ([]Held, error) {
	rows, err := tx.Query(ctx, statement, args...)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (h Held, err error) {
		var at pgtype.Timestamptz
		err = row.Scan(&h.Key, &at, &h.State, &h.Effects, &h.EventID)
		h.ReceivedAt = at.Time
		return h, err
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return list, nil
}
