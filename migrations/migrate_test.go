package migrations_test

import (
	"database/sql"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	_ "github.com/jackc/pgx/v5/stdlib" // registers the driver "pgx"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

var sets = []migrations.Set{migrations.Outbox, migrations.Inbox}

func open(t *testing.T, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open("pgx", dsn)
	pgtest.Must(t, err)
	t.Cleanup(func() { db.Close() })
	return db
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
		pgtest.Must(t, err)
		if version, err := migrator.Version(t.Context()); err != nil || version != set.Latest() {
			t.Errorf("%s is at version %d, %v; want %d", set, version, err, set.Latest())
		}
	}
}

// upTo applies the first files of the outbox.
func upTo(t *testing.T, db *sql.DB, version int64) {
	t.Helper()
	files := fstest.MapFS{}
	names, err := fs.Glob(migrations.Outbox.FS(), "*.sql")
	pgtest.Must(t, err)
	for _, name := range names[:version] {
		text, err := fs.ReadFile(migrations.Outbox.FS(), name)
		pgtest.Must(t, err)
		files[name] = &fstest.MapFile{Data: text}
	}
	m, err := migrations.NewOver(db, migrations.Outbox, files, migrations.Options{})
	pgtest.Must(t, err)
	if _, err := m.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// A producer may insert events as soon as there is a table, in a transaction that is open until all
// files are applied. No event is taken for one that relays have had.
func TestEventsFromBetweenTheFilesAreNew(t *testing.T) {
	t.Parallel()
	db := open(t, pgtest.New(t))
	upTo(t, db, 1)
	first := produce(t, db)
	if _, err := db.ExecContext(t.Context(), insert, "between"); err != nil {
		t.Fatal(err)
	}
	pgtest.Must(t, migrations.Up(t.Context(), db, migrations.Outbox))
	pgtest.Must(t, first.Commit())
	testkit.Equal(t, "new events", scan[int](t, db, `SELECT count(*) FROM outbox WHERE NOT pg_visible_in_snapshot(xid, (SELECT target FROM outbox_range))`), 2)
}

// Down restores what Up has dropped, as the files before have made it: with its body, its settings,
// its owner's rights and those of others.
func TestDownRestoresFunctions(t *testing.T) {
	t.Parallel()
	const functions = `SELECT string_agg(concat_ws(E'\n', pg_get_functiondef(oid), proacl::text), E'\n' ORDER BY oid::regprocedure::text)
		FROM pg_proc WHERE pronamespace = 'public'::regnamespace`
	db := open(t, pgtest.New(t))
	upTo(t, db, migrations.Outbox.Latest()-1)
	want := scan[string](t, db, functions)
	pgtest.Must(t, migrations.Up(t.Context(), db, migrations.Outbox))
	all, err := migrations.New(db, migrations.Outbox, migrations.Options{})
	pgtest.Must(t, err)
	if _, err := all.DownTo(t.Context(), migrations.Outbox.Latest()-1); err != nil {
		t.Fatal(err)
	}
	if got := scan[string](t, db, functions); got != want {
		t.Errorf("after Down the functions are\n%s\nand were\n%s", got, want)
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
		if err != nil || len(names) == 0 || len(slices.Compact(set.Versions())) != len(names) || !strings.HasPrefix(names[len(names)-1], fmt.Sprintf("%05d_", set.Latest())) {
			t.Errorf("%s: files %q, %v; the versions are %d", set, names, err, set.Versions())
		}
	}
}
