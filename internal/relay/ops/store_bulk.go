package ops

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outbox-relay/outbox-relay/internal/batch"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/waiting"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// candidate is a delivery that a bulk command looks at.
type candidate struct {
	EventID        int64
	Destination    string
	Status         string // empty: there is no such delivery
	Claim          int64
	Replay         bool
	NextAttemptAt  pgtype.Timestamptz
	BlockedBy      int64 // 0: it waits for nothing but its time
	InFlight       bool
	OtherStatus    bool // matches but for its status
	Matched        bool
	TooOld         bool
	CreatedAt      *time.Time // nil: the event is gone
	EventType      string
	IdempotencyKey string
	ChangedAt      *time.Time // by its last attempt, or when it was delivered
	Scheduled      bool       // its producer wants it sent later
	BreaksRule     bool       // see [policy.RuleBroken]
}

// An attempt of the future was made before the clock was put back, and so before any operation.
//
// The conditions on the delivery are checked before the event is looked up. Only the scan decides
// which index is read, so that a chunk costs the same for every selection.
const candidates = `
WITH candidate AS MATERIALIZED (
    SELECT d.*, NOT ` + pg.IsFree + ` AS in_flight, d.status = ANY ($1) AS right_status,
           coalesce(d.destination BETWEEN $2 AND $3 AND ($4 = '' OR d.last_reason = $4)
                    AND ($5 = '' OR d.ordering_key = $5) AND d.event_id <= $10, false) AS eligible
    FROM outbox_delivery d
    WHERE `

const checkCandidates = `
)
SELECT c.event_id, c.destination, c.status, c.claim, c.replay, c.next_attempt_at, coalesce(c.blocked_by, 0),
       c.in_flight,
       NOT c.right_status AND m.matched, c.right_status AND m.matched,
       coalesce($9::float8 > 0 AND e.created_at < now() - make_interval(secs => $9), false),
       e.created_at, coalesce(e.event_type, ''), coalesce(e.idempotency_key, ''),
       CASE WHEN m.changed_at > now() THEN to_timestamp(0) ELSE m.changed_at END,
       c.last_attempt_at IS NULL AND coalesce(e.available_at > greatest(now(), e.created_at), true),
       coalesce(c.last_reason = '` + string(policy.ReasonInvalidEvent) + `' AND starts_with(c.last_error, '` + policy.RuleBroken + `'), false)
FROM candidate c
LEFT JOIN LATERAL (
    SELECT created_at, available_at, event_type, idempotency_key FROM outbox WHERE c.eligible AND id = c.event_id LIMIT 1
) e ON true
CROSS JOIN LATERAL (
    SELECT c.eligible AND coalesce(e.event_type LIKE $6, $6 = '%') AND coalesce(e.created_at >= $7, $7 = '-infinity'::timestamptz)
           AND coalesce(e.created_at < $8, $8 = 'infinity'::timestamptz) AS matched,
           greatest(c.last_attempt_at, c.delivered_at) AS changed_at
) m`

// Every scan orders its chunks by what its cursor holds, so that the next chunk begins where this
// one ended.
const (
	candidatesByID = candidates + `d.event_id = ANY ($11)` + checkCandidates + `
ORDER BY c.event_id, c.destination`

	candidatesOfAll = candidates + `(d.event_id, d.destination) > ($11, $12) AND d.event_id <= $10
    ORDER BY d.event_id, d.destination LIMIT $13` + checkCandidates + `
ORDER BY c.event_id, c.destination`

	candidatesFailed = candidates + `d.status = 'failed' AND d.destination BETWEEN $2 AND $3 AND (d.destination, d.event_id) > ($11, $12)
    ORDER BY d.destination, d.event_id LIMIT $13` + checkCandidates + `
ORDER BY c.destination, c.event_id`

	candidatesDue = candidates + pg.IsDue + ` AND d.destination BETWEEN $2 AND $3
      AND (d.destination, d.replay, d.next_attempt_at, d.event_id) > ($11, $12, $13, $14)
    ORDER BY d.destination, d.replay, d.next_attempt_at, d.event_id LIMIT $15` + checkCandidates + `
ORDER BY c.destination, c.replay, c.next_attempt_at, c.event_id`

	candidatesWaiting = candidates + pg.IsWaiting + ` AND d.destination BETWEEN $2 AND $3 AND (d.destination, d.blocked_by, d.event_id) > ($11, $12, $13)
    ORDER BY d.destination, d.blocked_by, d.event_id LIMIT $14` + checkCandidates + `
ORDER BY c.destination, c.blocked_by, c.event_id`
)

// A scan goes through deliveries in chunks, along one index.
type scan struct {
	statement string
	ids       []int64   // of candidatesByID: those still to come
	after     candidate // of the others: the last one returned
	limit     int       // of a chunk
}

// idChunk is how many events one statement looks up: each may have several deliveries.
const idChunk = 250

// next returns the next chunk, and whether there may be another.
func (w *scan) next(ctx context.Context, q pg.DB, s Selection, memory time.Duration) (list []candidate, more bool, err error) {
	from, to := s.Destination, s.Destination
	if s.Destination == "" && !s.Parked {
		to = "\x7f" // names are letters, digits, - and _
	}
	args := []any{
		s.Statuses, from, to, s.Reason, s.OrderingKey, batch.LikePattern(cmp.Or(s.Type, "*")), orInfinite(s.Since, pgtype.NegativeInfinity),
		orInfinite(s.Until, pgtype.Infinity), memory.Seconds(), s.SeenEvent,
	}
	switch after := w.after; w.statement {
	case candidatesByID:
		return w.nextByID(ctx, q, args)
	case candidatesOfAll:
		args = append(args, after.EventID, after.Destination, w.limit)
	case candidatesFailed:
		args = append(args, after.Destination, after.EventID, w.limit)
	case candidatesDue:
		args = append(args, after.Destination, after.Replay, after.NextAttemptAt, after.EventID, w.limit)
	case candidatesWaiting:
		args = append(args, after.Destination, after.BlockedBy, after.EventID, w.limit)
	}
	if list, err = rows.Structs[candidate](ctx, q, "find deliveries", w.statement, args...); err == nil && len(list) > 0 {
		w.after = list[len(list)-1]
	}
	return list, len(list) == w.limit, err
}

// nextByID adds to what it finds a candidate without a status for each event that has no delivery.
func (w *scan) nextByID(ctx context.Context, q pg.DB, args []any) (list []candidate, more bool, err error) {
	chunk := w.ids[:min(idChunk, len(w.ids))]
	w.ids = w.ids[len(chunk):]
	if list, err = rows.Structs[candidate](ctx, q, "find deliveries", w.statement, append(args, chunk)...); err != nil {
		return nil, false, err
	}
	found := map[int64]bool{}
	for _, c := range list {
		found[c.EventID] = true
	}
	for _, id := range chunk {
		if !found[id] {
			list = append(list, candidate{EventID: id})
		}
	}
	return list, len(w.ids) > 0, nil
}

func orInfinite(at time.Time, end pgtype.InfinityModifier) pgtype.Timestamptz {
	if at.IsZero() {
		return pgtype.Timestamptz{InfinityModifier: end, Valid: true}
	}
	return pgtype.Timestamptz{Time: at, Valid: true}
}

const selectLatestEvent = `SELECT coalesce(max(event_id), 0), now() FROM outbox_delivery`

// seen returns the selection of what is there now.
func (o *Outbox) seen(ctx context.Context, s Selection) (Selection, error) {
	if err := o.pool.QueryRow(ctx, selectLatestEvent).Scan(&s.SeenEvent, &s.SeenAt); err != nil {
		return s, fmt.Errorf("find latest event: %w", err)
	}
	return s, nil
}

const selectObstacles = `
SELECT destination, paused, breaker <> 'closed' FROM outbox_destination
WHERE destination = ANY ($1) AND (paused OR breaker <> 'closed') ORDER BY destination`

// obstacles says what keeps deliveries to destinations from being sent, however due they are.
func (o *Outbox) obstacles(ctx context.Context, destinations []string) (all []string, err error) {
	type stopped struct {
		Destination  string
		Paused, Held bool
	}
	list, err := rows.Structs[stopped](ctx, o.pool, "look for what stops deliveries", selectObstacles, destinations)
	for _, d := range list {
		word := plain.ShellWord(d.Destination)
		if d.Paused {
			all = append(all, fmt.Sprintf("%q is paused: nothing is sent there before outbox-relay resume %s", d.Destination, word))
		}
		if d.Held {
			all = append(all, fmt.Sprintf("%q is held: nothing but a probe is sent there before outbox-relay resume %s --reset-breaker", d.Destination, word))
		}
	}
	return all, err
}

// Rows are changed only as they were found: with the same claim, in the same status. A row that
// another session has locked is being changed, and is left alone.
const lockFound = `
WITH found AS MATERIALIZED (
    SELECT o.place
    FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::text[]) AS f (event_id, destination, claim, status)
    CROSS JOIN LATERAL (
        SELECT d.ctid AS place FROM outbox_delivery d
        WHERE d.event_id = f.event_id AND d.destination = f.destination AND d.claim = f.claim AND d.status = f.status
          AND ($5 OR ` + pg.IsFree + `)
        LIMIT 1
        FOR UPDATE SKIP LOCKED
    ) o
)`

// The fence grows, though there is no claim: a settle of an earlier claim that comes late, or again
// because its commit was not acknowledged, would otherwise settle the replay before it is sent. The
// result of the last attempt stays: it says why an operator replays. They become due one after the
// other, $6 seconds apart, and none before its available_at. not_after ended with the delivery, and
// the replay gets its own. reordered makes relays forget up to where they know the ordering keys to
// be settled.
const replayDeliveries = lockFound + `, replayed AS (
    UPDATE outbox_delivery d
    SET status = 'pending', replay = true, blocked_by = NULL, attempts = 0, rescues = 0, delivered_at = NULL,
        claim = claim + 1, not_after = NULL,
        next_attempt_at = greatest(clock_timestamp() + (array_position($1, event_id) - 1) * make_interval(secs => $6),
                                   (SELECT e.available_at FROM outbox e WHERE e.id = d.event_id))
    WHERE ctid = ANY (ARRAY (SELECT place FROM found))
    RETURNING d.destination, d.ordering_key
), reordered AS (
    INSERT INTO outbox_destination AS d (destination, reordered)
    SELECT DISTINCT destination, 1 FROM replayed WHERE ordering_key IS NOT NULL AND destination <> '' ORDER BY destination
    ON CONFLICT (destination) DO UPDATE SET reordered = d.reordered + 1
)
SELECT FROM replayed`

// The position in its ordering key, the attempts and not_after stay as they are.
const retryDeliveries = lockFound + `
UPDATE outbox_delivery SET next_attempt_at = clock_timestamp()
WHERE ctid = ANY (ARRAY (SELECT place FROM found))`

// A discard is dated by next_attempt_at, from which the archive counts.
const discardDeliveries = lockFound + `
UPDATE outbox_delivery
SET status = 'discarded', next_attempt_at = clock_timestamp(), claimed_by = NULL, lease_expires_at = NULL
WHERE ctid = ANY (ARRAY (SELECT place FROM found))`

const discardQuarantined = lockFound + `
UPDATE outbox_delivery
SET status = 'discarded', next_attempt_at = clock_timestamp(), last_reason = '` + ReasonQuarantined + `', claimed_by = NULL, lease_expires_at = NULL
WHERE ctid = ANY (ARRAY (SELECT place FROM found)) AND NOT EXISTS (SELECT FROM outbox_relay r WHERE r.quarantined IS NULL AND ` + pg.IsAlive + `)`

const notifyRelays = `SELECT pg_notify('outbox_wake', current_schema()) WHERE ` + pg.QueueHasRoom

// changeDeliveries runs one of the statements above in its own durable transaction, adds to the
// audit entry of the operation, and notifies relays.
func (o *Outbox) changeDeliveries(ctx context.Context, a action, found []candidate, pace pace, audit int64) (changed int64, err error) {
	ids, claims := make([]int64, len(found)), make([]int64, len(found))
	destinations, statuses := make([]string, len(found)), make([]string, len(found))
	for i, c := range found {
		ids[i], destinations[i], claims[i], statuses[i] = c.EventID, c.Destination, c.Claim, c.Status
	}
	args := []any{ids, destinations, claims, statuses, a.inFlight}
	if a.paced {
		args = append(args, pace.spread(1).Seconds())
	}
	err = o.durably(ctx, func(ctx context.Context, tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, a.change, args...)
		if err != nil {
			return err
		}
		changed = tag.RowsAffected()
		if a.ends {
			if err := waiting.Release(ctx, tx, ids, destinations); err != nil {
				return err
			}
		}
		return growAuditBy(ctx, tx, audit, changed)
	})
	if err != nil {
		return 0, fmt.Errorf("change deliveries: %w", err)
	}
	if pace == 0 { // the relays look for what a paced replay adds, and producers' notifications stay a measure of their load
		// A transaction that notifies holds up every other one that does, until its disk and
		// standby have answered: that of the change must not. Relays find by polling what they are
		// not told.
		_ = pg.Exec(ctx, o.pool, "notify relays", notifyRelays)
	}
	return changed, nil
}

// requestSweep makes relays look behind their positions at once, where what an operator released
// may lie.
func (o *Outbox) requestSweep(ctx context.Context) error {
	return pg.Exec(ctx, o.pool, "notify relays, which find it by themselves within their poll interval", pg.RequestSweep)
}
