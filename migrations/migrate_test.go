package migrations_test

import (
	"database/sql"
	"io/fs"
	"strings"
	"sync"
	"testing"

	_ "github.com/jackc/pgx/v5/stdlib" // registers the driver "pgx"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

var sets = []migrations.Set{migrations.Outbox, migrations.Inbox}

func open(t *testing.T, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open("pgx", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

// tables counts the tables of a schema.
func tables(t *testing.T, db *sql.DB, schema string) (n int) {
	t.Helper()
	row := db.QueryRowContext(t.Context(), "SELECT count(*) FROM pg_tables WHERE schemaname = $1", schema)
	if err := row.Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// Every replica of a service may migrate on start.
func TestUpConcurrently(t *testing.T) {
	t.Parallel()
	db := open(t, pgtest.New(t))
	var wg sync.WaitGroup
	for range 2 {
		for _, set := range sets {
			wg.Go(func() {
				if err := migrations.Up(t.Context(), db, set); err != nil {
					t.Error(err)
				}
			})
		}
	}
	wg.Wait()
	for _, set := range sets {
		migrator, err := migrations.New(db, set, migrations.Options{})
		if err != nil {
			t.Fatal(err)
		}
		if version, err := migrator.Version(t.Context()); err != nil || version != set.Latest() {
			t.Errorf("%s is at version %d, %v; want %d", set, version, err, set.Latest())
		}
	}
}

func TestDownAndUpAgain(t *testing.T) {
	t.Parallel()
	for _, set := range sets {
		t.Run(string(set), func(t *testing.T) {
			t.Parallel()
			db := open(t, pgtest.New(t, set))
			before := tables(t, db, "public")
			migrator, err := migrations.New(db, set, migrations.Options{})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := migrator.DownTo(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
			if n := tables(t, db, "public"); n != 1 {
				t.Errorf("%d tables are left, want the version table alone", n)
			}
			if err := migrations.Up(t.Context(), db, set); err != nil {
				t.Fatal(err)
			}
			if after := tables(t, db, "public"); after != before {
				t.Errorf("%d tables after down and up, %d before", after, before)
			}
		})
	}
}

// The search_path of the connection decides where the tables go, and one
// database may hold several schemas at different versions.
func TestSchemasAreIndependent(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	dsn := pgtest.New(t)
	admin := open(t, dsn)
	for _, schema := range []string{"one", "two"} {
		if _, err := admin.ExecContext(t.Context(), "CREATE SCHEMA "+schema); err != nil {
			t.Fatal(err)
		}
	}
	pgtest.Migrate(t, dsn+"&search_path=one", sets...)
	if one, two := tables(t, admin, "one"), tables(t, admin, "two"); one == 0 || two != 0 {
		t.Fatalf("after migrating one: %d tables in one, %d in two", one, two)
	}
	pgtest.Migrate(t, dsn+"&search_path=two", sets...)
	if one, two := tables(t, admin, "one"), tables(t, admin, "two"); one != two {
		t.Errorf("%d tables in one, %d in two", one, two)
	}
	if n := tables(t, admin, "public"); n != 0 {
		t.Errorf("%d tables in public", n)
	}
}

func TestUpFailureNamesTheSet(t *testing.T) {
	t.Parallel()
	db := open(t, pgtest.New(t))
	db.Close()
	err := migrations.Up(t.Context(), db, migrations.Inbox)
	if err == nil || !strings.HasPrefix(err.Error(), "apply inbox migrations: ") {
		t.Errorf("Up on a closed database = %v", err)
	}
}

func TestSetsAreEmbedded(t *testing.T) {
	t.Parallel()
	for _, set := range sets {
		names, err := fs.Glob(set.FS(), "*.sql")
		if err != nil || int64(len(names)) != set.Latest() {
			t.Errorf("%s: %d files, %v; the latest version is %d", set, len(names), err, set.Latest())
		}
	}
}
