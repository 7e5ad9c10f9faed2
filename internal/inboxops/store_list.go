package inboxops

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/batch"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

const selectEvents = `
SELECT e.inbox_id, e.receiver, e.source, e.idempotency_key, e.event_type, e.event_version, e.event_id, e.related_reference,
       e.processing_state, e.received_at, e.processed_at, e.attempts, e.interruptions, e.next_attempt_at, e.last_error,
       e.ordering_key, e.sequence, e.not_after, e.claim, e.claimed_by, e.claimed_at
FROM inbox_events e
WHERE e.inbox_id = ANY ($1::bigint[])
ORDER BY e.inbox_id DESC`

// eventsByID returns the events with these ids, the latest first.
func eventsByID(ctx context.Context, tx pgx.Tx, ids []int64) ([]Event, error) {
	return rows.Structs[Event](ctx, tx, "read events", selectEvents, ids)
}

// events is eventsByID for any number of them, which are the latest first.
func (o *Ops) events(ctx context.Context, ids []int64) (list []Event, err error) {
	for chunk := range slices.Chunk(ids, batch.Size) {
		err := o.read(ctx, func(tx pgx.Tx) error {
			part, err := eventsByID(ctx, tx, chunk)
			list = append(list, part...)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return list, nil
}

const (
	selectMemory = `
SELECT p.receiver, p.source, p.idempotency_key, p.event_type, p.event_version, p.event_id, p.related_reference, p.processing_state,
       p.received_at, p.processed_at, p.last_error, p.response_status, p.not_after, p.destination
FROM processed_events p
WHERE p.receiver = $1::text AND p.source = $2::text`

	selectMemoryReach = `
SELECT idempotency_key FROM processed_events
WHERE receiver = $1::text AND source = $2::text AND idempotency_key > $3::text
ORDER BY idempotency_key OFFSET 9999 LIMIT 1`
)

// memoryReach returns the key up to which the next statement may read behind the given one; nil: to
// the end.
func memoryReach(ctx context.Context, tx pgx.Tx, sender Sender, after string) (until *string, err error) {
	err = tx.QueryRow(ctx, selectMemoryReach, sender.Receiver, sender.Source, after).Scan(&until)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return nil, fmt.Errorf("read what is remembered: %w", err)
	}
	return until, nil
}

// memoryBetween returns what matches behind the key after, up to until.
func memoryBetween(ctx context.Context, tx pgx.Tx, sender Sender, after string, until *string, s Selection, limit int64) ([]Memory, error) {
	query, args := selectMemory, []any{sender.Receiver, sender.Source}
	for _, c := range []struct {
		text  string
		given bool
		value any
	}{
		{"p.idempotency_key = $%d::text", s.Key != "", s.Key},
		{"p.idempotency_key > $%d::text", true, after},
		{"p.idempotency_key <= $%d::text", until != nil, until},
		{"p.event_type LIKE $%d", s.Type != "", batch.LikePattern(s.Type)},
		{"p.processing_state = ANY ($%d::text[])", len(s.States) > 0, s.States},
		{"p.related_reference = $%d", s.RelatedReference != "", s.RelatedReference},
		{"p.received_at >= $%d", !s.Since.IsZero(), s.Since},
		{"p.received_at < $%d", !s.Until.IsZero(), s.Until},
	} {
		if c.given {
			args = append(args, c.value)
			query += " AND " + fmt.Sprintf(c.text, len(args))
		}
	}
	args = append(args, limit)
	return rows.Structs[Memory](ctx, tx, "read what is remembered", query+fmt.Sprintf(" ORDER BY p.idempotency_key LIMIT $%d", len(args)), args...)
}

// memoryOf returns what is remembered of the events with these keys.
func memoryOf(ctx context.Context, tx pgx.Tx, places []MemoryKey) (all []Memory, err error) {
	for _, place := range places {
		list, err := rows.Structs[Memory](ctx, tx, "read what is remembered", selectMemory+` AND p.idempotency_key = $3::text`, place.Receiver, place.Source, place.IdempotencyKey)
		if err != nil {
			return nil, err
		}
		all = append(all, list...)
	}
	return all, nil
}

// What keeps an event of an ordering key waiting: the first failed one before it, the one that is
// due or being worked, the first waiting one before it; each by its own index.
const selectBefore = `
SELECT inbox_id, processing_state FROM (
    (SELECT e.inbox_id, e.processing_state FROM inbox_events e
     WHERE e.receiver = $1::text AND e.source = $2::text AND e.ordering_key = $3::text AND e.processing_state = 'failed'
       AND (e.sequence, e.inbox_id) < ($4::bigint, $5::bigint) ORDER BY e.sequence, e.inbox_id LIMIT 1)
    UNION ALL
    (SELECT e.inbox_id, e.processing_state FROM inbox_events e
     WHERE e.receiver = $1::text AND e.source = $2::text AND e.ordering_key = $3::text
       AND (e.processing_state = 'processing' OR e.processing_state = 'pending' AND e.next_attempt_at IS NOT NULL) LIMIT 1)
    UNION ALL
    (SELECT e.inbox_id, e.processing_state FROM inbox_events e
     WHERE e.receiver = $1::text AND e.source = $2::text AND e.ordering_key = $3::text
       AND e.processing_state = 'pending' AND e.next_attempt_at IS NULL
       AND (e.sequence, e.inbox_id) < ($4::bigint, $5::bigint) ORDER BY e.sequence, e.inbox_id LIMIT 1)
) b
WHERE inbox_id <> $5::bigint`

const countBehind = `
SELECT clock_timestamp(), (SELECT count(*) FROM (
    SELECT FROM inbox_events e
    WHERE e.receiver = $1::text AND e.source = $2::text AND e.ordering_key = $3::text
      AND e.processing_state = 'pending' AND e.next_attempt_at IS NULL AND (e.sequence, e.inbox_id) > ($4::bigint, $5::bigint)
    ORDER BY e.sequence LIMIT 10001) b)`

// surroundings returns what stands before and behind an event in its ordering key.
func surroundings(ctx context.Context, tx pgx.Tx, e Event) (a around, err error) {
	args := []any{e.Receiver, e.Source, e.OrderingKey, e.Sequence, e.InboxID}
	if err := tx.QueryRow(ctx, countBehind, args...).Scan(&a.now, &a.behind); err != nil {
		return around{}, fmt.Errorf("look around an event: %w", err)
	}
	if e.OrderingKey == nil {
		return a, nil
	}
	a.before, err = rows.Structs[neighbour](ctx, tx, "look around an event", selectBefore, args...)
	return a, err
}
