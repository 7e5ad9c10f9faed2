package relaytest

import (
	"context"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// Patience bounds every wait: a test that reaches it has waited for something that does not come.
// It measures nothing.
const Patience = time.Minute

// Eventually waits until done is true. It is for what no hook reports, such as what stands in the
// database.
func Eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	testkit.Eventually(t, what, done)
}

// Must fails the test if err is not nil.
func Must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// A Database is a fresh outbox, with a pool to look at it.
type Database struct {
	testing.TB
	DSN  string // how relays reach it
	Pool *pgxpool.Pool
}

// New returns an outbox that routes everything to the given destinations, "default" if none is
// given. Relays of TestThroughPooler reach it through a PgBouncer.
func New(t testing.TB, destinations ...string) *Database {
	t.Helper()
	dsn := pgtest.New(t, migrations.Outbox)
	db := &Database{TB: t, DSN: dsn, Pool: pgtest.Pool(t, dsn)}
	db.Route(destinations...)
	if strings.HasPrefix(t.Name(), "TestThroughPooler/") {
		db.Bounce()
	}
	return db
}

// Covered is New with [Database.Cover]: for tests of what becomes of pending deliveries.
func Covered(t testing.TB, destinations ...string) *Database {
	t.Helper()
	db := New(t, destinations...)
	db.Cover()
	return db
}

// Cover makes each insert of events make their pending deliveries too, as when a relay has taken
// the events and set them aside. No relay takes them.
func (db *Database) Cover() {
	db.Helper()
	db.Exec(coverTrigger)
}

const coverTrigger = `
CREATE FUNCTION relaytest_cover() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
	INSERT INTO outbox_delivery (event_id, destination, joined, next_attempt_at, ordering_key, payload_bytes)
	SELECT DISTINCT e.id, coalesce(r.destination, ''), CASE WHEN e.ordering_key IS NULL OR e.available_at <= clock_timestamp() THEN 0 END, greatest(e.available_at, clock_timestamp()), e.ordering_key, octet_length(e.payload::text)
	FROM covered e LEFT JOIN outbox_route r ON e.event_type LIKE r.like_pattern;
	UPDATE outbox SET xid = '2' WHERE id IN (SELECT id FROM covered);
	PERFORM pg_notify('outbox_wake', 'sweep ' || current_schema());
	RETURN NULL;
END $$;
CREATE TRIGGER relaytest_cover AFTER INSERT ON outbox REFERENCING NEW TABLE AS covered FOR EACH STATEMENT EXECUTE FUNCTION relaytest_cover()`

// Bounce puts a PgBouncer before the database, to which DSN leads from now on.
func (db *Database) Bounce() *localpg.Pooler {
	db.Helper()
	u, err := url.Parse(db.DSN)
	Must(db, err)
	pooler, err := localpg.StartPooler(db.DSN)
	Must(db, err)
	db.Cleanup(func() { Must(db, pooler.Stop()) })
	db.DSN = pooler.DSN(strings.TrimPrefix(u.Path, "/"))
	return pooler
}

// Route adds a route of every type to each destination, "default" if none is given.
func (db *Database) Route(destinations ...string) {
	db.Helper()
	if len(destinations) == 0 {
		destinations = []string{"default"}
	}
	db.Exec(`INSERT INTO outbox_route (pattern, destination) SELECT '*', unnest($1::text[])`, destinations)
	db.Exec(`DELETE FROM outbox_destination WHERE destination = ANY ($1) AND NOT paused AND breaker = 'closed'`, destinations) // nothing is parked
}

// Exec runs a statement, or several without arguments, and returns how many rows the last one
// touched.
func (db *Database) Exec(statement string, args ...any) int64 {
	db.Helper()
	tag, err := db.Pool.Exec(db.Context(), statement, args...)
	if err != nil {
		db.Fatalf("%s: %v", statement, err)
	}
	return tag.RowsAffected()
}

// Insert adds n events of type "t" with the keys prefix-1 … prefix-n and a small payload.
func (db *Database) Insert(n int, prefix string) {
	db.Helper()
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key)
		SELECT 't', '{"n": 1}', $1 || '-' || i FROM generate_series(1, $2) i`, prefix, n)
}

// Rows returns the only column of every row.
func Rows[T any](db *Database, query string, args ...any) []T {
	db.Helper()
	result, err := db.Pool.Query(db.Context(), query, args...)
	if err != nil {
		db.Fatalf("%s: %v", query, err)
	}
	values, err := pgx.CollectRows(result, pgx.RowTo[T])
	if err != nil {
		db.Fatalf("%s: %v", query, err)
	}
	return values
}

// Row returns the only column of the only row.
func Row[T any](db *Database, query string, args ...any) T {
	db.Helper()
	values := Rows[T](db, query, args...)
	if len(values) != 1 {
		db.Fatalf("%s: %d rows", query, len(values))
	}
	return values[0]
}

// Becomes waits until a query's only value is want.
func Becomes[T comparable](db *Database, want T, query string, args ...any) {
	db.Helper()
	var got T
	defer func() {
		if got != want {
			db.Logf("%s: got %v, want %v", query, got, want)
		}
	}()
	Eventually(db, query, func() bool {
		got = Row[T](db, query, args...)
		return got == want
	})
}

// Begin returns a transaction that does not outlive the test: closing the pool would wait for it.
func (db *Database) Begin() pgx.Tx {
	db.Helper()
	tx, err := db.Pool.Begin(db.Context())
	Must(db, err)
	db.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(db.Context())) })
	return tx
}

// Settled makes the deliveries for which where holds what they are after eight attempts.
func (db *Database) Settled(status, where string) {
	db.Helper()
	db.Exec(`UPDATE outbox_delivery SET status = $1, attempts = 8, rescues = 3, claim = 9, last_attempt_at = now(), last_http_status = 500,
		last_reason = 'server_error', last_error = 'attempt 8 of 8: 500', delivered_at = CASE WHEN $1 = 'delivered' THEN now() END
		WHERE `+where, status)
}

// RewriteAudit changes entries of the audit, whose trigger would refuse it, such as to those of an
// operation that was killed. set is what follows SET.
func (db *Database) RewriteAudit(set string) {
	db.Helper()
	db.Exec(`ALTER TABLE outbox_audit DISABLE TRIGGER outbox_audit_is_kept; UPDATE outbox_audit SET ` + set + `; ALTER TABLE outbox_audit ENABLE TRIGGER outbox_audit_is_kept`)
}

// Refuse makes the database refuse changes of rows, such as "UPDATE ON outbox_delivery", for which
// a condition on OLD or NEW holds, until its trigger "refuse" is dropped.
func (db *Database) Refuse(changes, condition string) {
	db.Helper()
	db.before("refuse", changes, condition, `RAISE 'not this one'`)
}

// Damage refuses as if the server met a damaged page.
func (db *Database) Damage(changes, condition string) {
	db.Helper()
	db.before("refuse", changes, condition, `RAISE 'invalid page in block 7' USING ERRCODE = 'data_corrupted'`)
}

// Hold makes changes of rows wait until the returned transaction has ended. They wait for the
// advisory lock 4471.
func (db *Database) Hold(changes, condition string) (gate pgx.Tx) {
	db.Helper()
	gate = db.Begin()
	_, err := gate.Exec(db.Context(), `SELECT pg_advisory_xact_lock(4471)`)
	Must(db, err)
	db.before("hold", changes, condition, `PERFORM pg_advisory_xact_lock(4471)`)
	return gate
}

func (db *Database) before(name, changes, condition, act string) {
	db.Helper()
	db.Exec(`CREATE FUNCTION ` + name + `() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN ` + act + `; RETURN NEW; END $$;
		CREATE TRIGGER ` + name + ` BEFORE ` + changes + ` FOR EACH ROW WHEN (` + condition + `) EXECUTE FUNCTION ` + name + `()`)
}

// InsertKeyed inserts the events key-from to key-to of an ordering key.
func (db *Database) InsertKeyed(key string, from, to int) {
	db.Helper()
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key)
		SELECT 't', '{}', $1 || '-' || i, $1 FROM generate_series($2::int, $3::int) i`, key, from, to)
}

// Locker runs a statement in a transaction that stays open.
func (db *Database) Locker(statement string) *pgx.Conn {
	db.Helper()
	conn, err := pgx.Connect(db.Context(), db.DSN)
	Must(db, err)
	db.Cleanup(func() { _ = conn.Close(context.WithoutCancel(db.Context())) })
	_, err = conn.Exec(db.Context(), `BEGIN; `+statement)
	Must(db, err)
	return conn
}
