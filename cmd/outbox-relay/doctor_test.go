package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay/ops"
)

// A fault is planted into a healthy outbox, and doctor finds it.
type fault struct {
	plant func(t *testing.T, p *patient)
	check string // that finds it
	says  string // a part of the finding
	mends string // a part of its remedy
}

// A patient is a healthy outbox on a server that is as production has it.
type patient struct {
	server *localpg.Server
	dsn    string
	env    []string
	stop   func() // stops its relay
}

func (p *patient) execute(t *testing.T, statements ...string) {
	t.Helper()
	for _, statement := range statements {
		execute(t, open(t, p.dsn), statement)
	}
}

// set changes the environment of doctor.
func (p *patient) set(name, value string) {
	p.env = append(p.env, name+"="+value)
}

var faults = map[string]fault{
	"fsync": {func(t *testing.T, p *patient) { p.set("OUTBOX_DATABASE_URL", pgtest.New(t, migrations.Outbox)) }, "server", "fsync or full_page_writes is off", "ALTER SYSTEM SET fsync = on"},
	"standby": {func(t *testing.T, p *patient) {
		standby := pgtest.Start(t, localpg.Options{CopyOf: pgtest.BaseBackup(t, p.server, true)})
		p.set("OUTBOX_DATABASE_URL", standby.DSN(databaseOf(t, p.dsn)))
	}, "server", "this server is a standby", "primary"},
	"read only": {func(t *testing.T, p *patient) {
		p.execute(t, "ALTER DATABASE "+databaseOf(t, p.dsn)+" SET default_transaction_read_only = on")
	}, "server", "transactions are read-only", "RESET default_transaction_read_only"},
	"commits that are not durable": {func(t *testing.T, p *patient) {
		p.execute(t, "ALTER DATABASE "+databaseOf(t, p.dsn)+" SET synchronous_commit = off")
	}, "server", "synchronous_commit is off", "RESET synchronous_commit"},
	"an old transaction": {func(t *testing.T, p *patient) {
		conn, err := pgx.Connect(t.Context(), p.dsn)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
		if _, err := conn.Exec(t.Context(), "BEGIN; SELECT pg_current_xact_id()"); err != nil {
			t.Fatal(err)
		}
		p.set("OUTBOX_ALERT_VACUUM_BLOCKED_OVER", "1ms")
	}, "transactions", "has had a transaction open for", "pg_terminate_backend("},
	"no schema": {func(t *testing.T, p *patient) { p.execute(t, "DROP TABLE outbox_schema_version") }, "schema", "there is no outbox schema here", "outbox-relay migrate up"},
	"rights": {func(t *testing.T, p *patient) {
		p.execute(t, "CREATE ROLE looks LOGIN", "GRANT SELECT ON ALL TABLES IN SCHEMA public TO looks")
		p.set("OUTBOX_DATABASE_URL", asRole(t, p.dsn, "looks"))
	}, "rights", "it lacks DELETE on outbox_alert, ", "GRANT outbox_relay"},
	"a missing index": {func(t *testing.T, p *patient) { p.execute(t, "DROP INDEX outbox_delivery_due") }, "indexes", "the index outbox_delivery_due is missing", "CREATE INDEX CONCURRENTLY"},
	"an invalid index": {func(t *testing.T, p *patient) {
		p.execute(t, "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'outbox_delivery_aside'::regclass")
	}, "indexes", "the index outbox_delivery_aside is invalid", "REINDEX INDEX CONCURRENTLY outbox_delivery_aside"},
	"a disabled trigger": {func(t *testing.T, p *patient) { p.execute(t, "ALTER TABLE outbox DISABLE TRIGGER outbox_fan_out") }, "triggers", "the trigger outbox_fan_out", "ENABLE TRIGGER outbox_fan_out"},
	"a disabled check of updates": {func(t *testing.T, p *patient) {
		p.execute(t, "ALTER TABLE outbox_delivery DISABLE TRIGGER outbox_delivery_columns_are_sane")
	}, "triggers", "the trigger outbox_delivery_columns_are_sane is disabled", "ENABLE TRIGGER outbox_delivery_columns_are_sane"},
	"a missing guard of the audit": {func(t *testing.T, p *patient) {
		p.execute(t, "DROP TRIGGER outbox_audit_is_kept ON outbox_audit")
	}, "triggers", "the trigger outbox_audit_is_kept is missing", "migrations/outbox/00007_keep_audit.sql"},
	"a trigger that calls another function": {func(t *testing.T, p *patient) {
		p.execute(t, "DROP TRIGGER outbox_route_added ON outbox_route", `CREATE FUNCTION hand() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
			CREATE TRIGGER outbox_route_added AFTER INSERT ON outbox_route REFERENCING NEW TABLE AS new_route FOR EACH STATEMENT EXECUTE FUNCTION hand()`)
	}, "triggers", "the trigger outbox_route_added is made to call hand", "migrations/outbox/00002_delivery.sql"},
	"a function replaced by hand": {func(t *testing.T, p *patient) {
		p.execute(t, `CREATE OR REPLACE FUNCTION outbox_check_event(id bigint, event_type text, event_version integer, payload json, idempotency_key text, ordering_key text,
			related_reference text, headers jsonb, available_at timestamptz) RETURNS integer LANGUAGE sql SET search_path = pg_catalog, pg_temp AS 'SELECT 2'`)
	}, "functions", "the function outbox_check_event is not that of the migrations", "migrations/outbox/00010_name_refused_event.sql"},
	"a function without its search_path": {func(t *testing.T, p *patient) { p.execute(t, "ALTER FUNCTION outbox_fan_out() RESET search_path") }, "functions", "the function outbox_fan_out is without its settings (search_path=pg_catalog, pg_temp, jit=off)", "00006"},
	"a function open to all": {func(t *testing.T, p *patient) {
		p.execute(t, "GRANT EXECUTE ON FUNCTION outbox_create_deliveries(bigint, integer) TO PUBLIC")
	}, "functions", "the function outbox_create_deliveries is open to PUBLIC", "REVOKE ALL ON FUNCTION outbox_create_deliveries"},
	"a missing constraint": {func(t *testing.T, p *patient) {
		p.execute(t, "ALTER TABLE outbox_alert DROP CONSTRAINT outbox_alert_counts_are_sane")
	}, "constraints", "the constraint outbox_alert_counts_are_sane is missing", "migrations/outbox/00003_relay.sql"},
	"a missing domain": {func(t *testing.T, p *patient) {
		p.execute(t, "ALTER TABLE outbox ALTER created_at TYPE timestamptz", "DROP DOMAIN outbox_created_at")
	}, "constraints", "the domain outbox_created_at is missing", "migrations/outbox/00001_event.sql"},
	"a missing table": {func(t *testing.T, p *patient) { p.stop(); p.execute(t, "DROP TABLE outbox_void") }, "schema", "the table outbox_void is missing", "migrations/outbox/00003_relay.sql"},
	"another search_path": {func(t *testing.T, p *patient) {
		p.execute(t, "CREATE SCHEMA app", "ALTER DATABASE "+databaseOf(t, p.dsn)+" SET search_path = app")
	}, "schema", "search_path does not lead to the outbox, which is in the schema public", "search_path=public"},
	"a role that lost rights": {func(t *testing.T, p *patient) {
		script, err := os.ReadFile("../../migrations/roles.sql")
		if err != nil {
			t.Fatal(err)
		}
		p.execute(t, string(script), "REVOKE SELECT ON outbox_audit FROM outbox_reader")
	}, "rights", "the role outbox_reader lacks SELECT on outbox_audit", "outbox-relay migrate roles"},
	"autovacuum": {func(t *testing.T, p *patient) {
		p.execute(t, "ALTER TABLE outbox_delivery SET (autovacuum_enabled = off)")
	}, "vacuum", "autovacuum is off for outbox_delivery", "RESET (autovacuum_enabled)"},
	"another environment": {func(_ *testing.T, p *patient) { p.stop(); p.set("OUTBOX_ENVIRONMENT", "staging") }, "identity", "relays are quarantined here", "outbox-relay identity show"},
	"events without deliveries": {func(t *testing.T, p *patient) {
		p.execute(t, "ALTER TABLE outbox DISABLE TRIGGER outbox_fan_out", "INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', 'lost')", "ALTER TABLE outbox ENABLE TRIGGER outbox_fan_out")
	}, "events", "1 event has no deliveries", "outbox-relay events create-deliveries"},
	"an unserved destination": {func(t *testing.T, p *patient) {
		p.execute(t, "INSERT INTO outbox_route VALUES ('old', 'old'); INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('old', '{}', 'old')")
	}, "deliveries", `1 delivery is unserved: no running relay has "old"`, "outbox-relay discard --destination old"},
	"no relay":               {func(_ *testing.T, p *patient) { p.stop() }, "deliveries", "No relay is running", "outbox-relay run"},
	"a closed port":          {func(t *testing.T, p *patient) { p.set("OUTBOX_DESTINATION_URL", closedPort(t)) }, "destinations", "connection refused", "Start the receiver"},
	"an unknown host":        {func(_ *testing.T, p *patient) { p.set("OUTBOX_DESTINATION_URL", "https://does-not-exist.invalid/") }, "destinations", "does-not-exist.invalid", "destinations.default.url"},
	"an unknown certificate": {func(t *testing.T, p *patient) { p.set("OUTBOX_DESTINATION_URL", overTLS(t)) }, "destinations", "certificate", "destinations.default.tls"},
	"no secret":              {func(_ *testing.T, p *patient) { p.env = p.env[:2] }, "destinations", `requests to "default" are not signed`, "signing_secrets"},
	"lease below timeout":    {func(_ *testing.T, p *patient) { p.set("OUTBOX_LEASE", "5s") }, "configuration", "OUTBOX_LEASE", "config check"},
	"memory below not_after": {func(_ *testing.T, p *patient) { p.set("OUTBOX_RETENTION_PROCESSED_EVENTS", "48h") }, "configuration", "not_after", "config check"},
	"a destination of its own": {func(t *testing.T, p *patient) {
		file := writeFile(t, filepath.Join(t.TempDir(), "relay.yaml"), "destinations: {new: {url: '"+answering(t, http.StatusOK)+"'}}\n")
		p.env = []string{p.env[0], "OUTBOX_CONFIG=" + file}
	}, "deliveries", `no running relay has the destination "new"`, "SIGHUP"},
}

// overTLS returns the URL of a receiver whose certificate is known to no one.
func overTLS(t *testing.T) string {
	t.Helper()
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	server.StartTLS()
	t.Cleanup(server.Close)
	return server.URL
}

// asRole returns the DSN for another role, which needs no password.
func asRole(t *testing.T, dsn, role string) string {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.User(role)
	query := u.Query()
	query.Del("user")
	u.RawQuery = query.Encode()
	return u.String()
}

func databaseOf(t *testing.T, dsn string) string {
	t.Helper()
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	return config.Database
}

// doctor finds every fault, with its remedy, and nothing in an outbox that is well.
func TestDoctor(t *testing.T) {
	t.Parallel()
	// In memory, with the settings of production: the patients are made from one template.
	server := pgtest.StartCopy(t, localpg.Options{Settings: map[string]string{"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}})
	if err := server.CreateDatabase(t.Context(), "template", ""); err != nil {
		t.Fatal(err)
	}
	pgtest.Migrate(t, server.DSN("template"), migrations.Outbox)
	receiver := answering(t, http.StatusOK)
	healthy := func(t *testing.T, name string) *patient {
		t.Helper()
		if err := server.CreateDatabase(t.Context(), name, "template"); err != nil {
			t.Fatal(err)
		}
		p := &patient{server: server, dsn: server.DSN(name)}
		p.env = []string{"OUTBOX_DATABASE_URL=" + p.dsn, "OUTBOX_DESTINATION_URL=" + receiver, "OUTBOX_SIGNING_SECRET=" + goodSecret, "OUTBOX_ENVIRONMENT=production"}
		r := start(t, p.env, "--poll-interval=1s")
		p.stop = sync.OnceFunc(func() { r.signals <- syscall.SIGTERM; <-r.code })
		t.Cleanup(p.stop)
		r.stderr.wait(t, `"registered"`, r.code)
		until(t, open(t, p.dsn), "SELECT EXISTS (SELECT FROM outbox_identity WHERE environment = 'production')")
		return p
	}
	t.Run("healthy", func(t *testing.T) {
		t.Parallel()
		p := healthy(t, "healthy")
		// Roles belong to the whole server. This one was made for another database of it.
		p.execute(t, "DO $$ BEGIN CREATE ROLE outbox_producer; EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$")
		command(p.env, "doctor").expect(t, 0, "Nothing is wrong. Checked: configuration, server, session, transactions, schema, rights, indexes, constraints, triggers, functions, vacuum, identity, events, deliveries, destinations.\n", "")
	})
	names := []string{}
	for name := range faults {
		names = append(names, name)
	}
	for i, name := range names {
		t.Run(name, func(t *testing.T) {
			testsize.OneIn(t, 3)
			t.Parallel()
			f := faults[name]
			p := healthy(t, fmt.Sprint("patient", i))
			f.plant(t, p)
			r := command(p.env, "doctor", "--json")
			var found ops.Checkup
			if err := json.Unmarshal([]byte(r.stdout), &found); err != nil {
				t.Fatalf("%v: %+v", err, r)
			}
			matches := 0
			for _, x := range found.Findings {
				if x.Check == f.check && strings.Contains(x.Text, f.says) && strings.Contains(x.Remedy, f.mends) {
					matches++
				}
				if x.Remedy != "" && strings.Contains(x.Text, x.Remedy) {
					t.Errorf("the remedy is said twice: %+v", x)
				}
			}
			if matches != 1 || (r.code != 0) != found.Failed() {
				t.Errorf("exit code %d, found %+v, want %s: %s; %s\n%s", r.code, found.Findings, f.check, f.says, f.mends, r.stderr)
			}
		})
	}
}

// Commands are printed on lines of their own: the comment behind one must not hide the next.
func TestDoctorPrintsEachCommandOnItsLine(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	for _, statement := range []string{
		"INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'default')",
		"INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('paid', '{}', 'k1')",
		"UPDATE outbox_delivery SET status = 'failed', attempts = 1, last_reason = 'rejected'",
	} {
		if _, err := open(t, dsn).ExecContext(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
	r := command([]string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=" + answering(t, http.StatusOK)}, "doctor")
	want := "\n         outbox-relay events list --status failed --destination default    # see why" +
		"\n         outbox-relay replay --destination default    # once the cause is mended\n"
	if !strings.Contains(r.stdout, want) {
		t.Errorf("%+v does not say %q", r, want)
	}
}
