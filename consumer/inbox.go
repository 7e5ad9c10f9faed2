package consumer

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// Every SQL statement of this package stands here or in inbox_*.go, above the one function that runs it.

// admission is what the inbox knows about an event when its request arrives.
type admission string

const (
	admitted  admission = "admitted"   // first time: its row is inserted, the handler may run
	duplicate admission = "duplicate"  // processed earlier
	reused    admission = "key_reused" // processed earlier, with another body
	busy      admission = "in_flight"  // another transaction is processing it
	forgotten admission = "forgotten"  // unknown, but so old that it may have been processed and forgotten
	diverted  admission = "diverted"   // known from another destination of the sender
)

// admitSQL inserts the event, unless it is known or in flight: then it returns no row.
//
// The advisory lock finds out about requests in flight, not the unique index: an INSERT waits for a transaction that holds
// the key for as long as that one takes. Who inserts without the lock (Once, plain SQL) is met by lock_timeout, set for
// this INSERT alone: what was set before is put aside in a setting of our own, and put back by the RETURNING, which runs
// last. CASE, because it keeps that order. Without a row it is not put back, but then the transaction goes no further.
// ON CONSTRAINT, because an inferred index misses the one that REINDEX CONCURRENTLY is building.
//
// The row says succeeded at once, and 204, which is what most handlers answer: no other transaction sees the row before
// COMMIT, and a row that need not be written again costs half as much.
//
// A handler that hangs must not hold the event for ever, whether it leaves its transaction idle or waits for a statement without
// its own context: the server ends the session, or the statement. A shorter limit that is set already stays.
//
// The commit waits for the disk, also where the database is told not to: the sender, once answered, never sends the event
// again, and a crash would undo what it was answered.
//
// What is not known may have been forgotten: then the row is rolled back. So it is when it comes later than its sender said;
// an event more than a day old is looked up by forgottenSQL.
const admitSQL = `
INSERT INTO processed_events
    (receiver, source, idempotency_key, payload_hash, event_type, event_version, related_reference, event_id, not_after,
     destination, processing_state, processed_at, response_status)
SELECT $1::text, $2::text, $3::text, $4::bytea, $5::text, $6::integer, nullif($7::text, ''), nullif($8::bigint, 0),
       coalesce($9::timestamptz, now() + make_interval(secs => nullif($10::float8, 0))), nullif($11::text, ''), 'succeeded', now(), 204
WHERE CASE WHEN NOT ($12::boolean OR pg_try_advisory_xact_lock(` + keyLock + `)) THEN false
           WHEN set_config('outbox_relay.lock_timeout', current_setting('lock_timeout'), true) IS NULL THEN false
           WHEN current_setting('synchronous_commit') = 'off' AND set_config('synchronous_commit', 'on', true) IS NULL THEN false
           ELSE set_config('lock_timeout', '100ms', true) IS NOT NULL END
ON CONFLICT ON CONSTRAINT processed_events_pkey DO NOTHING
RETURNING pg_current_xact_id()::text,
          coalesce($13::timestamptz < now() - interval '24 hours', false),
          coalesce($14::timestamptz < now(), false),
          set_config('lock_timeout', current_setting('outbox_relay.lock_timeout'), true),
          tableoid::bigint, current_setting('search_path'), current_user::text,
          CASE WHEN current_setting('idle_in_transaction_session_timeout') = '0'
                 OR current_setting('idle_in_transaction_session_timeout')::interval > make_interval(secs => $15::float8)
               THEN set_config('idle_in_transaction_session_timeout', least(ceil($15::float8 * 1000), 2147483647)::integer::text, true) END,
          CASE WHEN current_setting('statement_timeout') = '0'
                 OR current_setting('statement_timeout')::interval > make_interval(secs => $15::float8)
               THEN set_config('statement_timeout', least(ceil($15::float8 * 1000), 2147483647)::integer::text, true) END`

// keyLock is the number of a key's lock. Receivers in two schemas have two locks for one key. The constant keeps it apart from
// other advisory locks made of hashes; it reads "outbox".
const keyLock = `hashtextextended($1::text || E'\n' || $2::text || E'\n' || $3::text, 122550254464888 # 'processed_events'::regclass::oid::bigint)`

// strangerHoldsSQL returns whether no session that holds the lock of a key could process the event. Any login of the database
// can take the lock; without the right to insert it must not keep the event away.
const strangerHoldsSQL = `
SELECT NOT EXISTS (
    SELECT FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted AND a.datname = current_database()
      AND l.classid::bigint << 32 | l.objid::bigint = ` + keyLock + `
      AND has_table_privilege(a.usesysid, 'processed_events', 'INSERT'))`

// forgottenSQL finds out whether an event that was not known may have been removed: whether rows from when it was created may
// be gone. It needs no lock, because whoever removes a row has announced it in there so long before that also the snapshot of
// admitSQL shows it; see inbox_prune. What is announced is a day old at least, by a constraint.
const forgottenSQL = `SELECT EXISTS (SELECT FROM inbox_forgotten WHERE receiver = $1::text AND source = $2::text AND received_before > $3::timestamptz)`

// admit begins a transaction and finds out what to do with the request. It returns the transaction for the caller to end
// when the request is admitted, and the status of the first answer when it is a duplicate. Without lock the key's lock is not
// asked for.
func (s *settings) admit(ctx context.Context, db database, rq *request, lock bool) (transaction, admission, int, error) {
	var first, aged, late bool
	var table int64
	var found surroundings
	scan := func(row pgx.Row) error {
		var timeout, idle, statement *string
		err := row.Scan(&rq.xact, &aged, &late, &timeout, &table, &found.searchPath, &found.role, &idle, &statement)
		first = err == nil
		if errors.Is(err, sql.ErrNoRows) {
			return nil
		}
		return err
	}
	e := &rq.event
	created := shifted(e.CreatedAt, -s.Tolerance) // here and below: the clocks may differ by that much
	tx, err := db.begin(ctx, scan, admitSQL, []any{
		s.Receiver, s.Source, e.Key, rq.hash[:], e.Type, int32(e.Version), e.RelatedReference, e.ID,
		shifted(e.NotAfter, 0), s.SenderHorizon.Seconds(), e.destination(), !lock, created, shifted(e.NotAfter, s.Tolerance),
		(s.HandlerTimeout + s.CommitTimeout).Seconds(),
	})
	if err == nil && aged && !late {
		err = tx.queryRow(ctx, forgottenSQL, []any{s.Receiver, s.Source, created}).Scan(&late)
	}
	if err == nil && first && !late {
		if rq.memory, err = s.memoryTable(ctx, tx, table); err == nil {
			tx.enter(found)
			return tx, admitted, 0, nil
		}
	}
	if tx != nil {
		defer tx.rollback()
	}
	if err == nil && first {
		return nil, forgotten, 0, nil
	}
	var known admission
	var status int
	var strangers bool
	if err == nil {
		known, status, err = s.recall(ctx, tx, rq)
	}
	if err == nil && known == busy && lock {
		err = tx.queryRow(ctx, strangerHoldsSQL, []any{s.Receiver, s.Source, e.Key}).Scan(&strangers)
	}
	switch {
	case err == nil && strangers:
		tx.rollback()
		return s.admit(ctx, db, rq, false)
	case err == nil:
		return nil, known, status, nil
	case sqlState(err) == stateLockNotAvailable:
		return nil, busy, 0, nil
	case tx != nil && !isConflict(err):
		tx.enter(surroundings{}) // as no connection is: it is closed. What is wrong may be the connection, such as one to a former primary
	}
	return nil, "", 0, fmt.Errorf("begin transaction for event: %w", hinted(err))
}

// memoryTable is a table processed_events, and the statements on it in a transaction that a handler has had, with the name of its
// schema: a handler may have changed search_path, as multi-tenant code does, and another schema may have such a table, too.
type memoryTable struct{ end, answer string }

// memoryTable returns the table by its oid. It asks once for each, mostly once.
func (s *settings) memoryTable(ctx context.Context, tx transaction, oid int64) (*memoryTable, error) {
	if known, ok := s.tables.Load(oid); ok {
		return known.(*memoryTable), nil
	}
	name, err := tableName(ctx, tx, oid)
	if err != nil {
		return nil, err
	}
	table := &memoryTable{
		end:    strings.ReplaceAll(endSQL, "processed_events", name),
		answer: strings.ReplaceAll(answerSQL, "processed_events", name),
	}
	s.tables.Store(oid, table)
	return table, nil
}

// selectTableName finds no temporary table: a handler has left it on the connection, and what is remembered there goes with it.
const selectTableName = `
SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = $1::bigint::oid AND c.relpersistence <> 't'`

func tableName(ctx context.Context, tx transaction, oid int64) (name string, err error) {
	err = tx.queryRow(ctx, selectTableName, []any{oid}).Scan(&name)
	if errors.Is(err, sql.ErrNoRows) {
		err = errTemporary
	}
	return name, err
}

// shifted is t for the database, where a time that the sender does not tell is NULL.
func shifted(t time.Time, by time.Duration) any {
	if t.IsZero() {
		return nil
	}
	return t.Add(by)
}

// recallSQL reads what is kept of an event that was not admitted. It is a statement of its own, with a snapshot of its
// own: the row may have been committed after the one of admitSQL was taken.
const recallSQL = `
SELECT coalesce(payload_hash <> $4::bytea, false), coalesce(response_status, 200), coalesce($5::timestamptz > coalesce(not_after, '-infinity'), false),
       coalesce(destination <> nullif($6::text, ''), false)
FROM processed_events
WHERE receiver = $1::text AND source = $2::text AND idempotency_key = $3::text`

// recall tells why an event was not admitted. What is committed comes first, so that another body under a known key is
// refused even while another session holds the lock; and what is known from another destination comes before its body, which
// may differ from one destination to the next. An event without a status is known from [Once]: done, but never answered.
// One whose handler committed by itself has the status of admitSQL.
func (s *settings) recall(ctx context.Context, tx transaction, rq *request) (found admission, status int, err error) {
	var otherBody, comesLater, elsewhere bool
	notAfter := shifted(rq.event.NotAfter, 0)
	err = tx.queryRow(ctx, recallSQL, []any{s.Receiver, s.Source, rq.event.Key, rq.hash[:], notAfter, rq.event.destination()}).
		Scan(&otherBody, &status, &comesLater, &elsewhere)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return busy, 0, nil
	case err != nil:
		return "", 0, err
	case elsewhere:
		return diverted, 0, nil
	case otherBody:
		return reused, 0, nil
	case comesLater:
		err = tx.commit(ctx, extendSQL, []any{s.Receiver, s.Source, rq.event.Key, notAfter})
	}
	return duplicate, status, err
}

// extendSQL notes that the sender may send a known event for longer than it said before, as after a replay: it must not be
// forgotten until then.
const extendSQL = `
UPDATE processed_events SET not_after = $4::timestamptz
WHERE receiver = $1::text AND source = $2::text AND idempotency_key = $3::text AND coalesce(not_after, '-infinity') < $4::timestamptz`

// endSQL changes nothing. It divides by zero unless this is the transaction that inserted the event, and the event's row is still
// there; the error keeps the COMMIT behind it from being carried out. Whatever a handler did to end or exchange that transaction
// (ROLLBACK AND CHAIN, COMMIT and BEGIN) shows here. The trigger that keeps the row does not see all: not what runs with triggers off
// (session_replication_role), nor a row that a savepoint has written anew.
const endSQL = `
SELECT 1 / count(*), ` + pathAsFound + `$5` + roleAsFound + `$6` + nothingHeld + `
FROM processed_events
WHERE receiver = $2::text AND source = $3::text AND idempotency_key = $4::text AND ` + inserted + ` = 1`

// inserted divides by zero in any transaction but the one that inserted the event, before any row is looked for.
const inserted = `1 / (coalesce(pg_current_xact_id_if_assigned()::text, '') = $1::text)::integer`

// answerSQL stores the status beside the event, where it is not the one that admitSQL has put there. It divides by zero where
// endSQL does. An event that is of no concern to the receiver is ignored by it, for a reason, and commits all the same.
const answerSQL = `
WITH answered AS (
    UPDATE processed_events
    SET processed_at = clock_timestamp(),
        response_status = $5::smallint,
        processing_state = $6::text,
        last_error = nullif($7::text, '')
    WHERE receiver = $2::text AND source = $3::text AND idempotency_key = $4::text AND ` + inserted + ` = 1
    RETURNING 1
)
SELECT 1 / count(*), ` + pathAsFound + `$8` + roleAsFound + `$9` + nothingHeld + ` FROM answered`

// remember stores the status for duplicates and commits. After an error the effect is rolled back or its fate is
// unknown, and so is the row's, because both are one transaction: the next request finds out.
func (s *settings) remember(ctx context.Context, tx transaction, rq *request, a *answer) error {
	if a.status == http.StatusNoContent && a.ignored == "" {
		return committed(tx.commit(ctx, rq.memory.end, []any{rq.xact, s.Receiver, s.Source, rq.event.Key}))
	}
	state := StateSucceeded
	if a.ignored != "" {
		state = StateIgnored
	}
	return committed(tx.commit(ctx, rq.memory.answer, []any{rq.xact, s.Receiver, s.Source, rq.event.Key, int16(a.status), string(state), a.ignored}))
}

func committed(err error) error {
	switch {
	case err == nil:
		return nil
	case sqlState(err) == stateInFailedTransaction:
		err = errAborted
	}
	return fmt.Errorf("commit: %w", err)
}

// onceSQL records an event of another transport, whose response nobody waits for.
const onceSQL = `
INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, processed_at)
VALUES ($1::text, $2::text, $3::text, 'succeeded', clock_timestamp())
ON CONFLICT ON CONSTRAINT processed_events_pkey DO NOTHING`

func once(ctx context.Context, receiver, source, key string, exec func(ctx context.Context, query string, args ...any) (int64, error)) (bool, error) {
	if !printable(receiver) || !printable(source) || !printable(key) {
		return false, fmt.Errorf("consumer: receiver %q, source %q and key %q must be 1 to %d printable ASCII characters", receiver, source, key, maxTextBytes)
	}
	if e := scopeOf(ctx).event; e.Key == key && e.Source == source && e.Receiver == receiver {
		return false, errRecorded // false without an error would skip the effect, and the event would count as processed
	}
	rows, err := exec(ctx, onceSQL, receiver, source, key)
	if err != nil {
		return false, fmt.Errorf("record event: %w", err)
	}
	return rows == 1, nil
}

// Once records an event of any transport inside the caller's transaction and reports whether it is the first time: apply
// the event's effect in tx if it is, and skip it if not. Receiver, source and key are what [Middleware] uses, so that an event
// which arrives by both ways counts once; each is 1 to 255 printable ASCII characters.
//
// While another transaction holds the key, Once waits until that one ends, bounded by ctx and lock_timeout, because a
// bool cannot say "perhaps". Above READ COMMITTED it may return a serialization failure (SQLSTATE 40001) instead: run the
// transaction again. After any error tx is of no more use. A handler that gets
// an event from this package must not call it for that event, which is recorded already: it fails there.
func Once(ctx context.Context, tx pgx.Tx, receiver, source, key string) (first bool, err error) {
	return once(ctx, receiver, source, key, func(ctx context.Context, query string, args ...any) (int64, error) {
		tag, err := tx.Exec(ctx, query, args...)
		return tag.RowsAffected(), err
	})
}

// OnceSQL is [Once] for database/sql.
func OnceSQL(ctx context.Context, tx *sql.Tx, receiver, source, key string) (first bool, err error) {
	return once(ctx, receiver, source, key, func(ctx context.Context, query string, args ...any) (int64, error) {
		result, err := tx.ExecContext(ctx, query, args...)
		if err != nil {
			return 0, err
		}
		return result.RowsAffected()
	})
}
