package main

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/migrate"
	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

var took = regexp.MustCompile(` in [0-9.µm]+s\n`)

// runMigrate runs a migrate command and replaces the durations in its output.
func runMigrate(dsn string, args ...string) result {
	r := command([]string{"OUTBOX_DATABASE_URL=" + dsn}, append([]string{"migrate"}, args...)...)
	r.stdout = took.ReplaceAllString(r.stdout, "\n")
	return r
}

// files returns the names of a set's migrations, oldest first.
func files(t *testing.T, set migrations.Set) []string {
	t.Helper()
	var names []string
	dir, err := os.ReadDir("../../migrations/" + string(set))
	pgtest.Must(t, err)
	for _, entry := range dir {
		names = append(names, entry.Name())
	}
	return names
}

// lines writes one line for each name.
func lines(verb string, names []string) string {
	var b strings.Builder
	for _, name := range names {
		fmt.Fprintf(&b, "%s %s\n", verb, name)
	}
	return b.String()
}

func open(t testing.TB, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open("pgx", dsn)
	pgtest.Must(t, err)
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}

func query[T any](t *testing.T, db *sql.DB, statement string, args ...any) T {
	t.Helper()
	var value T
	if err := db.QueryRowContext(t.Context(), statement, args...).Scan(&value); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
	return value
}

func execute(t *testing.T, db *sql.DB, statement string, args ...any) {
	t.Helper()
	if _, err := db.ExecContext(t.Context(), statement, args...); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
}

// tables counts the tables, functions, domains and views of a schema, but for goose's own.
const tables = `SELECT (SELECT count(*) FROM pg_class WHERE relnamespace = $1::regnamespace AND relname NOT LIKE '%_schema_version%')
	+ (SELECT count(*) FROM pg_proc WHERE pronamespace = $1::regnamespace)
	+ (SELECT count(*) FROM pg_type WHERE typnamespace = $1::regnamespace AND typtype = 'd')`

func TestMigrateUpDownUp(t *testing.T) {
	t.Parallel()
	for _, set := range []migrations.Set{migrations.Outbox, migrations.Inbox} {
		t.Run(string(set), func(t *testing.T) {
			t.Parallel()
			dsn := pgtest.New(t)
			db := open(t, dsn)
			names := files(t, set)
			latest := fmt.Sprintf("%s schema is up to date: version %d\n", set, len(names))
			reverted := slices.Clone(names)
			slices.Reverse(reverted)
			flag := "--set=" + string(set)

			runMigrate(dsn, "down", "--yes", flag).expect(t, 0, fmt.Sprintf("nothing to revert: the %s schema has version 0\n", set), "")
			runMigrate(dsn, "up", flag).expect(t, 0, lines("applied", names)+latest, "")
			before := query[int](t, db, tables, "public")
			runMigrate(dsn, "up", flag).expect(t, 0, latest, "")
			runMigrate(dsn, "down", flag, "--yes", "--to", fmt.Sprint(len(names))).expect(t, 0, fmt.Sprintf("nothing to revert: the %s schema has version %d\n", set, len(names)), "")
			runMigrate(dsn, "down", flag, "--yes").expect(t, 0, lines("reverted", reverted[:1])+fmt.Sprintf("%s schema is at version %d\n", set, len(names)-1), "")
			runMigrate(dsn, "up", flag).expect(t, 0, lines("applied", names[len(names)-1:])+latest, "")
			runMigrate(dsn, "down", flag, "-y", "--to", "0").expect(t, 0, lines("reverted", reverted)+fmt.Sprintf("%s schema is at version 0\n", set), "")
			testkit.Equal(t, "tables or functions are left", query[int](t, db, tables, "public"), 0)
			runMigrate(dsn, "up", flag).expect(t, 0, lines("applied", names)+latest, "")
			testkit.Equal(t, "tables and functions are back", query[int](t, db, tables, "public"), before)
		})
	}
}

func TestMigrateDownAsks(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	r := runMigrate(dsn, "down", "--to=0")
	want := fmt.Sprintf(`outbox-relay: reverting %d migrations of outbox in postgres://postgres@/test_[0-9]+\?host=\S+ drops tables with their data; nothing was done: run the command on a terminal, where it asks first`+"\n", migrations.Outbox.Latest())
	if r.code != cli.ExitUsage || r.stdout != "" || !regexp.MustCompile("^"+want+"$").MatchString(r.stderr) {
		t.Errorf("%+v, want a stderr of %s", r, want)
	}
	runMigrate(dsn, "up").expect(t, 0, fmt.Sprintf("outbox schema is up to date: version %d\n", migrations.Outbox.Latest()), "")
}

func TestMigrateStatus(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t)
	db := open(t, dsn)
	names := files(t, migrations.Outbox)
	pending := fmt.Sprintf("outbox-relay: schema mismatch: %d of %d migrations are pending; run: outbox-relay migrate up\n", len(names), len(names))
	r := runMigrate(dsn, "status")
	if r.code != cli.ExitSchema || r.stderr != pending || strings.Count(r.stdout, "  pending\n") != len(names) {
		t.Errorf("%+v", r)
	}
	if query[int](t, db, tables, "public") != 0 || query[bool](t, db, "SELECT to_regclass('outbox_schema_version') IS NOT NULL") {
		t.Error("status has created something")
	}

	runMigrate(dsn, "up")
	r = runMigrate(dsn, "status", "--json")
	var s migrate.Status
	if err := json.Unmarshal([]byte(r.stdout), &s); err != nil || r.code != 0 || r.stderr != "" {
		t.Fatalf("%+v: %v", r, err)
	}
	if s.Set != migrations.Outbox || s.Version != int64(len(names)) || s.Latest != s.Version || len(s.Migrations) != len(names) {
		t.Errorf("%+v", s)
	}
	for i, m := range s.Migrations {
		if m.Version != int64(i+1) || m.File != names[i] || m.AppliedAt == nil || m.AppliedAt.After(query[time.Time](t, db, "SELECT now()")) {
			t.Errorf("migration %d is %+v", i, m)
		}
	}
	r = runMigrate(dsn, "status")
	if r.code != 0 || r.stderr != "" || !strings.HasPrefix(r.stdout, "VERSION  FILE") || strings.Contains(r.stdout, "pending") {
		t.Errorf("%+v", r)
	}
}

func TestMigrateIntoASchema(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const schema = `My "Billing"`
	dsn := pgtest.New(t)
	db := open(t, dsn)
	names := files(t, migrations.Outbox)
	done := lines("applied", names) + fmt.Sprintf("outbox schema is up to date: version %d\n", len(names))
	runMigrate(dsn, "up", "--schema", schema).expect(t, 0, done, "")
	if inside, outside := query[int](t, db, tables, `"My ""Billing"""`), query[int](t, db, tables, "public"); inside == 0 || outside != 0 {
		t.Errorf("%d tables and functions are in the schema, %d in public", inside, outside)
	}
	// A second service in the same database.
	runMigrate(dsn, "up", "--schema", "shipping").expect(t, 0, done, "")
	env := []string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DATABASE_SCHEMA=" + schema}
	if r := command(env, "status"); r.code != 0 || r.stderr != "" {
		t.Errorf("%+v", r)
	}
	command(env[:1], "status").holds(t, cli.ExitSchema, "", "")
}

// A function that another role creates in the schema could run with the rights of the login that
// migrates.
func TestSecurityMigrateUpWarnsOfAnOpenSchema(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t)
	db := open(t, dsn)
	execute(t, db, `REVOKE CREATE ON SCHEMA public FROM PUBLIC`) // as PostgreSQL 15 does
	if r := runMigrate(dsn, "up"); r.code != 0 || r.stderr != "" {
		t.Errorf("a closed schema: %+v", r)
	}
	execute(t, db, `GRANT CREATE ON SCHEMA public TO PUBLIC, pg_monitor`)
	const warning = "warning: others may create objects in schema public and have them run with the rights of its users; " +
		"run, as a superuser or the owner of the schema: REVOKE CREATE ON SCHEMA public FROM PUBLIC, pg_monitor; GRANT CREATE ON SCHEMA public TO "
	if r := runMigrate(dsn, "up"); r.code != 0 || r.stderr != warning+query[string](t, db, "SELECT current_user::text")+"\n" {
		t.Errorf("an open schema: %+v", r)
	}
}

// A role that may use a schema, but not create one.
func TestMigrateWithoutRightToCreateSchemas(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t)
	db := open(t, dsn)
	role := "migrator_" + query[string](t, db, "SELECT current_database()")
	execute(t, db, "CREATE ROLE "+role+" LOGIN")
	execute(t, db, "CREATE SCHEMA billing AUTHORIZATION "+role)
	t.Cleanup(func() {
		if _, err := db.Exec("DROP OWNED BY " + role + "; DROP ROLE " + role); err != nil {
			t.Error(err)
		}
	})
	u, err := url.Parse(dsn)
	pgtest.Must(t, err)
	u.User = url.User(role)
	names := files(t, migrations.Outbox)
	runMigrate(u.String(), "up", "--schema=billing").expect(t, 0, lines("applied", names)+fmt.Sprintf("outbox schema is up to date: version %d\n", len(names)), "")
	r := runMigrate(u.String(), "up", "--schema=shipping")
	if want := "outbox-relay: create schema shipping: ERROR: permission denied for database "; r.code != cli.ExitFailed || !strings.HasPrefix(r.stderr, want) {
		t.Errorf("%+v", r)
	}
}

// An open transaction of a producer delays a migration. Who it is stands on stderr while the
// migration waits, and in the error of one that gave up.
func TestMigrationThatWaits(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	producer := open(t, dsn+"&application_name=billing")
	tx, err := producer.Begin()
	pgtest.Must(t, err)
	t.Cleanup(func() { _ = tx.Rollback() })
	if _, err := tx.Exec("INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', 'open')"); err != nil {
		t.Fatal(err)
	}
	const session = `session [0-9]+ \(application "billing", user postgres, in a transaction since \S+\)`
	r := runMigrate(dsn, "down", "--yes", "--to=0", "--lock-timeout=1s", "--retry-for=2s")
	if r.code != cli.ExitFailed || !regexp.MustCompile(`^[0-9a-z_]+\.sql waits for `+session+`
outbox-relay: migrate outbox: [0-9a-z_]+\.sql did not get its locks in [0-9]+ attempts? within \S+: `+session+` had them: ERROR: canceling statement due to lock timeout \(SQLSTATE 55P03\)
$`).MatchString(r.stderr) {
		t.Errorf("%+v", r)
	}
	pgtest.Must(t, tx.Commit())
	if r := runMigrate(dsn, "down", "--yes", "--to=0"); r.code != 0 || r.stderr != "" {
		t.Errorf("%+v", r)
	}
	for _, flag := range []string{"--lock-timeout=0s", "--retry-for=-1s"} {
		runMigrate(dsn, "up", flag).holds(t, cli.ExitUsage, "", "must be above zero")
	}
}

// What fails is told by its file, and so is what was done before.
func TestMigrationThatFails(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t)
	execute(t, open(t, dsn), "CREATE TABLE outbox_relay ()")
	names := files(t, migrations.Outbox)
	runMigrate(dsn, "up").expect(t, cli.ExitFailed, lines("applied", names[:2]),
		`outbox-relay: migrate outbox: 00003_relay.sql: `+"ERROR: relation \"outbox_relay\" already exists (SQLSTATE 42P07)\n")
}

// A receiver's tables may be in any encoding.
func TestMigrateRefusesADatabaseThatIsNotInUTF8(t *testing.T) {
	t.Parallel()
	dsn := pgtest.InEncoding(t, "SQL_ASCII")
	runMigrate(dsn, "up").expect(t, cli.ExitConfig, "", "outbox-relay: the outbox needs a database in UTF8, and this one is in SQL_ASCII; "+
		"make one by CREATE DATABASE … TEMPLATE template0 ENCODING 'UTF8', and move the tables there by pg_dump\n")
	testkit.Equal(t, "tables or functions", query[int](t, open(t, dsn), tables, "public"), 0)
	if r := runMigrate(dsn, "up", "--set=inbox"); r.code != 0 {
		t.Errorf("%+v", r)
	}
}

func TestUnreachableDatabase(t *testing.T) {
	t.Parallel()
	const dsn = "postgres://u:hunter2@127.0.0.1:1/db?sslmode=prefer"
	const reason = "failed to connect to `user=u database=db`: 127.0.0.1:1 (127.0.0.1): dial error: dial tcp 127.0.0.1:1: connect: connection refused\n"
	env := []string{"OUTBOX_DATABASE_URL=" + dsn}
	for args, doing := range map[string]string{
		"status":                     "read schema version: ",
		"status --healthcheck":       "read schema version: ",
		"migrate up":                 "read the encoding of the database: ",
		"migrate up --schema=a":      "read the encoding of the database: ",
		"migrate down --yes":         "list applied migrations: ",
		"migrate status --set=inbox": "list applied migrations: ",
	} {
		t.Run(args, func(t *testing.T) {
			t.Parallel()
			command(env, strings.Fields(args)...).expect(t, cli.ExitDatabase, "", "outbox-relay: the database cannot be reached: "+doing+reason)
		})
	}
	// One that answers, and refuses.
	dsn2 := pgtest.New(t)
	for dsn, want := range map[string]string{
		strings.Replace(dsn2, "/test_", "/absent_", 1):         "there is no such database; check its name in database.url",
		strings.Replace(dsn2, "postgres@", "who%20am%20i@", 1): "the database refuses this login; check user and password in database.url, and pg_hba.conf",
	} {
		r := command([]string{"OUTBOX_DATABASE_URL=" + dsn}, "status")
		if r.code != cli.ExitConfig || !strings.HasPrefix(r.stderr, "outbox-relay: "+want) || strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("%+v", r)
		}
	}
}

func TestSchemaMismatch(t *testing.T) {
	t.Parallel()
	older := pgtest.New(t)
	runMigrate(older, "up")
	runMigrate(older, "down", "--yes")
	newer := pgtest.New(t, migrations.Outbox)
	execute(t, open(t, newer), "INSERT INTO outbox_schema_version (version_id, is_applied) VALUES (999, true);"+
		"CREATE OR REPLACE FUNCTION outbox_compatible_since() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 998'")
	none := pgtest.New(t, migrations.Inbox)
	other := pgtest.New(t, migrations.Outbox)
	execute(t, open(t, other), "DELETE FROM outbox_schema_version WHERE version_id = 2")
	latest := migrations.Outbox.Latest()
	noSchema := fmt.Sprintf("there is no outbox schema here (version %d is needed); run: outbox-relay migrate up", latest)
	oldSchema := fmt.Sprintf("the database has version %d, this build needs %d; run: outbox-relay migrate up", latest-1, latest)
	newSchema := fmt.Sprintf("the database has version 999, which works with builds that know 998 or later, this build knows %d; run a newer outbox-relay", latest)
	newSet := fmt.Sprintf("the database has outbox version 999, this build knows %d; run a newer outbox-relay", latest)
	for _, test := range []struct{ dsn, args, want string }{
		{none, "status", noSchema},
		{none, "status --healthcheck", noSchema},
		{none, "run", noSchema},
		{older, "status --json", oldSchema},
		{older, "run", oldSchema},
		{newer, "status", newSchema},
		{newer, "status --healthcheck", newSchema},
		{newer, "run", newSchema},
		{other, "run", "the schema lacks migration 2, and so is of another history than this build; run the outbox-relay that made it, " +
			"or give this one its own schema (outbox-relay migrate up --schema NAME, database.schema)"},
		{newer, "migrate up", newSet},
		{newer, "migrate down --yes", newSet},
	} {
		t.Run(test.args+" "+test.want, func(t *testing.T) {
			t.Parallel()
			r := command([]string{"OUTBOX_DATABASE_URL=" + test.dsn, twoSettings[1], "OUTBOX_LOG_LEVEL=error"}, strings.Fields(test.args)...)
			r.expect(t, cli.ExitSchema, "", "outbox-relay: schema mismatch: "+test.want+"\n")
		})
	}
}

// The program brings roles.sql along. What the script refuses, and what it warns of, comes with its
// hint.
func TestMigrateRoles(t *testing.T) {
	t.Parallel()
	server := pgtest.StartCopy(t, localpg.Options{}) // roles belong to all of it
	script, err := os.ReadFile("../../migrations/roles.sql")
	pgtest.Must(t, err)
	runMigrate(server.DSN(""), "roles", "--print").expect(t, 0, string(script), "")

	db := open(t, server.DSN(""))
	execute(t, db, "CREATE ROLE shop_owner LOGIN; CREATE ROLE shop_relay LOGIN; CREATE SCHEMA shop AUTHORIZATION shop_owner")
	asOwner := strings.Replace(server.DSN(""), "postgres@", "shop_owner@", 1)
	runMigrate(asOwner, "roles", "--schema=shop").expect(t, cli.ExitFailed, "", "outbox-relay: run migrations/roles.sql: "+
		"ERROR: schema shop has no tables to grant rights on (SQLSTATE P0001); Migrate first. If the tables are in another schema, have it first on the search_path: PGOPTIONS='-c search_path=NAME' psql …\n")
	if r := runMigrate(asOwner, "up", "--schema=shop"); r.code != 0 {
		t.Fatalf("%+v", r)
	}
	if r := runMigrate(asOwner, "roles", "--schema=shop"); r.code != cli.ExitFailed || !strings.HasSuffix(r.stderr, "; Run this script as a superuser, or first: ALTER ROLE shop_owner CREATEROLE;\n") {
		t.Errorf("%+v", r)
	}
	const done = "roles have what this version needs; a login gets one by: GRANT outbox_relay TO …\n"
	runMigrate(server.DSN(""), "roles", "--schema=shop").expect(t, 0, done, "")
	runMigrate(asOwner, "roles", "--schema=shop").expect(t, 0, done, "")
	runMigrate(server.DSN(""), "up", "--schema=other")
	for _, prefix := range []string{"--prefix=other_", "--prefix="} { // the second run finds it
		runMigrate(server.DSN(""), "roles", "--schema=other", prefix).expect(t, 0, strings.Replace(done, "GRANT ", "GRANT other_", 1), "")
	}
	execute(t, db, "CREATE SCHEMA receiver AUTHORIZATION shop_owner")
	if r := runMigrate(asOwner, "up", "--set=inbox", "--schema=receiver"); r.code != 0 {
		t.Fatalf("%+v", r)
	}
	runMigrate(asOwner, "roles", "--schema=receiver").expect(t, 0, strings.Replace(done, "GRANT outbox_relay TO …", "GRANT inbox_receiver TO …, or GRANT inbox_support TO …", 1), "")
	execute(t, db, "ALTER SCHEMA shop OWNER TO postgres; REVOKE CREATE ON SCHEMA shop FROM shop_owner")
	if r := runMigrate(server.DSN(""), "roles", "--schema=shop"); r.code != 0 || !strings.HasPrefix(r.stderr, "warning: shop_owner may not create tables in schema shop: nothing will be archived; Run this, as postgres or a superuser: GRANT CREATE ON SCHEMA shop TO shop_owner;\n") {
		t.Errorf("%+v", r)
	}
	execute(t, db, "GRANT outbox_relay TO shop_relay")
	command([]string{"OUTBOX_DATABASE_URL=" + strings.Replace(server.DSN(""), "postgres@", "shop_relay@", 1)}, "status", "--schema=shop").holds(t, 0, "", "")
}
