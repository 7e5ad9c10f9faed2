package settle

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// store runs the settler's statements.
type store struct {
	pool pg.Pool
	// boundsLocks bounds how long a settle waits for locks, over a session, which waits for them as
	// long as they last.
	boundsLocks bool
}

// boundLocks makes a transaction wait for locks no longer than the relay's other statements do.
const boundLocks = `SELECT set_config('lock_timeout', '200ms', true)`

// settle writes a batch in one round trip and one transaction: all of it or nothing, except for
// rows that another session has locked or was just changing. It returns the settlements of those
// rows as missed, and in stale the number of those that came too late: another relay had claimed
// their delivery meanwhile.
func (s store) settle(ctx context.Context, relayID int32, b *batch) (missed []*Settlement, stale int, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	var queries pgx.Batch
	write := func(statement string, c columns, others ...any) {
		if n := len(c.events); n > 0 {
			stale += n
			queries.Queue(statement, append([]any{c.events, c.destinations, c.fences}, others...)...).Exec(func(tag pgconn.CommandTag) error {
				stale -= int(tag.RowsAffected())
				return nil
			})
		}
	}
	now := time.Now()
	o := b.byOutcome()
	if len(o.failed) > 0 {
		queries.Queue("BEGIN")
		queries.Queue(pg.CommitDurably)
	}
	if s.boundsLocks {
		queries.Queue(boundLocks)
	}
	ranges := newRangeBatches(b, &o, now)
	for _, r := range ranges { // first: a failed delivery of a range has its row from here
		r.Queue(&queries, &r.done)
	}
	c := columnsOf(o.failed, now)
	write(WriteFailed, c, c.ago, c.codes, c.reasons, c.messages, c.posted, c.pauses)
	c = columnsOf(o.delivered, now)
	write(WriteDelivered, c, c.ago, c.codes)
	c = columnsOf(o.retried, now)
	write(WriteRetry, c, c.ago, c.codes, c.reasons, c.messages, c.delays, c.attempts, c.bound)
	c = columnsOf(o.held, now)
	write(WriteHold, c, c.bound)
	if len(o.logged) > 0 {
		c = columnsOf(o.logged, now)
		queries.Queue(logAttempts, c.events, c.destinations, c.fences, relayID, c.attempts, c.ago, c.took, c.codes, c.outcomes, c.reasons, c.messages)
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
	tooLate := b.noteRanges(ranges)
	if stale > 0 {
		if missed, err = s.missed(ctx, relayID, b); err != nil {
			return nil, 0, err
		}
	}
	return missed, max(stale-len(missed), 0) + tooLate, nil
}

// RestoreLostClaims restores claims that a crash of the server has lost together with their
// settles. Such a row is as it was before the claim: its claim number is smaller, and since fences
// grow with the clock, no other relay has claimed it since. The POST did happen, so the claim is
// restored, to be settled by the next try, and so is the place that the delivery had in its
// ordering key: without it a retry would hold nothing of its key. The idempotency key must be the
// same: a crash may also lose events of producers that do not wait for their commit, and the server
// gives their ids to others.
const RestoreLostClaims = `
UPDATE outbox_delivery d
SET claim = s.claim, claimed_by = $1, lease_expires_at = now() + interval '10 seconds', not_after = coalesce(d.not_after, s.not_after),
    joined = coalesce(d.joined, s.joined), blocked_by = NULL
FROM unnest($2::bigint[], $3::text[], $4::bigint[], $5::int[], $6::text[], $7::timestamptz[], $8::bool[], $9::bigint[])
    AS s (event_id, destination, claim, attempts, key, not_after, posted, joined)
CROSS JOIN LATERAL (SELECT e.idempotency_key AS key FROM outbox e WHERE e.id = s.event_id LIMIT 1) event
CROSS JOIN LATERAL (` + lookUp + ` FOR NO KEY UPDATE SKIP LOCKED) found
WHERE s.posted AND d.ctid = found.place AND d.claim < s.claim AND d.attempts = s.attempts AND event.key = s.key
  AND d.status NOT IN ('delivered', 'failed', 'discarded') AND (d.lease_expires_at IS NULL OR d.lease_expires_at NOT BETWEEN now() AND now() + interval '2 days')`

// FindUnsettled finds what a settle has missed. It finds each row where its snapshot has it, and
// misses a row that was changed, and so moved, while it waited for it, and one that it left out
// because it was locked. Both are still under the same claim and not yet settled. Of a retry only
// the number of attempts shows that it is written.
const FindUnsettled = `
SELECT s.number
FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::int[], $5::text[]) WITH ORDINALITY
    AS s (event_id, destination, claim, attempts, outcome, number)
CROSS JOIN LATERAL (
    SELECT o.claim, o.status, o.attempts, o.claimed_by
    FROM outbox_delivery o WHERE o.event_id = s.event_id AND o.destination = s.destination LIMIT 1
) d
WHERE d.claim = s.claim AND (s.outcome <> 'retry' OR d.attempts = s.attempts) AND d.status NOT IN ('delivered', 'failed', 'discarded')
  AND NOT (s.outcome = 'hold' AND d.claimed_by IS NULL)`

// missed restores the claims of a batch that the server has lost, and returns the settlements that
// could still be written.
func (s store) missed(ctx context.Context, relayID int32, b *batch) (missed []*Settlement, err error) {
	withRows := make([]*Settlement, 0, len(b.settlements))
	for i := range b.settlements {
		if !b.settlements[i].rowless {
			withRows = append(withRows, &b.settlements[i])
		}
	}
	c := columnsOf(withRows, time.Time{})
	if slices.Contains(c.posted, true) {
		_, err := s.pool.Exec(ctx, RestoreLostClaims, relayID, c.events, c.destinations, c.fences, c.attempts, c.keys, c.notAfter, c.posted, c.joined)
		if err != nil {
			return nil, fmt.Errorf("restore lost claims: %w", err)
		}
	}
	numbers, err := rows.Values[int64](ctx, s.pool, "find unsettled", FindUnsettled, c.events, c.destinations, c.fences, c.attempts, c.outcomes)
	if err != nil {
		return nil, fmt.Errorf("find unsettled: %w", err)
	}
	for _, number := range numbers {
		missed = append(missed, withRows[number-1])
	}
	return missed, nil
}

// columns are settlements as parameters of a statement. Every statement finds its rows by the first
// three: the fence is part of the key.
type columns struct {
	events            []int64
	destinations      []string
	fences            []int64
	ago, delays       []float64 // seconds: since the request began, until the next attempt
	codes             []int16
	attempts, took    []int32 // requests before this one; milliseconds
	outcomes          []string
	reasons, messages []string
	bound, posted     []bool
	pauses            []bool
	keys              []*string
	notAfter          []time.Time
	joined            []int64
}

func columnsOf(settlements []*Settlement, now time.Time) (c columns) {
	for _, s := range settlements {
		c.events, c.destinations, c.fences = append(c.events, s.EventID), append(c.destinations, s.Destination), append(c.fences, s.Fence)
		c.ago, c.delays = append(c.ago, now.Sub(s.StartedAt).Seconds()), append(c.delays, s.Delay.Seconds())
		c.codes, c.attempts = append(c.codes, int16(s.StatusCode)), append(c.attempts, int32(s.Attempts))
		c.took, c.outcomes = append(c.took, int32(s.Took.Milliseconds())), append(c.outcomes, string(s.Outcome))
		c.reasons, c.messages = append(c.reasons, string(s.Reason)), append(c.messages, s.Message)
		c.bound, c.posted, c.pauses = append(c.bound, s.isBound()), append(c.posted, s.Posted), append(c.pauses, s.PausesDestination)
		c.keys, c.notAfter, c.joined = append(c.keys, s.Key), append(c.notAfter, s.NotAfter), append(c.joined, s.Joined)
	}
	return c
}

// findSettled joins each settlement to its row, if that is still pending under the same claim.
// Every plan must look up each row by its key. A plain join may read the whole backlog for every
// row, if its plan was made when next to nothing was pending. LIMIT keeps the planner from turning
// the lookup into such a join; "status = 'pending'" would offer it the index of everything pending.
const findSettled = `
CROSS JOIN LATERAL (` + lookUp + `) found
WHERE d.ctid = found.place AND d.claim = s.claim AND d.status NOT IN ('delivered', 'failed', 'discarded')`

const lookUp = `
    SELECT o.ctid AS place FROM outbox_delivery o WHERE o.event_id = s.event_id AND o.destination = s.destination LIMIT 1`

// skipLocked makes a batch leave out rows that another session has locked, instead of waiting for
// them. Locking each row first writes 56 bytes of WAL more for a delivery (285 instead of 229), so
// only what has failed once does it.
func skipLocked(batch *pgx.Batch) {
	for _, query := range batch.QueuedQueries {
		query.SQL = strings.Replace(query.SQL, lookUp, lookUp+" FOR NO KEY UPDATE SKIP LOCKED", 1)
	}
}

// WriteDelivered writes a delivery that its receiver has taken.
const WriteDelivered = `
UPDATE outbox_delivery d
SET status = 'delivered', delivered_at = now(), attempts = d.attempts + 1, rescues = 0,
    last_attempt_at = now() - make_interval(secs => s.ago), last_http_status = s.status, last_reason = NULL, last_error = NULL,
    claimed_by = NULL, lease_expires_at = NULL, not_after = NULL
FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::float8[], $5::smallint[])
    AS s (event_id, destination, claim, ago, status)` + findSettled

// WriteRetry leaves status and claim as they are. When a batch is sent again because its commit was
// not acknowledged, only the number of attempts shows that the retry is written.
const WriteRetry = `
UPDATE outbox_delivery d
SET next_attempt_at = now() + make_interval(secs => s.delay), attempts = d.attempts + 1, rescues = 0,
    last_attempt_at = now() - make_interval(secs => s.ago), last_http_status = nullif(s.status, 0),
    last_reason = s.reason, last_error = s.error, claimed_by = NULL, lease_expires_at = NULL,
    not_after = CASE WHEN s.bound THEN d.not_after END
FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::float8[], $5::smallint[], $6::text[], $7::text[], $8::float8[], $9::int[], $10::bool[])
    AS s (event_id, destination, claim, ago, status, reason, error, delay, attempts, bound)` + findSettled + ` AND d.attempts = s.attempts`

// WriteHold gives a claim back.
const WriteHold = `
UPDATE outbox_delivery d
SET claimed_by = NULL, lease_expires_at = NULL, not_after = CASE WHEN s.bound THEN d.not_after END
FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bool[]) AS s (event_id, destination, claim, bound)` + findSettled + ` AND d.claimed_by IS NOT NULL`

// An attempt is logged whether or not its settle still counted: it was on the wire. The same claim
// never logs twice, though a batch whose commit was not acknowledged is sent again.
const logAttempts = `
INSERT INTO outbox_attempt (event_id, destination, claim, attempt, relay_id, started_at, duration_ms, http_status, outcome, reason, error)
SELECT event_id, destination, claim, attempts + 1, $4, now() - make_interval(secs => ago), duration_ms, nullif(http_status, 0),
       outcome, reason, nullif(error, '')
FROM unnest($1::bigint[], $2::text[], $3::bigint[], $5::int[], $6::float8[], $7::int[], $8::smallint[], $9::text[],
            $10::text[], $11::text[])
    AS s (event_id, destination, claim, attempts, ago, duration_ms, http_status, outcome, reason, error)
ON CONFLICT (event_id, destination, claim) DO NOTHING`

// WriteFailed also counts the failures in the alert, and pauses a destination whose receiver is
// gone.
const WriteFailed = `
WITH settled AS (
    UPDATE outbox_delivery d
    SET status = 'failed', attempts = d.attempts + s.posted::int,
        last_attempt_at = CASE WHEN s.posted THEN now() - make_interval(secs => s.ago) ELSE d.last_attempt_at END,
        last_http_status = nullif(s.status, 0), last_reason = s.reason, last_error = s.error,
        claimed_by = NULL, lease_expires_at = NULL
    FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::float8[], $5::smallint[], $6::text[], $7::text[], $8::bool[],
                $9::bool[])
        AS s (event_id, destination, claim, ago, status, reason, error, posted, pauses)` + findSettled + `
    RETURNING d.event_id, d.destination, s.error, s.pauses, d.replay
), paused AS (
    INSERT INTO outbox_destination (destination, paused, paused_reason, paused_at)
    SELECT DISTINCT ON (destination) destination, true, 'the receiver answered 410 Gone', now()
    FROM settled WHERE pauses
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
        -- The first of those that count counts.
        first_event_id = CASE WHEN outbox_alert.resolved_at IS NULL
                              THEN outbox_alert.first_event_id ELSE excluded.first_event_id END,
        first_error = CASE WHEN outbox_alert.resolved_at IS NULL
                           THEN outbox_alert.first_error ELSE excluded.first_error END
)
SELECT FROM settled`
