package migrations_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/pressly/goose/v3"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// patience bounds what may take as long as a busy machine needs, but not for ever.
const patience = time.Minute

// with returns the files of the outbox with one more behind them.
func with(t *testing.T, text string) fs.FS {
	t.Helper()
	files := fstest.MapFS{"00900_further.sql": {Data: []byte(text)}}
	original := migrations.Outbox.FS()
	names, err := fs.Glob(original, "*.sql")
	pgtest.Must(t, err)
	for _, name := range names {
		data, err := fs.ReadFile(original, name)
		pgtest.Must(t, err)
		files[name] = &fstest.MapFile{Data: data}
	}
	return files
}

// A producerTx is a transaction that has written an event and is not committed.
type producerTx struct {
	*sql.Tx
	pid int
}

// insert writes an event. The key is the caller's.
const insert = `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', $1)`

func produce(t *testing.T, db *sql.DB) producerTx {
	t.Helper()
	tx, err := db.BeginTx(t.Context(), nil)
	pgtest.Must(t, err)
	t.Cleanup(func() { _ = tx.Rollback() })
	if _, err := tx.ExecContext(t.Context(), insert, "open"); err != nil {
		t.Fatal(err)
	}
	p := producerTx{Tx: tx}
	pgtest.Must(t, tx.QueryRowContext(t.Context(), "SELECT pg_backend_pid()").Scan(&p.pid))
	return p
}

func scan[T any](t *testing.T, db *sql.DB, query string, args ...any) (value T) {
	t.Helper()
	if err := db.QueryRowContext(t.Context(), query, args...).Scan(&value); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return value
}

// becomes waits until the query returns true.
func becomes(t *testing.T, db *sql.DB, query string, args ...any) {
	t.Helper()
	for deadline := time.Now().Add(patience); !scan[bool](t, db, query, args...); {
		if time.Now().After(deadline) {
			t.Fatalf("still false: %s", query)
		}
	}
}

const (
	isQueued = `SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock' AND relation = 'outbox'::regclass
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))` // clones of one template share oids
	hasColumn = `SELECT EXISTS (SELECT FROM pg_attribute WHERE attrelid = 'outbox'::regclass AND attname = 'note' AND NOT attisdropped)`
	addColumn = "-- +goose Up\nALTER TABLE outbox ADD COLUMN note text;\n-- +goose Down\nALTER TABLE outbox DROP COLUMN note;\n"
)

// One open transaction of a producer delays the migration, but not the other producers, whose
// statements PostgreSQL queues behind the migration's lock.
func TestProducersDoNotWaitForMigrations(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	for _, direction := range []string{"up", "down"} {
		t.Run(direction, func(t *testing.T) {
			t.Parallel()
			db := open(t, pgtest.New(t, migrations.Outbox)+"&application_name=billing")
			var (
				mu    sync.Mutex
				waits []*migrations.LockedError
			)
			m, err := migrations.NewOver(db, migrations.Outbox, with(t, addColumn), migrations.Options{OnWait: func(e *migrations.LockedError) {
				mu.Lock()
				defer mu.Unlock()
				waits = append(waits, e)
			}})
			pgtest.Must(t, err)
			migrate := m.Up
			if direction == "down" {
				if _, err := m.Up(t.Context()); err != nil {
					t.Fatal(err)
				}
				migrate = func(ctx context.Context) ([]*goose.MigrationResult, error) {
					return m.DownTo(ctx, migrations.Outbox.Latest())
				}
			}
			first := produce(t, db)

			var migrating sync.WaitGroup
			migrating.Go(func() {
				if done, err := migrate(t.Context()); err != nil || len(done) != 1 {
					t.Errorf("%d migrations are done, %v", len(done), err)
				}
			})
			t.Cleanup(migrating.Wait)
			t.Cleanup(func() { _ = first.Rollback() })
			var longest time.Duration
			for i := range 5 { // each in another attempt, or in the same
				becomes(t, db, isQueued)
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				start := time.Now()
				_, err := db.ExecContext(ctx, insert, fmt.Sprint("other ", i))
				cancel()
				if err != nil {
					t.Fatalf("another producer waits as long as the first: %v", err)
				}
				longest = max(longest, time.Since(start))
			}
			t.Logf("the slowest of 5 inserts behind the migration's lock took %s", longest.Round(time.Millisecond))
			pgtest.Must(t, first.Commit())
			migrating.Wait()
			if got := scan[bool](t, db, hasColumn); got != (direction == "up") {
				t.Errorf("after %s, that the column exists is %v", direction, got)
			}
			if len(waits) == 0 || len(waits[len(waits)-1].Holders) == 0 {
				t.Fatalf("reported: %v", waits)
			}
			for _, wait := range waits {
				if len(wait.Holders) == 0 {
					continue // a busy machine looks too late, but not every time
				}
				if wait.File != "00900_further.sql" || wait.Holders[0].PID != first.pid || wait.Holders[0].Application != "billing" || wait.Holders[0].Since.IsZero() {
					t.Errorf("reported: %v", wait)
				}
			}
		})
	}
}

// A migrator that gives up names the session, and leaves neither its change nor its settings
// behind.
func TestMigratorGivesUp(t *testing.T) {
	t.Parallel()
	db := open(t, pgtest.New(t, migrations.Outbox)+"&application_name=billing&lock_timeout=7777")
	files := with(t, strings.Replace(addColumn, "Up\n", "Up\nCREATE TABLE half_done ();\n", 1))
	m, err := migrations.NewOver(db, migrations.Outbox, files, migrations.Options{LockTimeout: 3 * time.Second, RetryFor: -1})
	pgtest.Must(t, err)
	first := produce(t, db)
	_, err = m.Up(t.Context())
	locked := new(migrations.LockedError)
	if !errors.As(err, &locked) || locked.Tries != 1 || len(locked.Holders) != 1 || locked.Holders[0].PID != first.pid {
		t.Fatalf("Up = %v", err)
	}
	pattern := fmt.Sprintf(`^00900_further\.sql did not get its locks in 1 attempt within [0-9.]+m?s: session %d \(application "billing", user postgres, in a transaction since 20\S+Z\) had them: `+
		`ERROR: canceling statement due to lock timeout \(SQLSTATE 55P03\)$`, first.pid)
	if !regexp.MustCompile(pattern).MatchString(err.Error()) {
		t.Errorf("Up = %v", err)
	}
	if version, err := m.Version(t.Context()); err != nil || version != migrations.Outbox.Latest() {
		t.Errorf("the version is %d, %v", version, err)
	}
	if scan[bool](t, db, "SELECT to_regclass('half_done') IS NOT NULL") {
		t.Error("half of the file is applied")
	}
	testkit.Equal(t, "advisory locks left", scan[int](t, db, "SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database WHERE locktype = 'advisory' AND datname = current_database()"), 0)
	pgtest.Must(t, first.Rollback())
	if _, err := m.Up(t.Context()); err != nil {
		t.Error(err)
	}
	db.SetMaxIdleConns(1)
	testkit.Equal(t, "the connection's lock_timeout became", scan[string](t, db, "SHOW lock_timeout"), "7777ms")
}

// A stranger, a login that may do nothing but connect, holds the lock of the migrations. The error
// names its session and what to do.
func TestSecurityMigratorNamesTheStranger(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t)
	db := open(t, dsn)
	name := scan[string](t, db, "SELECT 'stranger_of_' || current_database()")
	if _, err := db.ExecContext(t.Context(), "CREATE ROLE "+name+" LOGIN"); err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(dsn + "&application_name=psql")
	pgtest.Must(t, err)
	u.User = url.User(name)
	stranger := open(t, u.String())
	stranger.SetMaxOpenConns(1)
	h := fnv.New64a()
	h.Write([]byte("outbox-relay/migrations/outbox"))
	pid := scan[int](t, stranger, "SELECT pg_backend_pid() FROM pg_advisory_lock($1)", int64(h.Sum64()))
	m, err := migrations.New(db, migrations.Outbox, migrations.Options{RetryFor: -1})
	pgtest.Must(t, err)
	_, err = m.Up(t.Context())
	want := fmt.Sprintf(`session %d (application "psql", user %s); if it does not migrate, end it: SELECT pg_terminate_backend(%[1]d)`, pid, name)
	if err == nil || !strings.HasSuffix(err.Error(), want) {
		t.Fatalf("Up = %v, want … %s", err, want)
	}
	if !scan[bool](t, db, "SELECT pg_terminate_backend($1)", pid) {
		t.Fatal("the stranger's session is gone")
	}
	becomes(t, db, "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)", pid)
	if _, err := m.Up(t.Context()); err != nil {
		t.Error(err)
	}
}

// The stock goose with a lock_timeout fails where it would queue, and leaves nothing behind.
func TestStockGooseWithLockTimeout(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	first := produce(t, open(t, dsn))
	stock, err := goose.NewProvider(goose.DialectPostgres, open(t, dsn+"&lock_timeout=50ms"), with(t, addColumn),
		goose.WithTableName(migrations.Outbox.VersionTable()))
	pgtest.Must(t, err)
	if _, err := stock.Up(t.Context()); err == nil || !strings.Contains(err.Error(), "55P03") {
		t.Errorf("Up = %v", err)
	}
	pgtest.Must(t, first.Commit())
	if _, err := stock.Up(t.Context()); err != nil {
		t.Error(err)
	}
}

// Autovacuum gives way to those who wait for a second, which a migration must not do. It is made to
// give way nevertheless.
func TestAutovacuumGivesWay(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	server := pgtest.StartCopy(t, localpg.Options{Settings: map[string]string{"autovacuum_naptime": "3s"}})
	pgtest.Migrate(t, server.DSN(""), migrations.Outbox)
	db := open(t, server.DSN(""))
	m, err := migrations.NewOver(db, migrations.Outbox, with(t, addColumn), migrations.Options{})
	pgtest.Must(t, err)
	const slow = `ALTER TABLE outbox SET (autovacuum_vacuum_threshold = 1, autovacuum_vacuum_scale_factor = 0,
		autovacuum_vacuum_cost_delay = 100, autovacuum_vacuum_cost_limit = 1)` // several minutes
	for _, statement := range []string{
		slow, `INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 't', '{}', n FROM generate_series(1, 50000) n`, `DELETE FROM outbox`,
	} {
		if _, err := db.ExecContext(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
	becomes(t, db, `SELECT EXISTS (SELECT FROM pg_stat_progress_vacuum WHERE relid = 'outbox'::regclass)`)
	if _, err := m.Up(t.Context()); err != nil {
		t.Error(err)
	}
}

const (
	addIndex = `-- +goose NO TRANSACTION
-- +goose Up
DROP INDEX CONCURRENTLY IF EXISTS outbox_further;
CREATE UNIQUE INDEX CONCURRENTLY outbox_further ON outbox (related_reference);
-- +goose Down
DROP INDEX CONCURRENTLY IF EXISTS outbox_further;
`
	indexIsValid = `SELECT indisvalid FROM pg_index WHERE indexrelid = 'outbox_further'::regclass`
)

// An index that is built concurrently waits for open transactions as long as it takes, in one
// attempt, since no producer waits for it.
func TestIndexIsBuiltBesideProducers(t *testing.T) {
	t.Parallel()
	db := open(t, pgtest.New(t, migrations.Outbox))
	first := produce(t, db)
	waits := make(chan *migrations.LockedError, 1000)
	m, err := migrations.NewOver(db, migrations.Outbox, with(t, addIndex), migrations.Options{
		LockTimeout: 20 * time.Millisecond, OnWait: func(e *migrations.LockedError) { waits <- e },
	})
	pgtest.Must(t, err)
	var migrating sync.WaitGroup
	migrating.Go(func() {
		if _, err := m.Up(t.Context()); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(migrating.Wait)
	t.Cleanup(func() { _ = first.Rollback() })
	if wait := <-waits; wait.Err != nil || wait.Holders[0].PID != first.pid || !strings.HasPrefix(wait.Error(), fmt.Sprintf("00900_further.sql waits for session %d (", first.pid)) {
		t.Errorf("reported: %v", wait)
	}
	if _, err := db.ExecContext(t.Context(), insert, "other"); err != nil {
		t.Fatal(err)
	}
	pgtest.Must(t, first.Commit())
	migrating.Wait()
	if len(waits) != 0 || !scan[bool](t, db, indexIsValid) {
		t.Errorf("%d more waits; that the index is valid is %v", len(waits), scan[bool](t, db, indexIsValid))
	}
	if _, err := m.DownTo(t.Context(), migrations.Outbox.Latest()); err != nil {
		t.Error(err)
	}
}

// An index that is built concurrently waits for the snapshot of whoever asks for whom it waits.
// That one is not named.
func TestWhoAsksIsNoHolder(t *testing.T) {
	t.Parallel()
	db := open(t, pgtest.New(t, migrations.Outbox))
	asking := produce(t, db)
	building, err := db.Conn(t.Context())
	pgtest.Must(t, err)
	var pid int
	pgtest.Must(t, building.QueryRowContext(t.Context(), "SELECT pg_backend_pid()").Scan(&pid))
	var built sync.WaitGroup
	built.Go(func() {
		defer building.Close()
		if _, err := building.ExecContext(t.Context(), "CREATE INDEX CONCURRENTLY further ON outbox (created_at)"); err != nil {
			t.Error(err)
		}
	})
	defer built.Wait()
	defer func() { _ = asking.Rollback() }()
	becomes(t, db, "SELECT $2 = ANY (pg_blocking_pids($1))", pid, asking.pid)
	rows, err := asking.QueryContext(t.Context(), migrations.SelectHolders, pid)
	pgtest.Must(t, err)
	defer rows.Close()
	for rows.Next() {
		t.Error("a holder is named")
	}
	pgtest.Must(t, rows.Err())
}

// The invalid index that a failed build leaves behind is dropped by the next run, of this runner
// and of the stock goose.
func TestFailedIndexIsBuiltAgain(t *testing.T) {
	t.Parallel()
	for _, runner := range []string{"migrator", "goose"} {
		t.Run(runner, func(t *testing.T) {
			t.Parallel()
			db := open(t, pgtest.New(t, migrations.Outbox))
			m, err := migrations.NewOver(db, migrations.Outbox, with(t, addIndex), migrations.Options{})
			pgtest.Must(t, err)
			up := m.Up
			if runner == "goose" {
				stock, err := goose.NewProvider(goose.DialectPostgres, db, with(t, addIndex), goose.WithTableName(migrations.Outbox.VersionTable()))
				pgtest.Must(t, err)
				up = stock.Up
			}
			if _, err := db.ExecContext(t.Context(), `INSERT INTO outbox (event_type, payload, idempotency_key, related_reference)
				VALUES ('t', '{}', 'a', 'same'), ('t', '{}', 'b', 'same')`); err != nil {
				t.Fatal(err)
			}
			if _, err := up(t.Context()); err == nil || !strings.Contains(err.Error(), "23505") {
				t.Errorf("the index is unique, and yet: %v", err)
			}
			if scan[bool](t, db, indexIsValid) {
				t.Error("no invalid index is left: nothing is tested")
			}
			if _, err := db.ExecContext(t.Context(), `DELETE FROM outbox WHERE idempotency_key = 'b'`); err != nil {
				t.Fatal(err)
			}
			if _, err := up(t.Context()); err != nil {
				t.Error(err)
			}
			if !scan[bool](t, db, indexIsValid) {
				t.Error("the index is invalid still")
			}
		})
	}
}

var (
	statement     = regexp.MustCompile(`(?s)[^;]+;`)
	comment       = regexp.MustCompile(`(?m)--.*$`)
	createIndex   = regexp.MustCompile(`(?i)^CREATE (?:UNIQUE )?INDEX (CONCURRENTLY )?(\w+) ON (?:ONLY )?(\w+)`)
	dropIndex     = regexp.MustCompile(`(?i)^DROP INDEX CONCURRENTLY IF EXISTS (\w+)$`)
	noTransaction = regexp.MustCompile(`(?m)^-- \+goose NO TRANSACTION$`)
)

// lockingMistakes returns what is wrong in a file that builds indexes concurrently. Only with such
// statements may a file do without a transaction: it waits for locks without the short timeout, and
// what failed in its middle stays.
func lockingMistakes(text string) (mistakes []string) {
	if !noTransaction.MatchString(text) {
		return nil
	}
	var dropped []string
	for _, s := range statement.FindAllString(comment.ReplaceAllString(text, ""), -1) {
		s = strings.Join(strings.Fields(strings.TrimSuffix(s, ";")), " ")
		if drop := dropIndex.FindStringSubmatch(s); drop != nil {
			dropped = append(dropped, drop[1])
			continue
		}
		create := createIndex.FindStringSubmatch(s)
		switch {
		case create == nil || create[1] == "":
			mistakes = append(mistakes, s+": without a transaction only indexes are built and dropped, CONCURRENTLY")
		case !slices.Contains(dropped, create[2]):
			mistakes = append(mistakes, s+": a failed build leaves an invalid index; write DROP INDEX CONCURRENTLY IF EXISTS "+create[2]+" before it")
		}
	}
	return mistakes
}

func TestFilesWithoutTransaction(t *testing.T) {
	t.Parallel()
	for _, set := range sets {
		names, err := fs.Glob(set.FS(), "*.sql")
		pgtest.Must(t, err)
		for _, name := range names {
			text, err := fs.ReadFile(set.FS(), name)
			pgtest.Must(t, err)
			for _, mistake := range lockingMistakes(string(text)) {
				t.Errorf("%s/%s: %s", set, name, mistake)
			}
		}
	}
	if found := lockingMistakes(addIndex); len(found) != 0 {
		t.Errorf("wrongly reported: %q", found)
	}
	for _, text := range []string{
		strings.Replace(addIndex, "DROP INDEX CONCURRENTLY IF EXISTS outbox_further;", "", 1),
		strings.Replace(addIndex, "INDEX CONCURRENTLY outbox_further ON", "INDEX outbox_further ON", 1),
		addIndex + "ALTER TABLE outbox ADD COLUMN note text;",
	} {
		if found := lockingMistakes(text); len(found) != 1 {
			t.Errorf("reported %q, want one mistake of\n%s", found, text)
		}
	}
}
