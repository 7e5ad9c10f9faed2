package migrations

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

// A LockedError says that a migration did not get a lock in time, and which sessions hold it.
type LockedError struct {
	File    string        // the base name of the migration's file
	Holders []Session     // that the last attempt waited for; empty if no second connection could be made
	Tries   int           // attempts made
	Waited  time.Duration // since the first attempt began; 0: the migration still waits
	Err     error         // of the last attempt; nil: the migration still waits
}

// Error names the sessions to end.
func (e *LockedError) Error() string {
	if e.Err == nil {
		return e.Waiting()
	}
	attempts := "attempts"
	if e.Tries == 1 {
		attempts = "attempt"
	}
	return fmt.Sprintf("%s did not get its locks in %d %s within %s: %s had them: %v",
		e.File, e.Tries, attempts, e.Waited.Round(time.Millisecond), describe(e.Holders), e.Err)
}

// Waiting says what the migration waits for, in the same words at each attempt.
func (e *LockedError) Waiting() string {
	return fmt.Sprintf("%s waits for %s", e.File, describe(e.Holders))
}

func describe(sessions []Session) string {
	if len(sessions) == 0 {
		return "a session that is unknown"
	}
	texts := make([]string, len(sessions))
	for i, session := range sessions {
		texts[i] = session.String()
	}
	return strings.Join(texts, ", ")
}

// Unwrap returns the database's error of the last attempt.
func (e *LockedError) Unwrap() error { return e.Err }

// A Session holds a lock that a migration waits for.
type Session struct {
	PID         int       // 0: a prepared transaction, which no session holds
	Application string    // its application_name
	User        string    // empty: a process of the server, such as autovacuum
	Kind        string    // its backend_type; empty: not visible to the migration's role
	Since       time.Time // when its transaction began; zero: not visible to the migration's role
}

// String returns what an operator needs to find the session.
func (s Session) String() string {
	if s.PID == 0 {
		return "a prepared transaction (see pg_prepared_xacts)"
	}
	text := "session " + strconv.Itoa(s.PID) + " ("
	if s.User == "" {
		text += s.Kind
	} else {
		text += fmt.Sprintf("application %q, user %s", s.Application, s.User)
	}
	if !s.Since.IsZero() {
		text += ", in a transaction since " + s.Since.UTC().Format(time.RFC3339)
	}
	return text + ")"
}

// A session is goose's connection while it runs one file.
type session struct {
	versionTable string
	lockID       int64
	patience     time.Duration // how long another migrator may have the advisory lock
	lockTimeout  time.Duration // for the next file
	before       string        // the connection's own lock_timeout
	pid          atomic.Int32  // of the connection; 0: it does not run a file
}

// lockPoll is how long a migrator waits before it asks again for the advisory lock of its set.
const lockPoll = time.Second

// SessionLock takes the advisory lock of the set and sets lock_timeout. It asks again and again
// instead of waiting in the server: a statement that waits holds a snapshot, and the index that the
// other migrator builds concurrently would wait for that.
func (s *session) SessionLock(ctx context.Context, conn *sql.Conn) error {
	for start := time.Now(); ; {
		locked, err := s.tryLock(ctx, conn)
		if err == nil && locked {
			err = s.checkVersionTable(ctx, conn)
			if err != nil {
				err = errors.Join(err, s.SessionUnlock(ctx, conn))
			}
		}
		if err != nil || locked {
			return err
		}
		if time.Since(start) >= s.patience {
			return fmt.Errorf("another session has had the advisory lock of the migrations for more than %s: %s", s.patience, s.migrating(ctx, conn))
		}
		if err := sleep.For(ctx, lockPoll); err != nil {
			return err
		}
	}
}

const lockSession = `
SELECT pg_backend_pid(), current_setting('lock_timeout'),
    CASE WHEN pg_try_advisory_lock($1::bigint) THEN set_config('lock_timeout', $2::text, false) END`

func (s *session) tryLock(ctx context.Context, conn *sql.Conn) (locked bool, err error) {
	var (
		pid    int32
		before string
		set    sql.NullString
	)
	// Rounded up, because 0 would mean to wait without end.
	timeout := strconv.FormatInt((s.lockTimeout + time.Millisecond - 1).Milliseconds(), 10)
	if err := conn.QueryRowContext(ctx, lockSession, s.lockID, timeout).Scan(&pid, &before, &set); err != nil {
		return false, fmt.Errorf("take the advisory lock of the migrations: %w", err)
	}
	if set.Valid {
		s.before = before
		s.pid.Store(pid)
	}
	return set.Valid, nil
}

const unlockSession = `SELECT set_config('lock_timeout', $2::text, false), pg_advisory_unlock($1::bigint)`

// SessionUnlock undoes SessionLock.
func (s *session) SessionUnlock(ctx context.Context, conn *sql.Conn) error {
	s.pid.Store(0)
	if _, err := conn.ExecContext(ctx, unlockSession, s.lockID, s.before); err != nil {
		return fmt.Errorf("release the advisory lock of the migrations: %w", err)
	}
	return nil
}

// ErrForeignVersionTable means that the table of versions belongs to a login that migrations must
// not trust: its triggers and rules would run with the rights of who migrates.
var ErrForeignVersionTable = errors.New("its owner could run code with the rights of who migrates")

// What goose would find by the name of its table. Trusted are who reads it, the roles whose rights
// that one has, superusers, the owner of the database, and who may create in the schema for another
// reason than that everybody may. A superuser has the rights of all, which says nothing.
const selectForeignVersionTable = `
SELECT c.oid::pg_catalog.regclass::pg_catalog.text, pg_catalog.quote_ident(o.rolname)
FROM pg_catalog.pg_class c
    JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
    JOIN pg_catalog.pg_roles o ON o.oid OPERATOR(pg_catalog.=) c.relowner
    JOIN pg_catalog.pg_roles me ON me.rolname OPERATOR(pg_catalog.=) CURRENT_USER
    JOIN pg_catalog.pg_database d ON d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
WHERE c.oid OPERATOR(pg_catalog.=) pg_catalog.to_regclass($1::pg_catalog.text)::pg_catalog.oid
    AND NOT o.rolsuper AND o.oid OPERATOR(pg_catalog.<>) me.oid
    AND o.oid OPERATOR(pg_catalog.<>) n.nspowner AND o.oid OPERATOR(pg_catalog.<>) d.datdba
    AND NOT EXISTS (SELECT FROM pg_catalog.aclexplode(n.nspacl) a
        WHERE a.privilege_type OPERATOR(pg_catalog.=) 'CREATE'::pg_catalog.text AND a.grantee OPERATOR(pg_catalog.<>) 0::pg_catalog.oid
            AND pg_catalog.pg_has_role(o.oid, a.grantee, 'USAGE'::pg_catalog.text))
    AND (me.rolsuper OR NOT pg_catalog.pg_has_role(me.oid, o.oid, 'USAGE'::pg_catalog.text))`

// "$user" of the search_path leads to a schema that is named as the login, whoever made it.
const selectForeignSchema = `
SELECT pg_catalog.quote_ident(n.nspname), pg_catalog.quote_ident(o.rolname)
FROM pg_catalog.pg_namespace n
    JOIN pg_catalog.pg_roles o ON o.oid OPERATOR(pg_catalog.=) n.nspowner
    JOIN pg_catalog.pg_roles me ON me.rolname OPERATOR(pg_catalog.=) CURRENT_USER
    JOIN pg_catalog.pg_database d ON d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
WHERE n.nspname OPERATOR(pg_catalog.=) pg_catalog.current_schema() AND n.nspname OPERATOR(pg_catalog.=) CURRENT_USER
    AND NOT o.rolsuper AND o.oid OPERATOR(pg_catalog.<>) me.oid AND o.oid OPERATOR(pg_catalog.<>) d.datdba
    AND (me.rolsuper OR NOT pg_catalog.pg_has_role(me.oid, o.oid, 'USAGE'::pg_catalog.text))`

// checkVersionTable refuses a table of versions that another login has made before the first
// migration, and a schema that it has made for this purpose.
func (s *session) checkVersionTable(ctx context.Context, db interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
},
) error {
	var schema, table, owner string
	switch err := db.QueryRowContext(ctx, selectForeignSchema).Scan(&schema, &owner); {
	case err == nil:
		return fmt.Errorf("schema %s, which is named as this login, belongs to %s: %w; name the schema to migrate (--schema, or search_path of the connection), or drop that one",
			schema, owner, ErrForeignVersionTable)
	case !errors.Is(err, sql.ErrNoRows):
		return fmt.Errorf("find the schema to migrate: %w", err)
	}
	switch err := db.QueryRowContext(ctx, selectForeignVersionTable, s.versionTable).Scan(&table, &owner); {
	case errors.Is(err, sql.ErrNoRows):
		return nil
	case err != nil:
		return fmt.Errorf("find the table of versions: %w", err)
	}
	return fmt.Errorf("table %s belongs to %s: %w; if another login made it, drop it; if %[2]s migrates here, let it create in the schema: GRANT CREATE ON SCHEMA … TO %[2]s",
		table, owner, ErrForeignVersionTable)
}

const selectMigrating = `
SELECT a.pid, a.application_name, coalesce(a.usename, ''), coalesce(a.backend_type, ''), a.xact_start
FROM pg_locks l JOIN pg_database d ON d.oid = l.database AND d.datname = current_database() JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted AND (l.classid::bigint << 32) | l.objid::bigint = $1::bigint`

// migrating describes the session that has the advisory lock, and how to end it: any login may hold
// the lock.
func (s *session) migrating(ctx context.Context, conn *sql.Conn) string {
	rows, err := conn.QueryContext(ctx, selectMigrating, s.lockID)
	if err != nil {
		return err.Error()
	}
	holders, err := scanSessions(rows)
	if err != nil {
		return err.Error()
	}
	text := describe(holders)
	for _, holder := range holders {
		text += fmt.Sprintf("; if it does not migrate, end it: SELECT pg_terminate_backend(%d)", holder.PID)
	}
	return text
}

// pg_blocking_pids lists a prepared transaction as 0, and parallel workers as their leader. An
// index that is built concurrently also waits for the snapshot of this statement.
const selectHolders = `
SELECT b.pid, coalesce(a.application_name, ''), coalesce(a.usename, ''), coalesce(a.backend_type, ''), a.xact_start
FROM (SELECT DISTINCT pg_catalog.unnest(pg_blocking_pids($1::integer)) AS pid) b LEFT JOIN pg_stat_activity a USING (pid)
WHERE b.pid OPERATOR(pg_catalog.<>) pg_catalog.pg_backend_pid()
ORDER BY a.xact_start, b.pid`

// holders returns the sessions that the connection waits for, those with the oldest transaction
// first.
func (s *session) holders(ctx context.Context, db *sql.DB) ([]Session, error) {
	pid := s.pid.Load()
	if pid == 0 {
		return nil, nil
	}
	rows, err := db.QueryContext(ctx, selectHolders, pid)
	if err != nil {
		return nil, fmt.Errorf("find who holds the lock: %w", err)
	}
	return scanSessions(rows)
}

// autovacuum is the backend_type of a worker that vacuums without having been asked.
const autovacuum = "autovacuum worker"

const selectVacuumed = `
SELECT relation::regclass::text FROM pg_locks
WHERE pid = $1::integer AND granted AND locktype = 'relation' AND mode = 'ShareUpdateExclusiveLock'
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`

const lockAgainstVacuum = `SET LOCAL lock_timeout = '5s'; LOCK TABLE %s IN SHARE UPDATE EXCLUSIVE MODE`

// interrupt makes an autovacuum worker give way, as it does for everybody who waits for
// deadlock_timeout (1 s): longer than a migration may wait. The lock asked for here is one that no
// producer conflicts with, so none queues behind it. A vacuum against wraparound does not give way;
// the error is its lock_timeout.
func (s *session) interrupt(ctx context.Context, db *sql.DB, worker Session) error {
	var table string
	if err := db.QueryRowContext(ctx, selectVacuumed, worker.PID).Scan(&table); err != nil {
		return fmt.Errorf("find the table of autovacuum: %w", err) // sql.ErrNoRows: it has ended
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("interrupt autovacuum: %w", err)
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, fmt.Sprintf(lockAgainstVacuum, table)); err != nil {
		return fmt.Errorf("interrupt autovacuum: %w", err)
	}
	return nil
}

func scanSessions(rows *sql.Rows) (sessions []Session, err error) {
	defer rows.Close()
	for rows.Next() {
		var (
			session Session
			since   sql.NullTime
		)
		if err := rows.Scan(&session.PID, &session.Application, &session.User, &session.Kind, &since); err != nil {
			return nil, fmt.Errorf("read sessions: %w", err)
		}
		session.Since = since.Time
		sessions = append(sessions, session)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read sessions: %w", err)
	}
	return sessions, nil
}

var noTransaction = regexp.MustCompile(`(?m)^-- \+goose NO TRANSACTION\s*$`)

// withoutTransaction reports whether a file says that goose runs it without a transaction.
func withoutTransaction(files fs.FS, name string) (bool, error) {
	text, err := fs.ReadFile(files, name)
	return noTransaction.Match(text), err
}

// lockID is the advisory lock of a set: its own, so that neither the other set
// nor an application's goose migrations, which use the default, wait for it.
func lockID(set Set) int64 {
	h := fnv.New64a()
	h.Write([]byte("outbox-relay/migrations/" + string(set)))
	return int64(h.Sum64())
}
