package migrations_test

import (
	"database/sql"
	"io/fs"
	"strings"
	"sync"
	"testing"

	_ "github.com/jackc/pgx/v5/stdlib" // registers the driver "pgx"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
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

// Without a table of their own the events of an inbox are in the memory, as they were before; and they move again.
func TestEventsOfAnInboxMove(t *testing.T) {
	t.Parallel()
	db := open(t, pgtest.New(t, migrations.Inbox))
	exec := func(query string) {
		t.Helper()
		if _, err := db.ExecContext(t.Context(), query); err != nil {
			t.Fatal(err)
		}
	}
	exec(`INSERT INTO inbox_events (receiver, source, idempotency_key, received_at, processing_state, attempts, next_attempt_at, processed_at, last_error, payload,
			request_headers, event_id, ordering_key, sequence, not_after, claim, claimed_by, claimed_at, interruptions)
		VALUES ('default', 's', 'waits', '2026-01-01Z', 'pending', 2, '2026-01-02Z', NULL, 'why', 'a', '{"X": "y"}', 7, 'o', 8, '2027-01-02Z', 3, 'p', '2026-01-03Z', 1),
			('default', 's', 'done', '2026-01-01Z', 'succeeded', 1, NULL, '2026-01-02Z', NULL, 'b', NULL, NULL, NULL, 0, NULL, 1, NULL, NULL, 0)`)
	exec(`INSERT INTO processed_events (receiver, source, idempotency_key, received_at, processing_state, attempts, event_id, not_after)
		VALUES ('default', 's', 'waits', '2026-01-01Z', 'recorded', 0, 7, '2027-01-02Z'), ('default', 's', 'done', '2026-01-01Z', 'recorded', 0, NULL, NULL), ('default', 's', 'removed', '2026-01-01Z', 'recorded', 0, NULL, NULL),
			('default', 's', 'by middleware', '2026-01-01Z', 'ignored', 1, NULL, NULL)`)
	events := func() (text string) {
		t.Helper()
		if err := db.QueryRowContext(t.Context(), `SELECT string_agg(e::text, E'\n' ORDER BY inbox_id) FROM inbox_events e`).Scan(&text); err != nil {
			t.Fatal(err)
		}
		return text
	}
	inbox := events()
	migrator, err := migrations.New(db, migrations.Inbox, migrations.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		version int64
		states  string // by key
	}{{7, "ignored recorded recorded recorded"}, {5, "ignored succeeded succeeded pending"}} {
		if _, err := migrator.DownTo(t.Context(), step.version); err != nil {
			t.Fatal(err)
		}
		var states string
		if err := db.QueryRowContext(t.Context(), `SELECT string_agg(processing_state, ' ' ORDER BY idempotency_key) FROM processed_events`).Scan(&states); err != nil || states != step.states {
			t.Errorf("at version %d: %q, %v, want %q", step.version, states, err, step.states)
		}
	}
	var kept int
	if err := db.QueryRowContext(t.Context(), `SELECT count(*) FROM processed_events WHERE idempotency_key = 'waits' AND attempts = 2
		AND next_attempt_at = '2026-01-02Z' AND last_error = 'why' AND payload = 'a' OR idempotency_key = 'done' AND processed_at = '2026-01-02Z' AND payload = 'b'`).Scan(&kept); err != nil || kept != 2 {
		t.Errorf("%d of 2 events are as they were in the inbox, %v", kept, err)
	}
	if _, err := db.ExecContext(t.Context(), `UPDATE processed_events SET processing_state = 'recorded'`); err == nil {
		t.Error("a state is taken that is not known any more")
	}
	if err := migrations.Up(t.Context(), db, migrations.Inbox); err != nil {
		t.Fatal(err)
	}
	if again := events(); again != inbox {
		t.Errorf("there and back again the events became\n%s\nthey were\n%s", again, inbox)
	}
	var states string
	const memory = `SELECT string_agg(processing_state || CASE WHEN payload IS NULL AND attempts < 2 AND last_error IS NULL THEN '' ELSE ' in part' END, ' '
		ORDER BY idempotency_key) FROM processed_events`
	if err := db.QueryRowContext(t.Context(), memory).Scan(&states); err != nil || states != "ignored recorded succeeded recorded" {
		t.Errorf("the memory says %q, %v", states, err)
	}
	var number int64
	if err := db.QueryRowContext(t.Context(), `SELECT nextval('inbox_id_seq')`).Scan(&number); err != nil || number != 3 {
		t.Errorf("the next number is %d, %v", number, err)
	}
}

// An event in the inbox whose memory somebody has removed by hand is not lost on the way.
func TestEventsThatAreNotRememberedMove(t *testing.T) {
	t.Parallel()
	db := open(t, pgtest.New(t, migrations.Inbox))
	if _, err := db.ExecContext(t.Context(), `
		INSERT INTO inbox_events (receiver, source, idempotency_key, event_type, event_version, related_reference, received_at, processing_state, next_attempt_at,
			payload, request_headers, event_id, not_after)
		VALUES ('default', 's', 'waits', 'paid', 2, 'r', '2026-01-01Z', 'pending', '2026-01-02Z', 'a', '{"X": "y"}', 7, '2027-01-02Z'),
			('default', 's', 'personal', '', 1, NULL, '2026-01-01Z', 'succeeded', NULL, NULL, NULL, NULL, NULL),
			('default', 's', 'processed', '', 1, NULL, '2026-01-01Z', 'pending', '2026-01-02Z', 'b', NULL, NULL, NULL);
		INSERT INTO processed_events (receiver, source, idempotency_key, processing_state) VALUES ('default', 's', 'processed', 'succeeded')`); err != nil {
		t.Fatal(err)
	}
	texts := func(query string) (text string) {
		t.Helper()
		if err := db.QueryRowContext(t.Context(), query).Scan(&text); err != nil {
			t.Fatal(err)
		}
		return text
	}
	const inbox = `SELECT string_agg(e::text, E'\n' ORDER BY inbox_id) FROM inbox_events e WHERE idempotency_key <> 'processed'`
	before := texts(inbox)
	migrator, err := migrations.New(db, migrations.Inbox, migrations.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := migrator.DownTo(t.Context(), 5); err != nil {
		t.Fatal(err)
	}
	const want = "personal succeeded, processed succeeded, waits pending"
	if states := texts(`SELECT string_agg(idempotency_key || ' ' || processing_state, ', ' ORDER BY idempotency_key) FROM processed_events`); states != want {
		t.Errorf("the memory says %q, want %q", states, want)
	}
	if err := migrations.Up(t.Context(), db, migrations.Inbox); err != nil {
		t.Fatal(err)
	}
	if again := texts(inbox); again != before {
		t.Errorf("there and back again the events became\n%s\nthey were\n%s", again, before)
	}
	if known := texts(`SELECT string_agg(idempotency_key, ' ') FROM processed_events WHERE processing_state = 'recorded' AND payload_hash = sha256('a')
		AND event_type = 'paid' AND event_version = 2 AND related_reference = 'r' AND received_at = '2026-01-01Z' AND event_id = 7 AND not_after = '2027-01-02Z'`); known != "waits" {
		t.Errorf("%q is remembered as it was received", known)
	}
}

// The search_path of the connection decides where the tables go, and one
// database may hold several schemas at different versions.
func TestSchemasAreIndependent(t *testing.T) {
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
