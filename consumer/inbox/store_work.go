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
	"github.com/outbox-relay/outbox-relay/internal/inboxsql"
)

// planEachTime has a statement planned whenever it runs. A plan that is kept with a prepared
// statement may have been made while the table was small, and read all of it once it has grown. For
// what runs rarely that is simpler than pinSQL.
const planEachTime = pgx.QueryExecModeExec

// checkDueSQL finds out whether there is anything to do for a worker, without locking anything:
// whether an event is due, and whether one is being worked for so long that its worker may have
// died. It is all that an idle inbox asks.
const checkDueSQL = inboxsql.Kinds + `
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

// claimSQL claims due events: at most $6 in total, and at most $5 of each type in $4. It steps from
// type to type by the index. So a type with many due events, or one at its limit, costs the others
// nothing. It starts behind the type that the last claim ended with, so that no type is always the
// last.
//
// The rows are locked in a materialised step and then updated by ctid. "IN (SELECT … LIMIT …)" with
// a lock inside may run again for each row and claim more than its limit. LIMIT stands outside the
// join, which visits the types one by one, so no more rows are locked than claimed. next_attempt_at
// does not change, so an event that is given back keeps its place.
const claimSQL = inboxsql.Kinds + `, turn AS MATERIALIZED (
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

// pinSomeSQL is pinSQL for a handler's transaction. It must be undone before the handler's
// statements are planned, including those of deferred triggers at COMMIT. Either the pinned
// statement itself contains unpinned (it is planned before it runs), or unpinSQL follows it.
// beginPinnedSQL is the first statement of a transaction: see memory.InDatabase.
const (
	beginPinnedSQL = `SELECT inbox_reset(), ` + pins
	pinSomeSQL     = `SELECT ` + pins
	pins           = `set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true)`
	unpinSQL       = `SELECT ` + unpinned
	unpinned       = `set_config('enable_seqscan', NULL, true), set_config('enable_bitmapscan', NULL, true)`
)

// claimRequest says how much a claim may take.
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

// beginSQL begins the work on a claimed event and reads it. The row lock is the lease: it ends with
// the worker's transaction, however that ends, and needs no timeout. If the event was given back
// and claimed again meanwhile, the second worker finds the row locked, or another fence or state.
//
// The row is found by its ctid, which needs no index. If another transaction has moved it since the
// claim, the event is rescued later.
const beginSQL = `
SELECT payload, coalesce(request_headers::text, '{}'), attempts, interruptions, coalesce(ordering_key, ''),
       current_setting('transaction_isolation'), pg_current_xact_id()::text, ` + unpinned + `,
       tableoid::bigint, ` + memory.PathLimited + `, current_user::text
FROM inbox_events
WHERE ctid = $6::text::tid AND receiver = $1::text AND source = $2::text AND idempotency_key = $3::text AND claim = $4::bigint AND processing_state = 'processing'
FOR UPDATE SKIP LOCKED`

// begin opens the transaction for the handler. It returns nil and no error if the event no longer
// belongs to this worker. It releases conn, now or when the transaction ends.
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

// eventsTable is one table inbox_events with the statements that run on it after a handler. See
// memory.InDatabase.
type eventsTable struct{ name, finish, promote string }

// eventsTable returns the table with the oid. It asks the database once for each oid.
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
		promote: strings.ReplaceAll(inboxsql.Promote, "inbox_events", name),
	}
	s.tables.Store(oid, table)
	return table, nil
}

// finishSQL records that the handler has succeeded. It raises an error, which prevents the COMMIT
// behind it, unless it runs in the transaction that locked the row. A handler that has ended that
// transaction no longer owns the event, and its later writes must not be committed.
//
// The handler may have changed the row, for example to remove the payload, and so moved it.
// Therefore the row is found by the primary key. The state is compared as an expression, so that no
// other index is used.
const finishSQL = `
WITH finished AS (
    UPDATE inbox_events
    SET processing_state = $5::text, processed_at = clock_timestamp(), attempts = attempts + 1, interruptions = 0,
        next_attempt_at = NULL, last_error = nullif($6::text, '')
    WHERE receiver = $1::text AND source = $2::text AND idempotency_key = $3::text AND claim = $4::bigint AND processing_state || '' = 'processing'
      AND pg_current_xact_id() = $7::text::xid8
    RETURNING 1
)` + memory.LastHead + `count(*)` + memory.AsFound + `$8` + memory.RoleAsFound + `$9` + memory.LastEnd + ` FROM finished`

// finish commits the handler's work and the event's new state, and releases the next event of its
// ordering key.
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
	// A snapshot of the whole transaction may be older than an event that waits now: see release.
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

// sameSQL asks, in the transaction that a handler has left, whether it is still the one that was
// begun for the handler.
const sameSQL = `SELECT coalesce(pg_current_xact_id_if_assigned()::text, '') = $1::text`

// exchanged reports whether a handler that did not succeed has certainly ended its transaction. It
// sets wk.same if the handler certainly has not. If the transaction is aborted or the connection
// lost, it cannot tell, and committedItself has to ask.
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

// committedSQL asks, from another connection, whether an attempt's transaction is committed
// although its event is still being processed. Only the handler can have committed it then. It
// waits for the row lock first, which ends with the transaction: a COMMIT that was cut off may
// still be carried out.
const committedSQL = `
WITH mine AS MATERIALIZED (
    SELECT FROM inbox_events
    WHERE receiver = $1::text AND source = $2::text AND idempotency_key = $3::text AND claim = $4::bigint AND processing_state = 'processing'
    FOR UPDATE
)
SELECT coalesce(pg_xact_status($5::text::xid8) = 'committed', false) FROM mine`

// committedItself reports whether the handler has committed a transaction whose fate is in doubt.
// If the database does not answer, it reports false and the event is tried again: most such
// transactions are as they were begun.
func (s *runner) committedItself(ctx context.Context, wk *work) (committed bool) {
	if wk.same {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, s.CommitTimeout)
	defer cancel()
	err := s.pool.QueryRow(ctx, committedSQL, planEachTime, s.Receiver, s.Source, wk.key, wk.fence, wk.xid).Scan(&committed)
	return err == nil && committed
}

func (in *engine) queuePromote(batch *pgx.Batch, promote, orderingKey string, promoted *bool) {
	batch.Queue(promote, in.Receiver, in.Source, orderingKey, in.cfg.OnFailure == FailureBlocks).Exec(func(changed pgconn.CommandTag) error {
		*promoted = changed.RowsAffected() > 0
		return nil
	})
}

// release releases the next event of an ordering key, in a separate transaction. Only released
// events are claimed, and events are released only under the key's lock. So after GiveWay no
// work on an event of the key can begin, and Promote, with a later snapshot, sees everything
// that was claimed before.
func (in *engine) release(ctx context.Context, orderingKey string) (promoted bool, err error) {
	err = in.inTransaction(ctx, "release the next event of a key", "on", func(batch *pgx.Batch) {
		in.queueOrderLock(batch, orderingKey)
		batch.Queue(inboxsql.GiveWay, in.Receiver, in.Source, orderingKey)
		in.queuePromote(batch, inboxsql.Promote, orderingKey, &promoted)
	})
	return promoted, err
}

// inTransaction runs the statements that queue adds in one transaction, planned to walk indexes.
// purpose is the prefix of its error. synchronousCommit is "on" if the commit waits for the disk,
// or "off".
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

// settleSQL records an outcome other than success, in a separate transaction, because the handler's
// is rolled back. The fence keeps a late worker from changing an event that another has claimed.
const settleSQL = `
UPDATE inbox_events
SET processing_state = $5::text,
    attempts = attempts + $6::integer,
    interruptions = CASE WHEN $6::integer > 0 THEN 0 ELSE interruptions + $9::boolean::integer END,
    last_error = $7::text,
    next_attempt_at = CASE WHEN $5::text = 'pending' THEN now() + make_interval(secs => $8::float8) END,
    processed_at = CASE WHEN $5::text = 'failed' THEN clock_timestamp() END
WHERE receiver = $1::text AND source = $2::text AND idempotency_key = $3::text AND claim = $4::bigint AND processing_state = 'processing'`

// settle records that an attempt has ended without success. It reports false if the event no longer
// belongs to this worker: another has claimed it, or the commit that seemed to fail has succeeded.
func (s *runner) settle(ctx context.Context, wk *work, o settlement) (mine bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.CommitTimeout)
	defer cancel()
	tag, err := s.pool.Exec(ctx, settleSQL, planEachTime, s.Receiver, s.Source, wk.key, wk.fence, string(o.state), int32(o.attempts), o.text, o.after.Seconds(), o.interrupted)
	if err != nil {
		return false, fmt.Errorf("settle event: %w", err)
	}
	return tag.RowsAffected() > 0, nil
}

// giveBackSQL undoes a claim. next_attempt_at is unchanged since, so the event keeps its place.
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
