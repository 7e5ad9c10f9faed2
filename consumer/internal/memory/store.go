package memory

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer/internal/handlerctx"
	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
	"github.com/outbox-relay/outbox-relay/consumer/internal/sqlstate"
)

// Every SQL statement of this package stands here or in store_*.go, above the one function that
// runs it. The search_path is the receiver's: an operator or a function that pg_catalog does not
// have for exactly these types could be a stranger's. So types are cast to be the same, and
// polymorphic functions are qualified.

// admitSQL inserts the event, unless it is known or in flight: then it returns no row.
//
// The advisory lock finds out about requests in flight, not the unique index: an INSERT waits for a
// transaction that holds the key for as long as that one takes. Who inserts without the lock (Once,
// plain SQL) is met by lock_timeout, set for this INSERT alone: what was set before is put aside in
// our own setting, and put back by the RETURNING, which runs last. CASE, because it keeps that
// order. Without a row it is not put back, but then the transaction goes no further. ON CONSTRAINT,
// because an inferred index misses the one that REINDEX CONCURRENTLY is building.
//
// inbox_reset comes first: no setting of a handler before reaches this event.
//
// The row says succeeded at once, and 204, which is what most handlers answer: no other transaction
// sees the row before COMMIT, and a row that need not be written again costs half as much.
//
// The commit waits for the disk, also where the database is set not to: the sender, once answered,
// never sends the event again, and a crash would undo what it was answered.
//
// What is not known may have been forgotten: then the row is rolled back. So it is when it comes
// later than its sender said; an event more than a day old is checked by forgottenSQL.
const admitSQL = admitHead + `current_user::text`

// admitBehindSQL admits an event of a batch, in one transaction with others. It returns an empty
// role where one of them has left a temporary table.
const admitBehindSQL = admitHead + `CASE WHEN ` + nothingTemporary + ` THEN current_user::text ELSE '' END`

const admitHead = `
INSERT INTO processed_events
    (receiver, source, idempotency_key, payload_hash, event_type, event_version, related_reference, event_id, not_after,
     destination, processing_state, processed_at, response_status)
SELECT $1::text, $2::text, $3::text, $4::bytea, $6::text, $7::integer, $8::text, $9::bigint,
       coalesce($10::timestamptz, now() + make_interval(secs => $11::float8)), $12::text, 'succeeded', now(), 204
WHERE CASE WHEN inbox_reset() IS NULL THEN false
           WHEN NOT ($13::boolean OR pg_try_advisory_xact_lock(` + KeyLock + `)) THEN false
           WHEN set_config('outbox_relay.lock_timeout', current_setting('lock_timeout'), true) IS NULL THEN false
           WHEN current_setting('synchronous_commit') = 'off' AND set_config('synchronous_commit', 'on', true) IS NULL THEN false
           ELSE set_config('lock_timeout', '` + LockTimeout + `', true) IS NOT NULL END
ON CONFLICT ON CONSTRAINT processed_events_pkey DO NOTHING
RETURNING pg_current_xact_id()::text, tableoid::bigint,
          coalesce($14::timestamptz < now() - interval '24 hours', false),
          coalesce($15::timestamptz < now(), false),
          CASE WHEN set_config('lock_timeout', current_setting('outbox_relay.lock_timeout'), true) IS NOT NULL THEN ` + PathLimited + ` END,
          `

// LockTimeout bounds how long the INSERT waits for another transaction, in PostgreSQL's notation.
const LockTimeout = "100ms"

// KeyLock is the number of a key's lock. Receivers in two schemas have two locks for one key. The
// constant keeps it apart from other advisory locks made of hashes; it reads "outbox".
const KeyLock = `hashtextextended($1::text || E'\n' || $2::text || E'\n' || $3::text, 122550254464888 # 'processed_events'::regclass::oid::bigint)`

// StrangerHoldsSQL returns whether no session that holds the lock of a key could process the event.
// Any login of the database can take the lock; without the right to insert it must not keep the
// event away. Where roles.sql keeps receivers apart, another receiver's login is a stranger, too.
// Roles may have a prefix.
const StrangerHoldsSQL = `
SELECT NOT EXISTS (
    SELECT FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted AND a.datname = current_database()
      AND l.classid::bigint << 32 | l.objid::bigint = ` + KeyLock + `
      AND has_table_privilege(a.usesysid, 'processed_events', 'INSERT')
      AND (NOT (SELECT relrowsecurity FROM pg_class WHERE oid = 'processed_events'::regclass::oid)
           OR EXISTS (SELECT FROM pg_roles r WHERE (right(r.rolname::text, 14) = 'inbox_receiver' OR right(r.rolname::text, 15 + length($1::text)) = 'inbox_receiver_' || $1::text) AND pg_has_role(a.usesysid, r.oid, 'MEMBER'))))`

// forgottenSQL finds out whether an event that was not known may have been removed: whether rows
// from when it was created may be gone. It needs no lock, because a row is removed only after it
// was announced in there so long before that also the snapshot of admitSQL shows it; see
// inbox_prune. What is announced is a day old at least, by a constraint.
const forgottenSQL = `SELECT EXISTS (SELECT FROM inbox_forgotten WHERE receiver = $1::text AND source = $2::text AND received_before > $3::timestamptz)`

// inDatabase remembers in processed_events, in the transaction of the handler's own writes.
type inDatabase struct {
	Settings
	db Database

	admission                               string
	receiver, source, limit, senderNotAfter any // arguments that every admission has

	tables *sync.Map               // *memoryTable by oid
	name   *atomic.Pointer[string] // of the table that remembered the first event
}

// InDatabase returns the memory in the tables of db.
func InDatabase(s Settings, db Database) Memory {
	return &inDatabase{
		Settings: s, db: db, admission: admitSQL, receiver: s.Receiver, source: s.Source, limit: s.Limit(), senderNotAfter: orNull(s.SenderNotAfter.Seconds()),
		tables: &sync.Map{}, name: &atomic.Pointer[string]{},
	}
}

// orNull returns value for the database: NULL where it is zero.
func orNull[T comparable](value T) any {
	var zero T
	if value == zero {
		return nil
	}
	return value
}

// held holds an event by holding its transaction open.
type held struct {
	Transaction
	*inDatabase
	key   string
	xact  string // the transaction that inserted the event
	table *memoryTable
}

// Admit begins a transaction and finds out what to do with the request.
func (m *inDatabase) Admit(ctx context.Context, rq *Request) (Found, error) {
	return m.admit(ctx, rq, true)
}

// admit is Admit. Without lock the key's lock is not asked for.
func (m *inDatabase) admit(ctx context.Context, rq *Request, lock bool) (Found, error) {
	e := &rq.Event
	h := &held{inDatabase: m, key: e.IdempotencyKey}
	var first, aged, late bool
	var table int64
	var found Surroundings
	scan := func(row pgx.Row) error {
		err := row.Scan(&h.xact, &table, &aged, &late, &found.SearchPath, &found.Role)
		first = err == nil
		if errors.Is(err, sql.ErrNoRows) {
			return nil
		}
		return err
	}
	created := Shifted(e.CreatedAt, -m.Tolerance) // here and below: the clocks may differ by that much
	tx, err := m.db.Begin(ctx, scan, m.admission, []any{
		m.receiver, m.source, e.IdempotencyKey, rq.Hash[:], m.limit, e.Type, int32(e.Version), orNull(e.RelatedReference), orNull(e.ID),
		Shifted(e.NotAfter, 0), m.senderNotAfter, orNull(e.Destination), !lock, created, Shifted(e.NotAfter, m.Tolerance),
	})
	if err == nil && aged && !late {
		err = tx.QueryRow(ctx, forgottenSQL, []any{m.Receiver, m.Source, created}).Scan(&late)
	}
	if err == nil && first && !late {
		if h.table, err = m.memoryTable(ctx, tx, table); err == nil {
			found.Table = h.table.name
			tx.Enter(found)
			h.Transaction = tx
			return Found{Held: h}, nil
		}
	}
	if tx != nil {
		defer tx.Rollback()
	}
	if err == nil && first {
		return Found{Admission: Forgotten}, nil
	}
	var known Found
	var strangers bool
	if err == nil {
		known, err = m.recall(ctx, tx, rq)
	}
	if err == nil && known.Admission == Busy && lock {
		err = tx.QueryRow(ctx, StrangerHoldsSQL, []any{m.Receiver, m.Source, e.IdempotencyKey}).Scan(&strangers)
	}
	switch {
	case err == nil && strangers:
		tx.Rollback()
		return m.admit(ctx, rq, false)
	case err == nil:
		return known, nil
	case sqlstate.Of(err) == sqlstate.LockNotAvailable:
		return Found{Admission: Locked}, nil
	case tx != nil && !sqlstate.IsConflict(err):
		tx.Enter(Surroundings{}) // as no connection is: it is closed. What is wrong may be the connection, such as one to a former primary
	}
	return Found{}, fmt.Errorf("begin transaction for event: %w", Hinted(err))
}

// memoryTable holds the statements on a table processed_events in a transaction that a handler has
// had, with the name of its schema: a handler may have changed search_path, as multi-tenant code
// does, and another schema may have such a table, too.
type memoryTable struct{ name, end, answer, ended string }

// memoryTable returns the table by its oid. It asks once for each, mostly once.
func (m *inDatabase) memoryTable(ctx context.Context, tx Transaction, oid int64) (*memoryTable, error) {
	if known, ok := m.tables.Load(oid); ok {
		return known.(*memoryTable), nil
	}
	name, err := TableName(ctx, tx, oid)
	if err != nil {
		return nil, err
	}
	// In the table of another schema a duplicate would be unknown.
	if m.name.CompareAndSwap(nil, &name); *m.name.Load() != name {
		return nil, fmt.Errorf("this connection remembers events in %s, and another did in %s: code outside of handlers has set search_path on a "+
			"connection of the pool; let it put search_path back, or give the receiver its own pool", name, *m.name.Load())
	}
	table := &memoryTable{
		name:   name,
		end:    strings.ReplaceAll(endSQL, "processed_events", name),
		answer: strings.ReplaceAll(answerSQL, "processed_events", name),
		ended:  strings.ReplaceAll(endedSQL, "processed_events", name),
	}
	m.tables.Store(oid, table)
	return table, nil
}

// selectTableName finds no temporary table: what is remembered there ends with the connection.
const selectTableName = `
SELECT pg_catalog.format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = $1::bigint::oid AND c.relpersistence <> 't'`

// TableName returns the name of a table, with its schema. It fails for a temporary one.
func TableName(ctx context.Context, tx Transaction, oid int64) (name string, err error) {
	err = tx.QueryRow(ctx, selectTableName, []any{oid}).Scan(&name)
	if errors.Is(err, sql.ErrNoRows) {
		err = errTemporary
	}
	return name, err
}

// Shifted returns t, moved by a duration, for the database: NULL where the sender does not say
// when.
func Shifted(t time.Time, by time.Duration) any {
	if t.IsZero() {
		return nil
	}
	return t.Add(by)
}

// recallSQL reads what is kept of an event that was not admitted. It is a separate statement, with
// its own snapshot: the row may have been committed after the one of admitSQL was taken.
const recallSQL = `
SELECT coalesce(payload_hash <> $4::bytea, false), coalesce(response_status, 200), coalesce($5::timestamptz > coalesce(not_after, '-infinity'), false),
       coalesce(destination, '')
FROM processed_events
WHERE receiver = $1::text AND source = $2::text AND idempotency_key = $3::text`

// recall says why an event was not admitted. What is committed comes first, so that another body
// under a known key is refused even while another session holds the lock; and what is known from
// another destination comes before its body, which may differ from one destination to the next. An
// event without a status is known from [Once]: done, but never answered. One whose handler
// committed by itself has the status of endedSQL.
func (m *inDatabase) recall(ctx context.Context, tx Transaction, rq *Request) (found Found, err error) {
	var otherBody, comesLater bool
	var destination string
	notAfter := Shifted(rq.Event.NotAfter, 0)
	err = tx.QueryRow(ctx, recallSQL, []any{m.Receiver, m.Source, rq.Event.IdempotencyKey, rq.Hash[:], notAfter}).
		Scan(&otherBody, &found.Status, &comesLater, &destination)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		found.Admission, err = Busy, nil
	case err != nil:
	case m.Elsewhere(&rq.Event, destination):
		found.Admission = Diverted
	case otherBody:
		found.Admission = Reused
	default:
		found.Admission = Duplicate
		if comesLater {
			err = tx.Commit(ctx, ExtendSQL, []any{m.Receiver, m.Source, rq.Event.IdempotencyKey, notAfter})
		}
	}
	return found, err
}

// ExtendSQL notes that the sender may send a known event for longer than it said before, as after a
// replay: it must not be forgotten until then.
const ExtendSQL = `
UPDATE processed_events SET not_after = $4::timestamptz
WHERE receiver = $1::text AND source = $2::text AND idempotency_key = $3::text AND coalesce(not_after, '-infinity') < $4::timestamptz`

// endSQL changes nothing. It divides by zero unless this is the transaction that inserted the
// event, and the event's row is still there; the error keeps the COMMIT behind it from being
// carried out. Whatever a handler did to end or exchange that transaction (ROLLBACK AND CHAIN,
// COMMIT and BEGIN) shows here. The trigger that keeps the row does not see all: not what runs with
// triggers off (session_replication_role), nor a row that a savepoint has written again.
const endSQL = LastHead + `(` + inserted + ` = 1 AND EXISTS (
    SELECT FROM processed_events WHERE receiver = $2::text AND source = $3::text AND idempotency_key = $4::text))::integer` +
	AsFound + `$5` + RoleAsFound + `$6` + LastEnd

// inserted divides by zero in any transaction but the one that inserted the event, before any row
// is read.
const inserted = `1 / (coalesce(pg_current_xact_id_if_assigned()::text, '') = $1::text)::integer`

// answerSQL stores the status beside the event, where it is not the one that admitSQL has put
// there. It divides by zero where endSQL does. An event that is of no concern to the receiver is
// ignored by it, for a reason, and commits all the same.
const answerSQL = `
WITH answered AS (
    UPDATE processed_events
    SET processed_at = clock_timestamp(),
        response_status = $5::smallint,
        processing_state = $6::text,
        last_error = nullif($7::text, '')
    WHERE receiver = $2::text AND source = $3::text AND idempotency_key = $4::text AND ` + inserted + ` = 1
    RETURNING 1
)` + LastHead + `count(*)` + AsFound + `$8` + RoleAsFound + `$9` + LastEnd + ` FROM answered`

// Lend gives the handler its transaction.
func (h *held) Lend(ctx context.Context, event headers.Event) (context.Context, context.CancelFunc) {
	scope := &handlerctx.Scope{Event: event}
	h.Attach(scope)
	return handlerctx.With(ctx, scope), func() {}
}

// Remember stores the status for duplicates and commits. After an error the effect is rolled back
// or its fate is unknown, and so is the row's, because both are one transaction: the next request
// finds out.
func (h *held) Remember(ctx context.Context, status int, ignored string) error {
	query, args := h.answer(status, ignored)
	err := h.Commit(ctx, query, args)
	if isHandlers(err) {
		err = h.ended(err)
	}
	return committed(err)
}

// ended returns the error of a commit that was not carried out, with what else is known then.
func (h *held) ended(err error) error {
	if noted := h.noteEnded(); noted != nil && !errors.Is(err, noted) {
		return fmt.Errorf("%w: %w", noted, err)
	}
	return err
}

// answer returns the last statement of an event, which stores the status where that is not there
// yet, without the arguments of the surroundings.
func (h *held) answer(status int, ignored string) (query string, args []any) {
	args = []any{h.xact, h.Receiver, h.Source, h.key}
	if status == http.StatusNoContent && ignored == "" {
		return h.table.end, args
	}
	state := "succeeded"
	if ignored != "" {
		state = "ignored"
	}
	return h.table.answer, append(args, int16(status), state, ignored)
}

// Rollback gives the event up. It reports false when the handler has committed the transaction
// itself, and the row then says so.
func (h *held) Rollback() bool {
	h.Transaction.Rollback()
	return !errors.Is(h.noteEnded(), ErrEnded)
}

// endedSQL marks an event as failed whose handler has committed the transaction itself: it is
// unknown what the commit left out. Duplicates are refused for good. If the transaction was not
// committed, there is no row to mark.
const endedSQL = `
UPDATE processed_events
SET processing_state = 'failed', processed_at = clock_timestamp(), response_status = 422, last_error = $5::text
WHERE receiver = $2::text AND source = $3::text AND idempotency_key = $4::text AND processing_state = 'succeeded'
  AND (SELECT pg_xact_status($1::text::xid8)) = 'committed'`

// noteEnded returns ErrEnded, and the row says so, if the handler has committed the transaction
// itself.
func (h *held) noteEnded() error {
	ctx, cancel := context.WithTimeout(context.Background(), h.CommitTimeout)
	defer cancel()
	rows, err := h.db.Exec(ctx, h.table.ended, h.xact, h.Receiver, h.Source, h.key, ErrEnded.Error())
	switch {
	case err != nil:
		return fmt.Errorf("find out whether the handler has committed: %w", err)
	case rows > 0:
		return ErrEnded
	}
	return nil
}

func committed(err error) error {
	switch {
	case err == nil:
		return nil
	case sqlstate.Of(err) == sqlstate.InFailedTransaction:
		err = ErrAborted
	}
	return fmt.Errorf("commit: %w", err)
}

// onceSQL records an event of another transport, without a response that is waited for.
const onceSQL = `
INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, processed_at)
VALUES ($1::text, $2::text, $3::text, 'succeeded', clock_timestamp())
ON CONFLICT ON CONSTRAINT processed_events_pkey DO NOTHING`

// An Exec runs a statement and returns how many rows it has changed.
type Exec func(ctx context.Context, query string, args ...any) (int64, error)

// Once is consumer.Once.
func Once(ctx context.Context, receiver, source, key string, exec Exec) (bool, error) {
	if !headers.Printable(receiver) || !headers.Printable(source) || !headers.Printable(key) {
		return false, fmt.Errorf("consumer: receiver %q, source %q and key %q must be 1 to %d printable ASCII characters", receiver, source, key, headers.MaxTextBytes)
	}
	if e := handlerctx.From(ctx).Event; e.IdempotencyKey == key && e.Source == source && e.Receiver == receiver {
		return false, errRecorded // false without an error would skip the effect, and the event would count as processed
	}
	rows, err := exec(ctx, onceSQL, receiver, source, key)
	if err != nil {
		return false, fmt.Errorf("record event: %w", err)
	}
	return rows == 1, nil
}
