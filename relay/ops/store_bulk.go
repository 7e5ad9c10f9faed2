package ops

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/relay/pg"
)

// candidate is a delivery that a bulk command looks at.
type candidate struct {
	EventID        int64
	Destination    string
	Status         string // empty: there is no such delivery
	Claim          int64
	Replay         bool
	NextAttemptAt  pgtype.Timestamptz
	InFlight       bool
	OtherStatus    bool // matches but for its status
	Matched        bool
	TooOld         bool
	CreatedAt      *time.Time // nil: the event is gone
	EventType      string
	IdempotencyKey string
}

// The conditions on the delivery are judged before the event is looked up, and those of the way alone decide which index
// is read: a chunk costs the same whatever the rest of the selection is.
const candidates = `
WITH candidate AS MATERIALIZED (
    SELECT d.*, NOT ` + pg.IsFree + ` AS in_flight, d.status = ANY ($1) AS right_status,
           coalesce(d.destination BETWEEN $2 AND $3 AND ($4 = '' OR d.last_reason = $4)
                    AND ($5 = '' OR d.ordering_key = $5) AND d.event_id <= $10, false) AS eligible
    FROM outbox_delivery d
    WHERE `

const judgeCandidates = `
)
SELECT c.event_id, c.destination, c.status, c.claim, c.replay, c.next_attempt_at,
       c.in_flight,
       NOT c.right_status AND m.matched, c.right_status AND m.matched,
       coalesce($9::float8 > 0 AND e.created_at < now() - make_interval(secs => $9), false),
       e.created_at, coalesce(e.event_type, ''), coalesce(e.idempotency_key, '')
FROM candidate c
LEFT JOIN LATERAL (
    SELECT created_at, event_type, idempotency_key FROM outbox WHERE c.eligible AND id = c.event_id LIMIT 1
) e ON true
CROSS JOIN LATERAL (
    SELECT c.eligible AND coalesce(e.event_type LIKE $6, $6 = '%') AND coalesce(e.created_at >= $7, $7 = '-infinity'::timestamptz)
           AND coalesce(e.created_at < $8, $8 = 'infinity'::timestamptz) AS matched
) m`

// Every way orders its chunks by what its cursor holds, so that the next one goes on where this one ended.
const (
	candidatesByID = candidates + `d.event_id = ANY ($11)` + judgeCandidates + `
ORDER BY c.event_id, c.destination`

	candidatesOfAll = candidates + `(d.event_id, d.destination) > ($11, $12) AND d.event_id <= $10
    ORDER BY d.event_id, d.destination LIMIT 1000` + judgeCandidates + `
ORDER BY c.event_id, c.destination`

	candidatesFailed = candidates + `d.status = 'failed' AND d.destination BETWEEN $2 AND $3 AND (d.destination, d.event_id) > ($11, $12)
    ORDER BY d.destination, d.event_id LIMIT 1000` + judgeCandidates + `
ORDER BY c.destination, c.event_id`

	candidatesPending = candidates + `d.status = 'pending' AND d.destination BETWEEN $2 AND $3
      AND (d.destination, d.replay, d.next_attempt_at, d.event_id) > ($11, $12, $13, $14)
    ORDER BY d.destination, d.replay, d.next_attempt_at, d.event_id LIMIT 1000` + judgeCandidates + `
ORDER BY c.destination, c.replay, c.next_attempt_at, c.event_id`
)

// A way goes through the deliveries in chunks.
type way struct {
	statement string
	ids       []int64   // of candidatesByID: those still to come
	after     candidate // of the others: the last one seen
}

// idChunk is how many events one statement looks up: each may have several deliveries.
const idChunk = 250

// next returns the next chunk, and whether there may be another.
func (w *way) next(ctx context.Context, q pg.DB, s Selection, memory time.Duration, latest int64) (list []candidate, more bool, err error) {
	from, to := s.Destination, s.Destination
	if s.Destination == "" && !s.Parked {
		to = "\x7f" // names are letters, digits, - and _
	}
	pattern := "%"
	if s.Type != "" {
		pattern = likePattern(s.Type)
	}
	args := []any{
		s.Statuses, from, to, s.Reason, s.OrderingKey, pattern, orInfinite(s.Since, pgtype.NegativeInfinity),
		orInfinite(s.Until, pgtype.Infinity), memory.Seconds(), latest,
	}
	var asked []int64
	switch w.statement {
	case candidatesByID:
		asked = w.ids[:min(idChunk, len(w.ids))]
		w.ids = w.ids[len(asked):]
		args = append(args, asked)
	case candidatesOfAll:
		args = append(args, w.after.EventID, w.after.Destination)
	case candidatesFailed:
		args = append(args, w.after.Destination, w.after.EventID)
	case candidatesPending:
		at := w.after.NextAttemptAt
		if !at.Valid {
			at = pgtype.Timestamptz{InfinityModifier: pgtype.NegativeInfinity, Valid: true}
		}
		args = append(args, w.after.Destination, w.after.Replay, at, w.after.EventID)
	}
	rows, err := q.Query(ctx, w.statement, args...)
	if err != nil {
		return nil, false, fmt.Errorf("find deliveries: %w", err)
	}
	if list, err = pgx.CollectRows(rows, pgx.RowToStructByPos[candidate]); err != nil {
		return nil, false, fmt.Errorf("find deliveries: %w", err)
	}
	if w.statement == candidatesByID {
		seen := map[int64]bool{}
		for _, c := range list {
			seen[c.EventID] = true
		}
		for _, id := range asked {
			if !seen[id] {
				list = append(list, candidate{EventID: id})
			}
		}
		return list, len(w.ids) > 0, nil
	}
	if len(list) > 0 {
		w.after = list[len(list)-1]
	}
	return list, len(list) == bulkBatch, nil
}

func orInfinite(at time.Time, end pgtype.InfinityModifier) pgtype.Timestamptz {
	if at.IsZero() {
		return pgtype.Timestamptz{InfinityModifier: end, Valid: true}
	}
	return pgtype.Timestamptz{Time: at, Valid: true}
}

// likePattern turns a pattern in which only '*' is special into one for LIKE, as outbox_route does.
func likePattern(pattern string) string {
	return strings.NewReplacer(`\`, `\\`, `%`, `\%`, `_`, `\_`, `*`, `%`).Replace(pattern)
}

const selectLatestEvent = `SELECT coalesce(max(event_id), 0) FROM outbox_delivery`

// latestEvent returns the largest id of an event that has a delivery.
func latestEvent(ctx context.Context, q pg.DB) (id int64, err error) {
	if err := q.QueryRow(ctx, selectLatestEvent).Scan(&id); err != nil {
		return 0, fmt.Errorf("find latest event: %w", err)
	}
	return id, nil
}

// Rows are changed only as they were found: the same claim, still in a status that may be left. One that another session holds
// locked is being changed, and is left alone.
const lockFound = `
WITH found AS MATERIALIZED (
    SELECT o.place
    FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::text[]) AS f (event_id, destination, claim, status)
    CROSS JOIN LATERAL (
        SELECT d.ctid AS place FROM outbox_delivery d
        WHERE d.event_id = f.event_id AND d.destination = f.destination AND d.claim = f.claim AND d.status = f.status
          AND ` + pg.IsFree + `
        LIMIT 1
        FOR UPDATE SKIP LOCKED
    ) o
)`

// The fence grows, though there is no claim: the settle of a former claim that comes late, or a second time because its
// commit was not acknowledged, would otherwise settle the replay before it was sent. What the last attempt came to
// stays, since it says why an operator replays. The former promise has ended with the delivery, and the replay makes its own.
// What relays know of how far ordering keys are settled is void.
const replayDeliveries = lockFound + `, replayed AS (
    UPDATE outbox_delivery
    SET status = 'pending', replay = true, next_attempt_at = clock_timestamp(), attempts = 0, rescues = 0, delivered_at = NULL,
        claim = claim + 1, not_after = NULL
    WHERE ctid = ANY (ARRAY (SELECT place FROM found))
    RETURNING destination, ordering_key
), reordered AS (
    INSERT INTO outbox_destination AS d (destination, reordered)
    SELECT DISTINCT destination, 1 FROM replayed WHERE ordering_key IS NOT NULL AND destination <> '' ORDER BY destination
    ON CONFLICT (destination) DO UPDATE SET reordered = d.reordered + 1
)
SELECT FROM replayed`

const discardDeliveries = lockFound + `
UPDATE outbox_delivery
SET status = 'discarded', claimed_by = NULL, lease_expires_at = NULL
WHERE ctid = ANY (ARRAY (SELECT place FROM found))`

const notifyRelays = `SELECT pg_notify('outbox_wake', current_schema()) WHERE ` + pg.QueueHasRoom

// changeDeliveries runs one of the two statements above in a transaction of its own, and tells relays that there is
// something to do.
func changeDeliveries(ctx context.Context, pool *pgxpool.Pool, statement string, found []candidate) (changed int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	ids, claims := make([]int64, len(found)), make([]int64, len(found))
	destinations, statuses := make([]string, len(found)), make([]string, len(found))
	for i, c := range found {
		ids[i], destinations[i], claims[i], statuses[i] = c.EventID, c.Destination, c.Claim, c.Status
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, pg.CommitDurably); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, statement, ids, destinations, claims, statuses)
		if err != nil {
			return err
		}
		changed = tag.RowsAffected()
		_, err = tx.Exec(ctx, notifyRelays)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("change deliveries: %w", err)
	}
	return changed, nil
}

// notifySweep makes relays look behind their positions.
func notifySweep(ctx context.Context, pool *pgxpool.Pool) error {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	_, err := pool.Exec(ctx, pg.RequestSweep)
	return err
}

// Each of the two statuses has an index of its own.
const selectHead = selectDeliveries + ` AND d.destination = $1 AND d.event_id = least(
    (SELECT event_id FROM outbox_delivery WHERE destination = $1 AND ordering_key = $2 AND status = 'pending' ORDER BY event_id LIMIT 1),
    (SELECT event_id FROM outbox_delivery WHERE destination = $1 AND ordering_key = $2 AND status = 'failed' ORDER BY event_id LIMIT 1))`

const countBehind = `
SELECT count(*) FROM (
    (SELECT FROM outbox_delivery WHERE destination = $1 AND ordering_key = $2 AND status = 'pending' AND event_id > $3 LIMIT 10001)
    UNION ALL
    (SELECT FROM outbox_delivery WHERE destination = $1 AND ordering_key = $2 AND status = 'failed' AND event_id > $3 LIMIT 10001)
    LIMIT 10001) behind`

// headOfKey returns the delivery that the others of an ordering key wait for, and how many those are, at most 10,001.
func headOfKey(ctx context.Context, q pg.DB, destination, key string) (heads []Delivery, behind int64, err error) {
	rows, err := q.Query(ctx, selectHead, destination, key)
	if err != nil {
		return nil, 0, err
	}
	if heads, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Delivery]); err != nil || len(heads) == 0 {
		return nil, 0, err
	}
	err = q.QueryRow(ctx, countBehind, destination, key, heads[0].EventID).Scan(&behind)
	return heads, behind, err
}
