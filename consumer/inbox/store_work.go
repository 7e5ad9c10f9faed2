package inbox

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
	"github.com/outbox-relay/outbox-relay/consumer/internal/sqlstate"
)

// planEachTime has a statement planned whenever it runs. A plan that is kept with a prepared
// statement may have been made while the table was small, and read all of it once it has grown. For
// what runs rarely that is simpler than pinSQL.
const planEachTime = pgx.QueryExecModeExec

// kindsOfEvents are the types of the events that may be worked, found one after the other by the index, without reading the
// events between them.
const kindsOfEvents = `
WITH RECURSIVE kind AS (
    (SELECT event_type FROM inbox_events
     WHERE receiver = $1::text AND source = $2::text AND processing_state = 'pending' AND next_attempt_at IS NOT NULL
     ORDER BY event_type LIMIT 1)
    UNION ALL
    SELECT (SELECT e.event_type FROM inbox_events e
            WHERE e.receiver = $1::text AND e.source = $2::text AND e.processing_state = 'pending' AND e.next_attempt_at IS NOT NULL AND e.event_type > kind.event_type
            ORDER BY e.event_type LIMIT 1)
    FROM kind WHERE kind.event_type IS NOT NULL
)`

// checkDueSQL finds out whether there is anything to do for a worker, without locking anything:
// whether an event is due, and whether one is being worked for so long that its worker may have
// died. It is all that an idle inbox asks.
const checkDueSQL = kindsOfEvents + `
SELECT EXISTS (SELECT FROM kind CROSS JOIN LATERAL (
           SELECT FROM inbox_events e
           WHERE e.receiver = $1::text AND e.source = $2::text AND e.event_type = kind.event_type
             AND e.processing_state = 'pending' AND e.next_attempt_at IS NOT NULL AND e.next_attempt_at <= now()
           ORDER BY e.next_attempt_at LIMIT 1) due),
       EXISTS (SELECT FROM inbox_events e
           WHERE e.receiver = $1::text AND e.source = $2::text AND e.processing_state = 'processing' AND e.claimed_at < now() - interval '1 second')`

func (s *runner) checkDue(ctx context.Context) (due, unattended bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.CommitTimeout)
	defer cancel()
	if err := s.pool.QueryRow(ctx, checkDueSQL, planEachTime, s.Receiver, s.Source).Scan(&due, &unattended); err != nil {
		return false, false, fmt.Errorf("check for due events: %w", err)
	}
	return due, unattended, nil
}

// pinSQL has the statements behind it in the transaction planned to walk indexes; see planEachTime.
const pinSQL = `
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
       set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true),
       set_config('jit', 'off', true), set_config('synchronous_commit', $1::text, true)`

// claimSQL takes what is due, at most $6 events, and of each type that $4 names at most $5. It goes from one type to the
// next by the index, so that a type with any number of due events, or one at its limit, costs the others nothing; and it
// begins behind the type that the last claim ended with, so that none is always the last.
//
// The rows are locked in a materialised step and then updated by where they lie: locking inside "IN (SELECT … LIMIT …)"
// may run again for each row and claim more than its limit. LIMIT stands outside of the types, which the join visits one
// after the other, so no more is locked than is taken. next_attempt_at stays, and with it the place of an event that is
// given back.
const claimSQL = kindsOfEvents + `, turn AS MATERIALIZED (
    SELECT kind.event_type, coalesce(l.free, $6::integer) AS free
    FROM kind LEFT JOIN unnest($4::text[], $5::integer[]) AS l (event_type, free) ON l.event_type = kind.event_type
    WHERE kind.event_type IS NOT NULL AND coalesce(l.free, $6::integer) > 0
    ORDER BY kind.event_type <= $7::text, kind.event_type
), locked AS MATERIALIZED (
    SELECT due.place
    FROM turn CROSS JOIN LATERAL (
        SELECT e.ctid AS place
        FROM inbox_events e
        WHERE e.receiver = $1::text AND e.source = $2::text AND e.event_type = turn.event_type
          AND e.processing_state = 'pending' AND e.next_attempt_at IS NOT NULL AND e.next_attempt_at <= now()
        ORDER BY e.next_attempt_at, e.inbox_id
        LIMIT turn.free
        FOR UPDATE SKIP LOCKED
    ) due
    LIMIT $6::integer
)
UPDATE inbox_events e
SET processing_state = 'processing', claim = e.claim + 1, claimed_by = $3::text, claimed_at = now()
WHERE e.ctid = ANY (ARRAY(SELECT place FROM locked))
RETURNING e.idempotency_key, e.claim, e.event_type, e.ctid::text`

// pinSomeSQL is pinSQL for a transaction that belongs to a handler. What is behind it must be undone before the handler's
// own statements are planned, those of deferred triggers at COMMIT among them: by unpinned in the statement that was
// pinned, which is planned before it runs, or by unpinSQL. beginPinnedSQL is for the first statement of a transaction: see memory.InDatabase.
const (
	beginPinnedSQL = `SELECT inbox_reset(), ` + pins
	pinSomeSQL     = `SELECT ` + pins
	pins           = `set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true)`
	unpinSQL       = `SELECT ` + unpinned
	unpinned       = `set_config('enable_seqscan', NULL, true), set_config('enable_bitmapscan', NULL, true)`
)

// claimRequest is what a claim wants.
type claimRequest struct {
	limit int
	types []string // of which at most room are wanted
	room  []int32
	after string // the type that the last claim ended with
}

// claimDue claims events. It does not wait for its commit to reach the disk: a claim that a crash
// of the database undoes has not let anything happen, because a worker reads it again under its
// lock.
func (s *runner) claimDue(ctx context.Context, conn *pgxpool.Conn, want claimRequest) (tickets []*ticket, err error) {
	batch := &pgx.Batch{}
	batch.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	batch.Queue(pinSQL, "off")
	batch.Queue(claimSQL, s.Receiver, s.Source, s.name, want.types, want.room, int32(want.limit), want.after).Query(func(rows pgx.Rows) error {
		tickets, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (*ticket, error) {
			t := &ticket{}
			return t, row.Scan(&t.key, &t.fence, &t.eventType, &t.place)
		})
		return err
	})
	batch.Queue("commit")
	if err := sendAll(ctx, conn, batch); err != nil {
		return nil, fmt.Errorf("claim events: %w", err)
	}
	return tickets, nil
}

// sendAll sends a batch that begins a transaction and ends with its COMMIT.
func sendAll(ctx context.Context, conn *pgxpool.Conn, batch *pgx.Batch) error {
	batch.QueuedQueries[batch.Len()-1].Exec(func(tag pgconn.CommandTag) error {
		if tag.String() != memory.CommitTag {
			return memory.ErrNotCommit
		}
		return nil
	})
	results := conn.SendBatch(ctx, batch)
	err := results.Close()
	if err != nil && conn.Conn().PgConn().TxStatus() != 'I' {
		_ = results.Tx().Rollback(ctx)
	}
	if err != nil && sqlstate.Of(err) != sqlstate.LockNotAvailable && !sqlstate.IsConflict(err) {
		_ = conn.Conn().Close(ctx) // it would be so again, where the connection is what is wrong
	}
	return err
}

// beginSQL begins the work on a claimed event, and reads it. The lock of the row is the lease: it ends with the worker's
// transaction, however that ends, and needs no time to expire. The worker that comes second, because the event was given back and
// claimed again meanwhile, finds the row locked, or another fence or state.
//
// The row is found where the claim has left it, which needs no index. If it was moved since, it is
// rescued.
const beginSQL = `
SELECT payload, coalesce(request_headers::text, '{}'), attempts, interruptions, coalesce(ordering_key, ''),
       current_setting('transaction_isolation'), pg_current_xact_id()::text, ` + unpinned + `,
       tableoid::bigint, ` + memory.PathLimited + `, current_user::text
FROM inbox_events
WHERE ctid = $6::text::tid AND receiver = $1::text AND source = $2::text AND idempotency_key = $3::text AND claim = $4::bigint AND processing_state = 'processing'
FOR UPDATE SKIP LOCKED`

// begin opens the transaction in which the handler works. It returns nil, without an error, when the event is not this
// worker's any more. conn is given back, now or with the transaction.
func (s *runner) begin(ctx context.Context, conn *pgxpool.Conn, t *ticket) (*work, error) {
	wk := &work{ticket: t}
	var table int64
	var found memory.Surroundings
	batch := &pgx.Batch{}
	batch.BeginTx(s.TxOptions())
	batch.Queue(beginPinnedSQL)
	batch.Queue(beginSQL, s.Receiver, s.Source, t.key, t.fence, s.Limit(), t.place).QueryRow(func(row pgx.Row) error {
		return row.Scan(&wk.payload, &wk.headers, &wk.attempts, &wk.interruptions, &wk.orderingKey, &wk.isolation, &wk.xid, nil, nil,
			&table, &found.SearchPath, &found.Role)
	})
	results := conn.SendBatch(ctx, batch)
	err := results.Close()
	wk.tx = memory.Lend(conn, results.Tx(), s.CommitTimeout)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		wk.tx.Rollback()
		return nil, nil
	case err != nil:
		if !sqlstate.IsConflict(err) {
			wk.tx.Enter(memory.Surroundings{}) // as no connection is: it is closed
		}
		wk.tx.Rollback()
		return nil, fmt.Errorf("begin work on event: %w", err)
	}
	if wk.table, err = s.eventsTable(ctx, wk.tx, table); err != nil {
		wk.tx.Enter(memory.Surroundings{})
		wk.tx.Rollback()
		return nil, fmt.Errorf("begin work on event: %w", err)
	}
	found.Table = wk.table.name
	wk.tx.Enter(found)
	return wk, nil
}

// eventsTable is a table inbox_events, and the statements on it in a transaction that a handler has had; see memory.InDatabase.
type eventsTable struct{ name, finish, promote string }

// eventsTable returns the table by its oid. It asks once for each, mostly once.
func (s *runner) eventsTable(ctx context.Context, tx memory.Transaction, oid int64) (*eventsTable, error) {
	if known, ok := s.tables.Load(oid); ok {
		return known.(*eventsTable), nil
	}
	name, err := memory.TableName(ctx, tx, oid)
	if err != nil {
		return nil, err
	}
	table := &eventsTable{
		name:    name,
		finish:  strings.ReplaceAll(finishSQL, "inbox_events", name),
		promote: strings.ReplaceAll(promoteSQL, "inbox_events", name),
	}
	s.tables.Store(oid, table)
	return table, nil
}

// finishSQL writes down that the handler has succeeded. It raises an error, which keeps the COMMIT behind it from being
// carried out, unless it runs in the very transaction that locked the row: a handler that ended that one by itself has
// let go of the event, and what it wrote since must not be committed.
//
// The row is not where it was when the handler has changed it, as one does that removes the
// payload. So it is found by its key, and by the primary key only: the state is no condition that
// another index answers.
const finishSQL = `
WITH finished AS (
    UPDATE inbox_events
    SET processing_state = $5::text, processed_at = clock_timestamp(), attempts = attempts + 1, interruptions = 0,
        next_attempt_at = NULL, last_error = nullif($6::text, '')
    WHERE receiver = $1::text AND source = $2::text AND idempotency_key = $3::text AND claim = $4::bigint AND processing_state || '' = 'processing'
      AND pg_current_xact_id() = $7::text::xid8
    RETURNING 1
)` + memory.LastHead + `count(*)` + memory.AsFound + `$8` + memory.RoleAsFound + `$9` + memory.LastEnd + ` FROM finished`

// finish commits the handler's work together with the event's state, and lets go what waited behind it.
func (s *runner) finish(ctx context.Context, wk *work, state State, reason string) error {
	defer wk.tx.Rollback() // what an error left open
	if err := wk.tx.Unfit(); err != nil {
		if wk.tx.Ended() { // otherwise what the handler asked for was refused, so nothing is committed
			err = consumer.Permanent(err)
		}
		return err
	}
	batch := &pgx.Batch{}
	batch.Queue(pinSomeSQL)
	wk.tx.QueueLast(batch, wk.table.finish, []any{s.Receiver, s.Source, wk.key, wk.fence, string(state), reason, wk.xid}, func(err error) error {
		if sqlstate.Of(err) == sqlstate.DivisionByZero {
			return consumer.Permanent(memory.ErrEnded)
		}
		return err
	})
	// A snapshot of the whole transaction may be older than an event that has come to wait since: see release.
	if wk.orderingKey != "" && wk.isolation == string(pgx.ReadCommitted) {
		s.queueOrderLock(batch, wk.orderingKey).QueryRow(func(row pgx.Row) error {
			err := row.Scan(nil, nil, nil)
			if sqlstate.Of(err) == sqlstate.LockNotAvailable {
				return errKeyHeld
			}
			return err
		})
		s.queuePromote(batch, wk.table.promote, wk.orderingKey, &wk.promoted)
		batch.Queue(unboundLocksSQL)
	}
	batch.Queue(unpinSQL)
	err := wk.tx.SendCommit(ctx, batch, true) // for the statements of the inbox, which use the same pool
	switch {
	case err == nil:
		return nil
	case sqlstate.Of(err) == sqlstate.InFailedTransaction, errors.Is(err, memory.ErrAborted):
		err = errDropped
	case sqlstate.Of(err) == sqlstate.UndefinedTable, sqlstate.Of(err) == sqlstate.InsufficientPrivilege:
		err = fmt.Errorf("%w (a handler that has set a role must put it back)", err)
	case wk.tx.Conn().Conn().IsClosed() && ctx.Err() == nil: // a COMMIT that takes too long may do so every time
		err = fmt.Errorf("%w: %w", errInterrupted, err)
	}
	return fmt.Errorf("commit: %w", err)
}

// sameSQL asks, in the transaction that a handler has left, whether it is the one that was begun for it.
const sameSQL = `SELECT coalesce(pg_current_xact_id_if_assigned()::text, '') = $1::text`

// exchanged reports whether a handler that did not succeed has certainly ended the transaction that was begun for it. If it
// certainly has not, no doubt is left. What cannot be asked, because the transaction is aborted or its connection lost, is for
// committedItself.
func (s *runner) exchanged(ctx context.Context, wk *work) bool {
	wk.tx.Close()
	if wk.tx.Ended() {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, s.CommitTimeout)
	defer cancel()
	if err := wk.tx.Conn().QueryRow(ctx, sameSQL, planEachTime, wk.xid).Scan(&wk.same); err != nil {
		return false
	}
	return !wk.same
}

// committedSQL asks, from outside, whether the transaction of an attempt is committed although its event is still being
// worked: it was the handler then that committed it. The row's lock is waited for first, because that ends with the
// transaction: a COMMIT that was cut off may be carried out all the same.
const committedSQL = `
WITH mine AS MATERIALIZED (
    SELECT FROM inbox_events
    WHERE receiver = $1::text AND source = $2::text AND idempotency_key = $3::text AND claim = $4::bigint AND processing_state = 'processing'
    FOR UPDATE
)
SELECT coalesce(pg_xact_status($5::text::xid8) = 'committed', false) FROM mine`

// committedItself reports whether a handler whose transaction is in doubt has committed it. When the database does not say,
// it is unknown, and the event is tried again: most transactions in doubt are as they were begun.
func (s *runner) committedItself(ctx context.Context, wk *work) (committed bool) {
	if wk.same {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, s.CommitTimeout)
	defer cancel()
	err := s.pool.QueryRow(ctx, committedSQL, planEachTime, s.Receiver, s.Source, wk.key, wk.fence, wk.xid).Scan(&committed)
	return err == nil && committed
}

// promoteSQL lets the next event of an ordering key go, once nothing of the key is let go already, and unless one that
// failed stands before it and keeps it waiting. It runs under the key's lock. The event takes the place in the queue that it
// has by its age: at the end of the queue a key would have to wait for the whole backlog, once for each of its events.
const promoteSQL = `
UPDATE inbox_events e
SET next_attempt_at = CASE WHEN e.claim = 0 THEN e.received_at ELSE now() END
WHERE e.ctid = (
    SELECT w.ctid
    FROM inbox_events w
    WHERE w.receiver = $1::text AND w.source = $2::text AND w.ordering_key = $3::text AND w.processing_state = 'pending' AND w.next_attempt_at IS NULL
    ORDER BY w.sequence, w.inbox_id
    LIMIT 1
  )
  AND e.processing_state = 'pending' AND e.next_attempt_at IS NULL
  AND NOT EXISTS (SELECT FROM inbox_events g WHERE g.receiver = $1::text AND g.source = $2::text AND g.ordering_key = $3::text
      AND (g.processing_state = 'processing' OR g.processing_state = 'pending' AND g.next_attempt_at IS NOT NULL))
  AND NOT ($4::boolean AND EXISTS (SELECT FROM inbox_events f WHERE f.receiver = $1::text AND f.source = $2::text AND f.ordering_key = $3::text
      AND f.processing_state = 'failed' AND (f.sequence, f.inbox_id) < (e.sequence, e.inbox_id)))`

func (in *engine) queuePromote(batch *pgx.Batch, promote, orderingKey string, promoted *bool) {
	batch.Queue(promote, in.Receiver, in.Source, orderingKey, in.cfg.OnFailure == FailureBlocks).Exec(func(changed pgconn.CommandTag) error {
		*promoted = changed.RowsAffected() > 0
		return nil
	})
}

// giveWaySQL makes the event of a key that is let go, but not being worked, wait again when one that comes before it
// waits: a replay, which is to go first.
const giveWaySQL = `
UPDATE inbox_events e
SET next_attempt_at = NULL
WHERE e.receiver = $1::text AND e.source = $2::text AND e.ordering_key = $3::text AND e.processing_state = 'pending' AND e.next_attempt_at IS NOT NULL
  AND EXISTS (SELECT FROM inbox_events w
      WHERE w.receiver = $1::text AND w.source = $2::text AND w.ordering_key = $3::text AND w.processing_state = 'pending' AND w.next_attempt_at IS NULL
        AND (w.sequence, w.inbox_id) < (e.sequence, e.inbox_id))`

// release lets the event of an ordering key go whose turn it is, in a separate transaction. After
// giveWaySQL nothing of the key can begin to be worked, because only what is let go is claimed, and
// only under the key's lock is anything let go; so promoteSQL, with a later snapshot, sees what has
// been claimed until then, or that nothing was.
func (in *engine) release(ctx context.Context, orderingKey string) (promoted bool, err error) {
	err = in.inTransaction(ctx, "release the next event of a key", "on", func(batch *pgx.Batch) {
		in.queueOrderLock(batch, orderingKey)
		batch.Queue(giveWaySQL, in.Receiver, in.Source, orderingKey)
		in.queuePromote(batch, promoteSQL, orderingKey, &promoted)
	})
	return promoted, err
}

// inTransaction sends what queue adds in one transaction, whose statements walk indexes. purpose
// begins its error; synchronousCommit says whether the commit waits for the disk.
func (in *engine) inTransaction(ctx context.Context, purpose, synchronousCommit string, queue func(batch *pgx.Batch)) error {
	ctx, cancel := context.WithTimeout(ctx, in.CommitTimeout)
	defer cancel()
	conn, err := in.pool.Acquire(ctx)
	if err == nil {
		defer conn.Release()
		batch := &pgx.Batch{}
		batch.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
		batch.Queue(pinSQL, synchronousCommit)
		queue(batch)
		batch.Queue("commit")
		err = sendAll(ctx, conn, batch)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", purpose, err)
	}
	return nil
}

// settleSQL writes down an outcome other than success, in a separate transaction: the handler's is
// rolled back. The fence keeps a worker that comes too late from touching what another has claimed
// since.
const settleSQL = `
UPDATE inbox_events
SET processing_state = $5::text,
    attempts = attempts + $6::integer,
    interruptions = CASE WHEN $6::integer > 0 THEN 0 ELSE interruptions + 1 END,
    last_error = $7::text,
    next_attempt_at = CASE WHEN $5::text = 'pending' THEN now() + make_interval(secs => $8::float8) END,
    processed_at = CASE WHEN $5::text = 'failed' THEN clock_timestamp() END
WHERE receiver = $1::text AND source = $2::text AND idempotency_key = $3::text AND claim = $4::bigint AND processing_state = 'processing'`

// settle writes down that an attempt has ended without success. It reports false when the event was not this worker's to
// settle any more: another worker has it, or the commit that seemed to fail did not.
func (s *runner) settle(ctx context.Context, wk *work, o settlement) (mine bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.CommitTimeout)
	defer cancel()
	tag, err := s.pool.Exec(ctx, settleSQL, planEachTime, s.Receiver, s.Source, wk.key, wk.fence, string(o.state), int32(o.attempts), o.text, o.after.Seconds())
	if err != nil {
		return false, fmt.Errorf("settle event: %w", err)
	}
	return tag.RowsAffected() > 0, nil
}

// giveBackSQL undoes a claim. The event keeps its place, because next_attempt_at has never changed.
const giveBackSQL = `
UPDATE inbox_events
SET processing_state = 'pending'
WHERE receiver = $1::text AND source = $2::text AND idempotency_key = $3::text AND claim = $4::bigint AND processing_state = 'processing'`

func (s *runner) giveBack(ctx context.Context, t *ticket) error {
	ctx, cancel := context.WithTimeout(ctx, s.CommitTimeout)
	defer cancel()
	if _, err := s.pool.Exec(ctx, giveBackSQL, planEachTime, s.Receiver, s.Source, t.key, t.fence); err != nil {
		return fmt.Errorf("give event back: %w", err)
	}
	return nil
}
