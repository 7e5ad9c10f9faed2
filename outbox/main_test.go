package outbox_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/outbox"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

// A transaction runs either API.
type transaction interface {
	Enqueue(p outbox.Producer, events ...outbox.Event) (outbox.Result, error)
	Exec(statement string) error
	Commit() error
	Rollback() error
}

// A database is a fresh outbox, used through one of the two APIs.
type database struct {
	t     *testing.T
	dsn   string
	pool  *pgxpool.Pool // to look with
	begin func(*sql.TxOptions) transaction
}

// withBothAPIs runs the test on its own database for pgx and for database/sql.
func withBothAPIs(t *testing.T, test func(t *testing.T, db *database)) {
	t.Helper()
	t.Run("pgx", func(t *testing.T) {
		t.Parallel()
		db := newDatabase(t)
		db.begin = func(o *sql.TxOptions) transaction {
			return pgxTransaction{t, begin(t, db.pool, isolation(o))}
		}
		test(t, db)
	})
	t.Run("sql", func(t *testing.T) {
		t.Parallel()
		db := newDatabase(t)
		pool, err := sql.Open("pgx", db.dsn)
		pgtest.Must(t, err)
		t.Cleanup(func() { pool.Close() })
		db.begin = func(o *sql.TxOptions) transaction {
			tx, err := pool.BeginTx(t.Context(), o)
			pgtest.Must(t, err)
			t.Cleanup(func() { tx.Rollback() })
			return sqlTransaction{t, tx}
		}
		test(t, db)
	})
}

func newDatabase(t *testing.T) *database {
	t.Helper()
	dsn := pgtest.New(t, migrations.Outbox)
	return &database{t: t, dsn: dsn, pool: pgtest.Pool(t, dsn)}
}

// begin returns a transaction that does not outlive the test: closing a pool would wait for it.
func begin(t *testing.T, pool *pgxpool.Pool, level pgx.TxIsoLevel) pgx.Tx {
	t.Helper()
	tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
	pgtest.Must(t, err)
	t.Cleanup(func() { tx.Rollback(context.WithoutCancel(t.Context())) })
	return tx
}

func isolation(o *sql.TxOptions) pgx.TxIsoLevel {
	if o != nil && o.Isolation == sql.LevelRepeatableRead {
		return pgx.RepeatableRead
	}
	return pgx.ReadCommitted
}

type pgxTransaction struct {
	t  *testing.T
	tx pgx.Tx
}

func (x pgxTransaction) Enqueue(p outbox.Producer, events ...outbox.Event) (outbox.Result, error) {
	return p.Enqueue(x.t.Context(), x.tx, events...)
}

func (x pgxTransaction) Exec(statement string) error {
	_, err := x.tx.Exec(x.t.Context(), statement)
	return err
}
func (x pgxTransaction) Commit() error   { return x.tx.Commit(x.t.Context()) }
func (x pgxTransaction) Rollback() error { return x.tx.Rollback(x.t.Context()) }

type sqlTransaction struct {
	t  *testing.T
	tx *sql.Tx
}

func (x sqlTransaction) Enqueue(p outbox.Producer, events ...outbox.Event) (outbox.Result, error) {
	return p.EnqueueSQL(x.t.Context(), x.tx, events...)
}

func (x sqlTransaction) Exec(statement string) error {
	_, err := x.tx.ExecContext(x.t.Context(), statement)
	return err
}
func (x sqlTransaction) Commit() error   { return x.tx.Commit() }
func (x sqlTransaction) Rollback() error { return x.tx.Rollback() }

// enqueue runs one transaction: committed without an error, rolled back with one.
func (db *database) enqueue(events ...outbox.Event) (outbox.Result, error) {
	db.t.Helper()
	tx := db.begin(nil)
	result, err := tx.Enqueue(outbox.Producer{}, events...)
	if err != nil {
		pgtest.Must(db.t, tx.Rollback())
		return result, err
	}
	pgtest.Must(db.t, tx.Commit())
	return result, nil
}

// exec runs SQL outside of any test transaction.
func (db *database) exec(statement string, arguments ...any) {
	db.t.Helper()
	pgtest.Exec(db.t, db.pool, statement, arguments...)
}

// strings returns the first column of a query.
func (db *database) strings(query string, arguments ...any) []string {
	db.t.Helper()
	rows, err := db.pool.Query(db.t.Context(), query, arguments...)
	pgtest.Must(db.t, err)
	values, err := pgx.CollectRows(rows, pgx.RowTo[string])
	pgtest.Must(db.t, err)
	return values
}

// cover makes the pending deliveries of all events, as when relays have taken the events and set
// them aside. No relay takes them again.
func (db *database) cover() {
	db.t.Helper()
	db.exec(`SELECT outbox_cover_events(0, 1000, '3:3:')`) // no transaction is visible in this snapshot
}

// keys returns the keys of all events in the order of their ids.
func (db *database) keys() []string {
	db.t.Helper()
	return db.strings(`SELECT idempotency_key FROM outbox ORDER BY id`)
}

// waitUntilBlocked returns once a session of the database waits for another one's lock.
func (db *database) waitUntilBlocked() {
	db.t.Helper()
	testkit.Eventually(db.t, "a session that waits for a lock", func() bool {
		return pgtest.Row[bool](db.t, db.pool, `SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock')`)
	})
}

// rolesLock: roles belong to the whole server, and roles.sql is not made for several who create
// them at once.
var rolesLock sync.Mutex

func (db *database) applyRoles() {
	db.t.Helper()
	rolesLock.Lock()
	defer rolesLock.Unlock()
	db.exec(migrations.Roles())
}

func event(key string) outbox.Event {
	return outbox.Event{Type: "invoice.issued", IdempotencyKey: key, Payload: json.RawMessage(`{"invoice":4711}`)}
}

// refusal returns by which constraint or, if none, with which SQLSTATE PostgreSQL refused; "" for
// no error.
func refusal(t testing.TB, err error) string {
	t.Helper()
	if err == nil {
		return ""
	}
	var refused *pgconn.PgError
	if !errors.As(err, &refused) {
		t.Fatalf("not an error of PostgreSQL: %v", err)
	}
	if refused.ConstraintName != "" {
		return refused.ConstraintName
	}
	return refused.Code
}
