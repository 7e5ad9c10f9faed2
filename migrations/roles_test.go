package migrations_test

import (
	"os"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// An owner who may create roles needs no superuser; and where nothing could be granted the script fails, instead of leaving it
// to warnings.
func TestRolesAreGrantedByTheOwner(t *testing.T) {
	t.Parallel()
	server := pgtest.Start(t, localpg.Options{}) // roles belong to all of it
	script, err := os.ReadFile("roles.sql")
	if err != nil {
		t.Fatal(err)
	}
	run := func(role, statements string) error {
		_, err := open(t, server.DSN("")+"&search_path=shop&role="+role).ExecContext(t.Context(), statements)
		return err
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
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
	must(run("shop_app", `INSERT INTO processed_events (source, idempotency_key, processing_state) VALUES ('s', 'k', 'succeeded')`))
	must(run(superuser, `DROP TABLE outbox CASCADE`))
	refused(run("shop_app", string(script)), "shop_app may not grant rights on processed_events: run this as its owner, shop_owner")
	must(run(superuser, string(script)))
}
