package relay

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// settle writes a batch in one round trip and one transaction: all of it or nothing, except for rows that another
// session has locked or was just changing. It returns the settlements of those rows as missed, and in stale the number of
// those that came too late: another relay had claimed their delivery meanwhile.
func (s *store) settle(ctx context.Context, instance int32, b *batch) (missed []*settlement, stale int, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	var queries pgx.Batch
	expect := func(n int) {
		stale += n
		queries.QueuedQueries[len(queries.QueuedQueries)-1].Exec(func(tag pgconn.CommandTag) error {
			stale -= int(tag.RowsAffected())
			return nil
		})
	}
	now := time.Now()
	o := b.byOutcome()
	if len(o.failed) > 0 {
		queries.Queue("BEGIN")
		queries.Queue(pg.CommitDurably)
		queueFailed(&queries, o.failed, now)
		expect(len(o.failed))
	}
	if len(o.delivered) > 0 {
		queueDelivered(&queries, o.delivered, now)
		expect(len(o.delivered))
	}
	if len(o.retried) > 0 {
		queueRetry(&queries, o.retried, now)
		expect(len(o.retried))
	}
	if len(o.held) > 0 {
		queueHold(&queries, o.held)
		expect(len(o.held))
	}
	if len(o.logged) > 0 {
		queueAttempts(&queries, instance, o.logged, now)
	}
	if len(o.failed) > 0 {
		queries.Queue("COMMIT")
	}
	if b.apart {
		skipLocked(&queries)
	}
	if err := s.pool.SendBatch(ctx, &queries).Close(); err != nil {
		return nil, 0, fmt.Errorf("settle: %w", err)
	}
	if stale == 0 {
		return nil, 0, nil
	}
	if err := s.restoreClaims(ctx, instance, b.settlements); err != nil {
		return nil, 0, err
	}
	if missed, err = s.unsettled(ctx, b.settlements); err != nil {
		return nil, 0, err
	}
	return missed, max(stale-len(missed), 0), nil
}

// A crash of the server may lose a claim together with its settle. The row is then as it was before the claim: its claim
// number is smaller, and since fences grow with the clock, no other relay has claimed it since. The POST did happen, so
// the claim is restored, to be settled by the next try. The idempotency key must be the same: a crash may also lose events
// of producers that do not wait for their commit, and the server gives their ids to others.
const restoreLostClaims = `
UPDATE outbox_delivery d
SET claim = s.claim, claimed_by = $1, lease_expires_at = now() + interval '10 seconds', not_after = coalesce(d.not_after, s.not_after)
FROM unnest($2::bigint[], $3::text[], $4::bigint[], $5::int[], $6::text[], $7::timestamptz[])
    AS s (event_id, destination, claim, attempts, key, not_after)
CROSS JOIN LATERAL (SELECT e.idempotency_key AS key FROM outbox e WHERE e.id = s.event_id LIMIT 1) event
CROSS JOIN LATERAL (` + lookUp + ` FOR NO KEY UPDATE SKIP LOCKED) found
WHERE d.ctid = found.place AND d.claim < s.claim AND d.attempts = s.attempts AND event.key = s.key
  AND d.status NOT IN ('delivered', 'failed', 'discarded') AND (d.lease_expires_at IS NULL OR d.lease_expires_at <= now())`

// restoreClaims restores the claims of attempted deliveries that the server has lost.
func (s *store) restoreClaims(ctx context.Context, instance int32, settlements []settlement) error {
	var u unnested
	var attempts []int
	var keys []*string
	var notAfter []time.Time
	for i := range settlements {
		if one := &settlements[i]; one.Posted {
			u.add(&one.delivery)
			attempts = append(attempts, one.attempts)
			keys = append(keys, one.event.Key)
			notAfter = append(notAfter, one.notAfter)
		}
	}
	if len(keys) == 0 {
		return nil
	}
	if _, err := s.pool.Exec(ctx, restoreLostClaims, instance, u.eventIDs, u.destinations, u.fences, attempts, keys, notAfter); err != nil {
		return fmt.Errorf("restore lost claims: %w", err)
	}
	return nil
}

// A settle finds each row where its snapshot has it. It misses a row that was changed, and so moved, while it waited for it, and one
// that it left out because it was locked. Both are still under the same claim and not yet settled.
const selectUnsettled = `
SELECT s.number
FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::int[], $5::bool[]) WITH ORDINALITY
    AS s (event_id, destination, claim, attempts, held, number)
CROSS JOIN LATERAL (
    SELECT o.claim, o.status, o.attempts, o.claimed_by
    FROM outbox_delivery o WHERE o.event_id = s.event_id AND o.destination = s.destination LIMIT 1
) d
WHERE d.claim = s.claim AND d.attempts = coalesce(s.attempts, d.attempts) AND d.status NOT IN ('delivered', 'failed', 'discarded')
  AND NOT (s.held AND d.claimed_by IS NULL)`

// unsettled returns those settlements that could still be written.
func (s *store) unsettled(ctx context.Context, settlements []settlement) (missed []*settlement, err error) {
	var u unnested
	var attempts []*int // of retries: nothing else shows that a retry is written
	var held []bool
	for i := range settlements {
		u.add(&settlements[i].delivery)
		attempts = append(attempts, nil)
		if settlements[i].Outcome == policy.Retry {
			attempts[i] = &settlements[i].attempts
		}
		held = append(held, settlements[i].Outcome == policy.Hold)
	}
	rows, err := s.pool.Query(ctx, selectUnsettled, u.eventIDs, u.destinations, u.fences, attempts, held)
	if err != nil {
		return nil, fmt.Errorf("find unsettled: %w", err)
	}
	numbers, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return nil, fmt.Errorf("find unsettled: %w", err)
	}
	for _, number := range numbers {
		missed = append(missed, &settlements[number-1])
	}
	return missed, nil
}

// unnested are the columns by which every settle finds its rows: the fence is part of the key.
type unnested struct {
	eventIDs     []int64
	destinations []string
	fences       []int64
}

func (u *unnested) add(d *delivery) {
	u.eventIDs = append(u.eventIDs, d.eventID)
	u.destinations = append(u.destinations, d.destination)
	u.fences = append(u.fences, d.fence)
}

// findSettled joins each settlement to its row, if that is still pending under the same claim. Every plan must look up each row by its
// key. A plain join may read the whole backlog for every row, if its plan was made when next to nothing was pending. LIMIT keeps the
// planner from turning the lookup into such a join; "status = 'pending'" would offer it the index of everything pending.
const findSettled = `
CROSS JOIN LATERAL (` + lookUp + `) found
WHERE d.ctid = found.place AND d.claim = s.claim AND d.status NOT IN ('delivered', 'failed', 'discarded')`

const lookUp = `
    SELECT o.ctid AS place FROM outbox_delivery o WHERE o.event_id = s.event_id AND o.destination = s.destination LIMIT 1`

// skipLocked makes a batch leave out rows that another session has locked, instead of waiting for them. Locking each row
// first writes 56 bytes of WAL more for a delivery (285 instead of 229), so only what has failed once does it.
func skipLocked(batch *pgx.Batch) {
	for _, query := range batch.QueuedQueries {
		query.SQL = strings.Replace(query.SQL, lookUp, lookUp+" FOR NO KEY UPDATE SKIP LOCKED", 1)
	}
}

const settleDelivered = `
UPDATE outbox_delivery d
SET status = 'delivered', delivered_at = now(), attempts = d.attempts + 1, rescues = 0,
    last_attempt_at = now() - make_interval(secs => s.ago), last_status = s.status, last_reason = NULL, last_error = NULL,
    claimed_by = NULL, lease_expires_at = NULL, not_after = NULL
FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::float8[], $5::smallint[])
    AS s (event_id, destination, claim, ago, status)` + findSettled

func queueDelivered(batch *pgx.Batch, settled []*settlement, now time.Time) {
	n := len(settled)
	u := unnested{make([]int64, 0, n), make([]string, 0, n), make([]int64, 0, n)}
	ago, status := make([]float64, n), make([]int16, n)
	for i, s := range settled {
		u.add(&s.delivery)
		ago[i], status[i] = now.Sub(s.startedAt).Seconds(), int16(s.StatusCode)
	}
	batch.Queue(settleDelivered, u.eventIDs, u.destinations, u.fences, ago, status)
}

// A retry leaves status and claim as they are. When a batch is sent again because its commit was not acknowledged, only the number of
// attempts shows that the retry is written.
const settleRetry = `
UPDATE outbox_delivery d
SET next_attempt_at = now() + make_interval(secs => s.delay), attempts = d.attempts + 1, rescues = 0,
    last_attempt_at = now() - make_interval(secs => s.ago), last_status = nullif(s.status, 0),
    last_reason = s.reason, last_error = s.error, claimed_by = NULL, lease_expires_at = NULL,
    not_after = CASE WHEN s.bound THEN d.not_after END
FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::float8[], $5::smallint[], $6::text[], $7::text[], $8::float8[], $9::int[], $10::bool[])
    AS s (event_id, destination, claim, ago, status, reason, error, delay, attempts, bound)` + findSettled + ` AND d.attempts = s.attempts`

func queueRetry(batch *pgx.Batch, settled []*settlement, now time.Time) {
	var u unnested
	var ago, delay []float64
	var status []int16
	var attempts []int32
	var reason, message []string
	var bound []bool
	for i := range settled {
		s := settled[i]
		u.add(&s.delivery)
		bound = append(bound, s.bound())
		ago = append(ago, now.Sub(s.startedAt).Seconds())
		status = append(status, int16(s.StatusCode))
		reason = append(reason, string(s.Reason))
		message = append(message, s.Message)
		delay = append(delay, s.Delay.Seconds())
		attempts = append(attempts, int32(s.attempts))
	}
	batch.Queue(settleRetry, u.eventIDs, u.destinations, u.fences, ago, status, reason, message, delay, attempts, bound)
}

const settleHold = `
UPDATE outbox_delivery d
SET claimed_by = NULL, lease_expires_at = NULL, not_after = CASE WHEN s.bound THEN d.not_after END
FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bool[]) AS s (event_id, destination, claim, bound)` + findSettled + ` AND d.claimed_by IS NOT NULL`

func queueHold(batch *pgx.Batch, settled []*settlement) {
	var u unnested
	var bound []bool
	for i := range settled {
		u.add(&settled[i].delivery)
		bound = append(bound, settled[i].bound())
	}
	batch.Queue(settleHold, u.eventIDs, u.destinations, u.fences, bound)
}

// An attempt is logged whether or not its settle still counted: it was on the wire. The same claim never logs twice,
// though a batch whose commit was not acknowledged is sent again.
const logAttempts = `
INSERT INTO outbox_attempt (event_id, destination, claim, attempt, relay, started_at, duration_ms, status, outcome, reason, error)
SELECT event_id, destination, claim, attempt, $4, now() - make_interval(secs => ago), duration_ms, nullif(status, 0),
       outcome, reason, nullif(error, '')
FROM unnest($1::bigint[], $2::text[], $3::bigint[], $5::int[], $6::float8[], $7::int[], $8::smallint[], $9::text[],
            $10::text[], $11::text[])
    AS s (event_id, destination, claim, attempt, ago, duration_ms, status, outcome, reason, error)
ON CONFLICT (event_id, destination, claim) DO NOTHING`

func queueAttempts(batch *pgx.Batch, instance int32, settled []*settlement, now time.Time) {
	var u unnested
	var attempt, duration []int32
	var ago []float64
	var status []int16
	var outcome, reason, message []string
	for i := range settled {
		s := settled[i]
		u.add(&s.delivery)
		attempt = append(attempt, int32(s.attempts+1))
		ago = append(ago, now.Sub(s.startedAt).Seconds())
		duration = append(duration, int32(s.duration.Milliseconds()))
		status = append(status, int16(s.StatusCode))
		outcome = append(outcome, string(s.Outcome))
		reason = append(reason, string(s.Reason))
		message = append(message, s.Message)
	}
	batch.Queue(logAttempts, u.eventIDs, u.destinations, u.fences, instance, attempt, ago, duration, status, outcome, reason, message)
}

const settleFailed = `
WITH settled AS (
    UPDATE outbox_delivery d
    SET status = 'failed', attempts = d.attempts + s.posted::int,
        last_attempt_at = CASE WHEN s.posted THEN now() - make_interval(secs => s.ago) ELSE d.last_attempt_at END,
        last_status = nullif(s.status, 0), last_reason = s.reason, last_error = s.error,
        claimed_by = NULL, lease_expires_at = NULL
    FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::float8[], $5::smallint[], $6::text[], $7::text[], $8::bool[])
        AS s (event_id, destination, claim, ago, status, reason, error, posted)` + findSettled + `
    RETURNING d.event_id, d.destination, s.reason, s.error, d.replay
), paused AS (
    INSERT INTO outbox_destination (destination, paused, paused_reason, paused_at)
    SELECT DISTINCT ON (destination) destination, true, 'the receiver answered 410 Gone', now()
    FROM settled WHERE reason = 'gone'
    ON CONFLICT (destination) DO UPDATE
    SET paused = true, paused_reason = excluded.paused_reason, paused_at = excluded.paused_at
    WHERE NOT outbox_destination.paused
), alerted AS (
    INSERT INTO outbox_alert (rule, subject, count, first_event_id, first_error)
    SELECT 'failed', destination, count(*), min(event_id), (array_agg(error ORDER BY event_id))[1]
    FROM settled GROUP BY destination
    ON CONFLICT (rule, subject) DO UPDATE
    -- What failed before it was replayed was counted then, unless the alert has ended meanwhile.
    SET count = outbox_alert.count + CASE WHEN outbox_alert.resolved_at IS NULL
            THEN (SELECT count(*) FROM settled s WHERE s.destination = outbox_alert.subject AND NOT s.replay) ELSE excluded.count END,
        last_at = now(),
        -- The first of those that no alert has told of yet.
        first_event_id = CASE WHEN outbox_alert.count > outbox_alert.notified_count
                              THEN outbox_alert.first_event_id ELSE excluded.first_event_id END,
        first_error = CASE WHEN outbox_alert.count > outbox_alert.notified_count
                           THEN outbox_alert.first_error ELSE excluded.first_error END
)
SELECT FROM settled`

func queueFailed(batch *pgx.Batch, settled []*settlement, now time.Time) {
	var u unnested
	var ago []float64
	var status []int16
	var reason, message []string
	var posted []bool
	for i := range settled {
		s := settled[i]
		u.add(&s.delivery)
		ago = append(ago, now.Sub(s.startedAt).Seconds())
		status = append(status, int16(s.StatusCode))
		reason = append(reason, string(s.Reason))
		message = append(message, s.Message)
		posted = append(posted, s.Posted)
	}
	batch.Queue(settleFailed, u.eventIDs, u.destinations, u.fences, ago, status, reason, message, posted)
}
