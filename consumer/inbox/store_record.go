package inbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
	"github.com/outbox-relay/outbox-relay/consumer/internal/sqlstate"
	"github.com/outbox-relay/outbox-relay/internal/inboxsql"
)

// recordSQL is admitSQL for an event that is processed later. It inserts the event into
// processed_events, in the state recorded, and into inbox_events, as pending with all that a
// worker needs. If the row in processed_events was removed by hand but the event is still in
// inbox_events, the event stays as it is and only processed_events gets a row.
//
// An event with an ordering key is due only if no event of its key is released and no earlier
// one waits or has failed. Otherwise it waits without next_attempt_at. lockOrderSQL must run
// before, as a separate statement: a single statement would take its snapshot before it waits
// for the lock, and two events of a key that are recorded at once would both be due.
//
// An unknown event may have been forgotten, as in admitSQL. Nothing is written then.
const (
	recordSQL        = recordHead + `now()` + recordTail + `false` + recordEnd
	recordInOrderSQL = recordHead + firstOfItsKey + recordTail + comesBefore + recordEnd

	recordHead = `
WITH locked AS MATERIALIZED (
    SELECT $17::boolean OR pg_try_advisory_xact_lock(` + memory.KeyLock + `) AS ok,
           set_config('lock_timeout', '` + memory.LockTimeout + `', true),
           CASE WHEN current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'on', true) END,
           coalesce($15::timestamptz < (SELECT received_before FROM inbox_forgotten WHERE receiver = $1::text AND source = $2::text), false)
               OR coalesce($16::timestamptz < now(), false) AS old
), remembered AS (
    INSERT INTO processed_events
        (receiver, source, idempotency_key, payload_hash, event_type, event_version, related_reference, event_id, not_after,
         destination, processing_state, attempts)
    SELECT $1::text, $2::text, $3::text, $4::bytea, $5::text, $6::integer, nullif($7::text, ''), nullif($10::bigint, 0),
           coalesce($13::timestamptz, now() + make_interval(secs => nullif($14::float8, 0::float8))), nullif($18::text, ''), 'recorded', 0
    FROM locked
    WHERE ok AND NOT old
    ON CONFLICT ON CONSTRAINT processed_events_pkey DO NOTHING
    RETURNING not_after
), recorded AS (
    INSERT INTO inbox_events
        (receiver, source, idempotency_key, event_type, event_version, related_reference, processing_state,
         payload, request_headers, event_id, ordering_key, sequence, not_after, next_attempt_at)
    SELECT $1::text, $2::text, $3::text, $5::text, $6::integer, nullif($7::text, ''), 'pending',
           $8::bytea, $9::text::jsonb, nullif($10::bigint, 0), nullif($11::text, ''), $12::bigint, not_after, `

	firstOfItsKey = `
           CASE WHEN NOT (
               EXISTS (SELECT FROM inbox_events e WHERE e.receiver = $1::text AND e.source = $2::text AND e.ordering_key = $11::text
                   AND (e.processing_state = 'processing' OR e.processing_state = 'pending' AND e.next_attempt_at IS NOT NULL))
               OR EXISTS (SELECT FROM inbox_events e WHERE e.receiver = $1::text AND e.source = $2::text AND e.ordering_key = $11::text
                   AND e.processing_state = 'pending' AND e.next_attempt_at IS NULL AND e.sequence <= $12::bigint)
               OR $19::boolean AND EXISTS (SELECT FROM inbox_events e WHERE e.receiver = $1::text AND e.source = $2::text AND e.ordering_key = $11::text
                   AND e.processing_state = 'failed' AND e.sequence <= $12::bigint)
           ) THEN now() END`

	recordTail = `
    FROM remembered
    ON CONFLICT ON CONSTRAINT inbox_events_pkey DO NOTHING
    RETURNING next_attempt_at IS NOT NULL AS due
)
SELECT locked.ok AND locked.old, recorded.due, `

	// The event is late: a later event of its key is already released. That one may wait for hours
	// for its next attempt, or for this event.
	comesBefore = `
       EXISTS (SELECT FROM inbox_events e WHERE e.receiver = $1::text AND e.source = $2::text AND e.ordering_key = $11::text
           AND e.processing_state = 'pending' AND e.next_attempt_at IS NOT NULL AND e.sequence > $12::bigint)`

	recordEnd = `
FROM locked LEFT JOIN recorded ON true`
)

// recorded is the outcome of a request to record an event.
type recorded struct {
	memory.Found
	due  bool // it can be worked at once
	late bool // a later event of its ordering key is released already
}

// record writes the event in one transaction, which has ended when it returns, and in one round
// trip if the event is new. The isolation level is always READ COMMITTED, because the lock of an
// ordering key does not help an older snapshot.
func (in *engine) record(ctx context.Context, rq *memory.Request) (recorded, error) {
	for _, room := range in.recordingRoom() {
		select {
		case room <- struct{}{}:
			defer func() { <-room }()
		case <-ctx.Done():
			return recorded{}, fmt.Errorf("record event: %w", ctx.Err())
		}
	}
	conn, err := in.pool.Acquire(ctx)
	if err != nil {
		return recorded{}, fmt.Errorf("record event: %w", err)
	}
	defer conn.Release()
	// The request's context must not cancel this. A client that goes away during the write would
	// cost a connection and leave it unknown whether the event is recorded.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), in.CommitTimeout)
	defer cancel()

	return in.write(ctx, conn, rq, true)
}

// write is record on an acquired connection. If lock is false, it does not take the event's lock.
func (in *engine) write(ctx context.Context, conn *pgxpool.Conn, rq *memory.Request, lock bool) (recorded, error) {
	e := &rq.Event
	headers, _ := json.Marshal(recordedHeaders(e, rq.Header)) // strings always encode
	batch := &pgx.Batch{}
	batch.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	query, args := recordSQL, []any{
		in.Receiver, in.Source, e.IdempotencyKey, rq.Hash[:], e.Type, int32(e.Version), e.RelatedReference,
		rq.Body, string(headers), e.ID, e.OrderingKey, e.Sequence, memory.Shifted(e.NotAfter, 0), in.SenderNotAfter.Seconds(),
		memory.Shifted(e.CreatedAt, -in.Tolerance), memory.Shifted(e.NotAfter, in.Tolerance), // the clocks may differ by that much
		!lock, e.Destination,
	}
	if e.OrderingKey != "" {
		query, args = recordInOrderSQL, append(args, in.cfg.OnFailure == FailureBlocks)
		batch.Queue(pinSQL, "on")
		in.queueOrderLock(batch, e.OrderingKey)
	}
	var old, late bool
	var due *bool // nil: not recorded
	batch.Queue(query, args...).QueryRow(func(row pgx.Row) error { return row.Scan(&old, &due, &late) })
	batch.Queue("commit")
	err := sendAll(ctx, conn, batch)
	switch {
	case err == nil && due != nil:
		return recorded{Found: memory.Found{Admission: memory.Recorded, Status: http.StatusAccepted, State: string(StatePending)}, due: *due, late: late}, nil
	case err != nil && sqlstate.Of(err) != sqlstate.LockNotAvailable:
		return recorded{}, fmt.Errorf("record event: %w", memory.Hinted(err))
	}
	waited := err != nil
	found, err := in.known(ctx, conn, rq)
	switch {
	case err != nil || found.Admission != memory.Busy:
	case old:
		found.Admission = memory.Forgotten
	case lock:
		return in.recordPastStrangers(ctx, conn, rq)
	case waited:
		found.Admission = memory.Locked
	}
	return found, err
}

// recordPastStrangers records the event without its lock if only sessions that cannot record it
// hold that lock.
func (in *engine) recordPastStrangers(ctx context.Context, conn *pgxpool.Conn, rq *memory.Request) (recorded, error) {
	var strangers bool
	if err := conn.QueryRow(ctx, memory.StrangerHoldsSQL, planEachTime, in.Receiver, in.Source, rq.Event.IdempotencyKey).Scan(&strangers); err != nil {
		return recorded{}, fmt.Errorf("find the holder of an event: %w", err)
	}
	if !strangers {
		return recorded{Found: memory.Found{Admission: memory.Busy}}, nil
	}
	return in.write(ctx, conn, rq, false)
}

// knownSQL reads what is known of an event that was not recorded now. The state is recorded if the
// event was removed from inbox_events by hand, because its fate is unknown then.
const knownSQL = `
SELECT coalesce(p.payload_hash <> $4::bytea, false), coalesce(e.processing_state, p.processing_state), coalesce($5::timestamptz > coalesce(p.not_after, '-infinity'), false),
       coalesce(p.destination, '')
FROM processed_events p LEFT JOIN inbox_events e ON e.receiver = p.receiver AND e.source = p.source AND e.idempotency_key = p.idempotency_key
WHERE p.receiver = $1::text AND p.source = $2::text AND p.idempotency_key = $3::text`

// known says why an event was not recorded, as recall does for the middleware.
func (in *engine) known(ctx context.Context, conn *pgxpool.Conn, rq *memory.Request) (recorded, error) {
	var otherBody, comesLater bool
	var destination string
	notAfter := memory.Shifted(rq.Event.NotAfter, 0)
	found := recorded{Found: memory.Found{Admission: memory.Duplicate, Status: http.StatusOK}}
	err := conn.QueryRow(ctx, knownSQL, planEachTime, in.Receiver, in.Source, rq.Event.IdempotencyKey, rq.Hash[:], notAfter).
		Scan(&otherBody, &found.State, &comesLater, &destination)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		found.Admission = memory.Busy
	case err != nil:
		return recorded{}, fmt.Errorf("read known event: %w", err)
	case in.Elsewhere(&rq.Event, destination):
		found.Admission = memory.Diverted
	case otherBody:
		found.Admission = memory.Reused
	case comesLater:
		if _, err := conn.Exec(ctx, memory.ExtendSQL, planEachTime, in.Receiver, in.Source, rq.Event.IdempotencyKey, notAfter); err != nil {
			return recorded{}, fmt.Errorf("extend known event: %w", err)
		}
	}
	return found, nil
}

// lockOrderSQL takes the lock of an ordering key. The wait is bounded, so that a key whose lock is
// held cannot take all connections of a pool. In a handler's transaction unboundLocksSQL restores
// the handler's lock_timeout for what runs at COMMIT.
const (
	lockOrderSQL = `
SELECT set_config('outbox_relay.lock_timeout', current_setting('lock_timeout'), true), set_config('lock_timeout', '2s', true),
       ` + inboxsql.KeyLock

	unboundLocksSQL = `SELECT set_config('lock_timeout', current_setting('outbox_relay.lock_timeout'), true)`
)

func (in *engine) queueOrderLock(batch *pgx.Batch, orderingKey string) *pgx.QueuedQuery {
	return batch.Queue(lockOrderSQL, in.Receiver, in.Source, orderingKey)
}

// notifySQL wakes the inboxes of other processes. It never runs in a transaction that records an
// event, because transactions of one database that notify commit one after the other.
const notifySQL = `SELECT pg_notify('inbox_wake', ` + wakePayload + `)`

// wakePayload names the inbox to wake. All schemas of the database share one channel.
const wakePayload = `'inbox_events'::regclass::oid::text || ' ' || $1::text || ' ' || $2::text`

func (in *engine) notify(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), notifyTimeout)
	defer cancel()
	if _, err := in.pool.Exec(ctx, notifySQL, in.Receiver, in.Source); err != nil {
		return fmt.Errorf("notify other processes: %w", err)
	}
	return nil
}

// notifyTimeout bounds the notification, which is optional: other processes also poll.
const notifyTimeout = time.Second

// listenSQL subscribes to the notifications of notifySQL. listenedSQL returns the payload for
// this inbox.
const (
	listenSQL   = `LISTEN inbox_wake`
	listenedSQL = `SELECT ` + wakePayload
)

// listen subscribes to wake-ups and returns the payload of those that are meant for this inbox.
func (in *engine) listen(ctx context.Context, conn *pgx.Conn) (payload string, err error) {
	if err := conn.QueryRow(ctx, listenedSQL, in.Receiver, in.Source).Scan(&payload); err != nil {
		return "", fmt.Errorf("listen for events: %w", err)
	}
	if _, err := conn.Exec(ctx, listenSQL); err != nil {
		return "", fmt.Errorf("listen for events: %w", err)
	}
	return payload, nil
}
