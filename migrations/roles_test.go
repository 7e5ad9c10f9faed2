package migrations_test

import (
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// An owner who may create roles needs no superuser; and where nothing could be granted the script fails, instead of leaving it
// to warnings.
func TestRolesAreGrantedByTheOwner(t *testing.T) {
	t.Parallel()
	server := pgtest.StartCopy(t, localpg.Options{}) // roles belong to all of it
	script, err := os.ReadFile("roles.sql")
	pgtest.Must(t, err)
	run := func(role, statements string) error {
		_, err := open(t, server.DSN("")+"&search_path=shop&role="+role).ExecContext(t.Context(), statements)
		return err
	}
	must := func(err error) {
		t.Helper()
		pgtest.Must(t, err)
	}
	refused := func(err error, why string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("the script ended with %v, want %q", err, why)
		}
	}
	const superuser = "none" // who is logged in
	must(run(superuser, `CREATE ROLE shop_owner CREATEROLE; CREATE SCHEMA shop AUTHORIZATION shop_owner; CREATE ROLE shop_app`))
	refused(run("shop_owner", string(script)), "schema shop has no tables")
	for _, set := range []migrations.Set{migrations.Inbox, migrations.Outbox} {
		pgtest.Migrate(t, server.DSN("")+"&search_path=shop&role=shop_owner", set)
		must(run("shop_owner", string(script)))
		must(run("shop_owner", string(script)))
	}
	must(run(superuser, `GRANT inbox_receiver TO shop_app`))
	must(run("shop_app", `INSERT INTO processed_events (receiver, source, idempotency_key, processing_state) VALUES ('test', 's', 'k', 'succeeded')`))
	must(run(superuser, `DROP TABLE outbox CASCADE`))
	refused(run("shop_app", string(script)), "shop_app may not grant rights on processed_events: run this as its owner, shop_owner")
	must(run(superuser, string(script)))
}

// The owner of the tables may own neither the schema nor roles, and PUBLIC may have no right. Each refusal says what to run.
func TestRolesSayWhatIsMissing(t *testing.T) {
	t.Parallel()
	s := &shop{t, pgtest.StartCopy(t, localpg.Options{})}
	s.superuser(`
		REVOKE ALL ON SCHEMA public FROM PUBLIC;
		CREATE ROLE shop_owner LOGIN;
		GRANT CREATE, USAGE ON SCHEMA public TO shop_owner`)
	pgtest.Migrate(t, s.dsn("shop_owner"), migrations.Outbox)
	refused := func(why, hint string) {
		t.Helper()
		err := s.applyRoles("shop_owner")
		if err == nil || !strings.Contains(err.Error(), why) || !strings.Contains(hintOf(err), hint) {
			t.Errorf("the script ended with %v, hint %q; want %q, hint %q", err, hintOf(err), why, hint)
		}
	}
	refused("shop_owner may not create the role outbox_producer", "ALTER ROLE shop_owner CREATEROLE")
	s.superuser(`ALTER ROLE shop_owner CREATEROLE`)
	refused("shop_owner may not grant rights on schema public", "Run this script as "+s.superuserName())
	if err := s.applyRoles(s.superuserName()); err != nil {
		t.Error(err)
	}
	if err := s.applyRoles("shop_owner"); err != nil {
		t.Errorf("once the roles have USAGE: %v", err)
	}
	s.superuser(`REVOKE USAGE ON SCHEMA public FROM shop_owner`)
	refused("names no schema that is there and that shop_owner may use", "")
}

// Archiving makes partitions with the rights of the owner of the tables. Without CREATE it would fail a month later.
func TestRolesWarnOfAnOwnerWhoCannotArchive(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	s := newShop(t, migrations.Outbox)
	config, err := pgx.ParseConfig(s.dsn("shop_owner"))
	pgtest.Must(t, err)
	var warnings []string
	config.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { warnings = append(warnings, n.Message+"; "+n.Hint) }
	conn, err := pgx.ConnectConfig(t.Context(), config)
	pgtest.Must(t, err)
	defer conn.Close(t.Context())
	owner := &session{t, "shop_owner", conn}
	script, err := os.ReadFile("roles.sql")
	pgtest.Must(t, err)
	owner.exec(string(script))
	if len(warnings) > 0 {
		t.Errorf("an owner with the right is warned: %q", warnings)
	}
	s.superuser(`REVOKE CREATE ON SCHEMA public FROM shop_owner`)
	owner.exec(string(script))
	want := "shop_owner may not create tables in schema public: nothing will be archived; Run this, as " + s.superuserName() +
		" or a superuser: GRANT CREATE ON SCHEMA public TO shop_owner;"
	if len(warnings) != 1 || warnings[0] != want {
		t.Errorf("the warnings are %q, want %q", warnings, want)
	}
}
