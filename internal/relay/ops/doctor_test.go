package ops_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// A fault is planted into a healthy outbox, and an examination finds it.
type fault struct {
	plant func(p *patient)
	check string // that finds it
	says  string // a part of the finding
	mends string // a part of its remedy
}

// A patient is a healthy outbox on a server that is as production has it.
type patient struct {
	*relaytest.Database
	server *localpg.Server
	name   string // of the database
	dsn    string // that is examined
	cfg    ops.ExamineConfig
}

func (p *patient) execute(statements ...string) {
	p.Helper()
	for _, statement := range statements {
		p.Exec(statement)
	}
}

// openRange makes a relay have events in hand.
func (p *patient) openRange(relay int) {
	p.Exec(`INSERT INTO outbox_range (seq, relay_id, fence, base, target, low, upto, more, oldest_open_seq, taken_at)
		SELECT seq + 1, $1, 1, target, pg_current_snapshot(), 0, 9, false, seq + 1, now() - interval '3 minutes' FROM outbox_range`, relay)
}

// stop removes the only relay.
func (p *patient) stop() { p.execute("DELETE FROM outbox_relay") }

var faults = map[string]fault{
	"fsync": {func(p *patient) { p.dsn = pgtest.New(p, migrations.Outbox) }, "server", "fsync or full_page_writes is off", "ALTER SYSTEM SET fsync = on"},
	"standby": {func(p *patient) {
		p.dsn = pgtest.Start(p, localpg.Options{CopyOf: pgtest.BaseBackup(p, p.server, true)}).DSN(p.name)
	}, "server", "this server is a standby", "primary"},
	"read only": {func(p *patient) {
		p.execute("ALTER DATABASE " + p.name + " SET default_transaction_read_only = on")
	}, "server", "transactions are read-only", "RESET default_transaction_read_only"},
	"commits that are not durable": {func(p *patient) {
		p.execute("ALTER DATABASE " + p.name + " SET synchronous_commit = off")
	}, "server", "synchronous_commit is off", "RESET synchronous_commit"},
	"another encoding": {func(p *patient) {
		p.dsn = pgtest.InEncoding(p, "LATIN1")
	}, "server", "the outbox needs a database in UTF8, and this one is in LATIN1", "CREATE DATABASE … TEMPLATE template0 ENCODING 'UTF8'"},
	"an old transaction": {func(p *patient) {
		_, err := p.Begin().Exec(p.Context(), "SELECT pg_current_xact_id()")
		relaytest.Must(p, err)
		p.cfg.OldestTransaction = time.Millisecond
	}, "transactions", "has had a transaction open for", "pg_terminate_backend("},
	"a lock": {func(p *patient) {
		_, err := p.Begin().Exec(p.Context(), "LOCK TABLE outbox_delivery")
		relaytest.Must(p, err)
	}, "locks", ") holds AccessExclusiveLock on outbox_delivery, in a transaction of ", "pg_terminate_backend("},
	"a lock that waits": {func(p *patient) {
		_, err := p.Begin().Exec(p.Context(), "SELECT FROM outbox_delivery")
		relaytest.Must(p, err)
		ctx, stop := context.WithCancel(p.Context())
		var waiting sync.WaitGroup
		waiting.Go(func() { _, _ = p.Pool.Exec(ctx, "TRUNCATE outbox_delivery") })
		p.Cleanup(func() { stop(); waiting.Wait() })
		relaytest.Eventually(p, "the session that waits", func() bool {
			return relaytest.Row[bool](p.Database, "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)")
		})
	}, "locks", ") waits for AccessExclusiveLock on outbox_delivery behind [", "pg_terminate_backend("},
	"an event that no relay takes": {func(p *patient) {
		p.execute("ALTER TABLE outbox DISABLE TRIGGER USER", "INSERT INTO outbox (event_type, payload, idempotency_key, created_at) VALUES ('t', '{}', 'k', now() - interval '1 hour')", "ALTER TABLE outbox ENABLE TRIGGER USER")
	}, "deliveries", "no relay has taken them", "outbox-relay relays"},
	"no schema": {func(p *patient) { p.execute("DROP TABLE outbox_schema_version") }, "schema", "there is no outbox schema here", "outbox-relay migrate up"},
	"rights": {func(p *patient) {
		p.execute("CREATE ROLE looks LOGIN", "GRANT SELECT ON ALL TABLES IN SCHEMA public TO looks")
		p.dsn = strings.Replace(p.dsn, relaytest.Row[string](p.Database, "SELECT current_user::text")+"@", "looks@", 1)
	}, "rights", "it lacks DELETE on outbox_alert, ", "GRANT outbox_relay"},
	"a missing index": {func(p *patient) { p.execute("DROP INDEX outbox_delivery_due") }, "indexes", "the index outbox_delivery_due is missing", "CREATE INDEX CONCURRENTLY"},
	"an invalid index": {func(p *patient) {
		p.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'outbox_delivery_aside'::regclass")
	}, "indexes", "the index outbox_delivery_aside is invalid", "REINDEX INDEX CONCURRENTLY outbox_delivery_aside"},
	"a disabled trigger": {func(p *patient) { p.execute("ALTER TABLE outbox DISABLE TRIGGER outbox_is_immutable") }, "triggers", "the trigger outbox_is_immutable is disabled", "ENABLE TRIGGER outbox_is_immutable"},
	"a disabled check of updates": {func(p *patient) {
		p.execute("ALTER TABLE outbox_delivery DISABLE TRIGGER outbox_delivery_columns_are_sane")
	}, "triggers", "the trigger outbox_delivery_columns_are_sane is disabled", "ENABLE TRIGGER outbox_delivery_columns_are_sane"},
	"a missing guard of the audit": {func(p *patient) {
		p.execute("DROP TRIGGER outbox_audit_is_kept ON outbox_audit")
	}, "triggers", "the trigger outbox_audit_is_kept is missing", "migrations/outbox/00006_audit.sql"},
	"a trigger that calls another function": {func(p *patient) {
		p.execute("DROP TRIGGER outbox_route_added ON outbox_route", `CREATE FUNCTION hand() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
			CREATE TRIGGER outbox_route_added AFTER INSERT ON outbox_route REFERENCING NEW TABLE AS new_route FOR EACH STATEMENT EXECUTE FUNCTION hand()`)
	}, "triggers", "the trigger outbox_route_added is made to call hand", "migrations/outbox/00002_delivery.sql"},
	"a function replaced by hand": {func(p *patient) {
		p.execute(`CREATE OR REPLACE FUNCTION outbox_is_routed(event_id bigint) RETURNS boolean LANGUAGE sql STABLE SECURITY DEFINER
			SET search_path = pg_catalog, pg_temp AS 'SELECT true'`)
	}, "functions", "the function outbox_is_routed is not that of the migrations", "migrations/outbox/00003_relay.sql"},
	"a function without its search_path": {func(p *patient) { p.execute("ALTER FUNCTION outbox_wake() RESET search_path") }, "functions", "the function outbox_wake is without its settings (search_path=pg_catalog, pg_temp)", "00001_event.sql"},
	"a function open to all": {func(p *patient) {
		p.execute("GRANT EXECUTE ON FUNCTION outbox_create_deliveries(bigint, integer) TO PUBLIC")
	}, "functions", "the function outbox_create_deliveries is open to PUBLIC", "REVOKE ALL ON FUNCTION outbox_create_deliveries"},
	"a missing constraint": {func(p *patient) {
		p.execute("ALTER TABLE outbox_alert DROP CONSTRAINT outbox_alert_counts_are_sane")
	}, "constraints", "the constraint outbox_alert_counts_are_sane is missing", "migrations/outbox/00005_alert.sql"},
	"a missing domain": {func(p *patient) {
		p.execute("DROP TRIGGER outbox_is_immutable ON outbox", "ALTER TABLE outbox ALTER created_at TYPE timestamptz", "DROP DOMAIN outbox_created_at")
	}, "constraints", "the domain outbox_created_at is missing", "migrations/outbox/00001_event.sql"},
	"a missing table": {func(p *patient) { p.stop(); p.execute("DROP TABLE outbox_void") }, "schema", "the table outbox_void is missing", "migrations/outbox/00003_relay.sql"},
	"another search_path": {func(p *patient) {
		p.execute("CREATE SCHEMA app", "ALTER DATABASE "+p.name+" SET search_path = app")
	}, "schema", "search_path does not lead to the outbox, which is in the schema public", "search_path=public"},
	"a role that lost rights": {func(p *patient) {
		p.execute(migrations.Roles(), "REVOKE SELECT ON outbox_audit FROM outbox_reader")
	}, "rights", "the role outbox_reader lacks SELECT on outbox_audit", "outbox-relay migrate roles"},
	"applications that share an outbox": {func(p *patient) {
		p.execute(migrations.Roles(), "CREATE ROLE billing LOGIN IN ROLE outbox_producer", `CREATE ROLE "Web shop" LOGIN IN ROLE outbox_producer`)
	}, "rights", `2 logins share this outbox: "Web shop", billing; each can take the idempotency keys of the others, and hold up their ordering keys`, "an outbox in its own schema"},
	"autovacuum": {func(p *patient) {
		p.execute("ALTER TABLE outbox_delivery SET (autovacuum_enabled = off)")
	}, "vacuum", "autovacuum is off for outbox_delivery", "RESET (autovacuum_enabled)"},
	"another server's transaction ids": {func(p *patient) {
		p.execute("UPDATE outbox_intake SET system_identifier = 1")
	}, "identity", "no relay takes events: the transaction ids of the events are from another server", "outbox-relay identity show"},
	"no range": {func(p *patient) { p.execute("DELETE FROM outbox_range") }, "intake", "the table outbox_range or outbox_intake is empty", "restore both tables from a backup"},
	"another default": {func(p *patient) {
		p.execute("ALTER TABLE outbox ALTER xid SET DEFAULT '2'")
	}, "intake", "the column xid of outbox has not the default of the migrations ('2'::xid8)", "00001_event.sql"},
	"a range that stays open": {func(p *patient) { p.openRange(1) }, "intake", "relay 1 test has had events in hand for 3m", "the log of that relay"},
	"a range of a silent relay": {func(p *patient) {
		p.openRange(1)
		p.execute("UPDATE outbox_relay SET heartbeat_at = now() - interval '1 minute'")
	}, "intake", " (range 2), and is silent", "outbox-relay run"},
	"a range that no relay takes over": {func(p *patient) { p.openRange(7) }, "intake", "relay 7 had events in hand when it ended, 3m", "outbox-relay run"},
	"another environment":              {func(p *patient) { p.stop(); p.cfg.Environment = "staging" }, "identity", "relays are quarantined here", "outbox-relay identity show"},
	"another environment beside others": {func(p *patient) {
		p.execute(`INSERT INTO outbox_relay (name, version, quarantined) VALUES ('other', '', 'its environment is "staging"')`)
	}, "deliveries", `Relay "other" is quarantined and sends nothing, while others work: its environment is "staging".`, "outbox-relay identity show"},
	"events without deliveries": {func(p *patient) {
		p.execute("INSERT INTO outbox (event_type, payload, idempotency_key, xid) VALUES ('t', '{}', 'loaded', '2'), ('t', '{}', 'new', pg_current_xact_id())")
	}, "events", "1 event has no deliveries", "outbox-relay events create-deliveries"},
	"a delivery of several was deleted": {func(p *patient) {
		p.execute("INSERT INTO outbox_route VALUES ('t', 'second')", "INSERT INTO outbox (event_type, payload, idempotency_key, xid) SELECT 't', '{}', 'e-' || i, '2' FROM generate_series(1, 4) i",
			"SELECT outbox_create_deliveries(0, 10)", "DELETE FROM outbox_delivery d USING outbox o WHERE o.id = d.event_id AND d.destination = 'second' AND o.idempotency_key IN ('e-1', 'e-3')")
	}, "events", `1 event has no delivery to "second", though others of their type before and after have one; the first is event 3.`, "A delivery was deleted"},
	"an unserved destination": {func(p *patient) {
		p.execute("INSERT INTO outbox_route VALUES ('old', 'old'); INSERT INTO outbox (event_type, payload, idempotency_key, xid) VALUES ('old', '{}', 'old', '2')",
			"SELECT outbox_create_deliveries(0, 10)")
	}, "deliveries", `1 delivery is unserved: no running relay has "old"`, "outbox-relay discard --destination old"},
	"no relay":                        {func(p *patient) { p.stop() }, "deliveries", "No relay is running", "outbox-relay run"},
	"a closed port":                   {func(p *patient) { p.cfg.Destinations[0].URL = "http://127.0.0.1:1" }, "destinations", "connection refused", "Start the receiver"},
	"an unknown host":                 {func(p *patient) { p.cfg.Destinations[0].URL = "https://does-not-exist.invalid/" }, "destinations", "does-not-exist.invalid", "destinations.default.url"},
	"an unknown certificate":          {func(p *patient) { p.cfg.Destinations[0].URL = overTLS(p) }, "destinations", "certificate", "destinations.default.tls"},
	"no secret":                       {func(p *patient) { p.cfg.Destinations[0].SigningSecrets = nil }, "destinations", `requests to "default" are not signed`, "signing_secrets"},
	"a destination that no relay has": {func(p *patient) { p.cfg.Destinations[0].Name = "new" }, "deliveries", `no running relay has the destination "new"`, "SIGHUP"},
	"a pooler":                        {func(p *patient) { p.cfg.Session = func(context.Context) error { return pg.ErrPooler } }, "session", "a connection pooler stands before the database", "database.listen_url"},
}

// overTLS returns the URL of a receiver whose certificate is known to no one.
func overTLS(t testing.TB) string {
	t.Helper()
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	server.StartTLS()
	t.Cleanup(server.Close)
	return server.URL
}

// An examination finds every fault, with its remedy, and nothing in an outbox that is well.
func TestExamine(t *testing.T) {
	t.Parallel()
	// In memory, with the settings of production: the patients are made from one template.
	server := pgtest.StartCopy(t, localpg.Options{Settings: map[string]string{"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}})
	relaytest.Must(t, server.CreateDatabase(t.Context(), "template", ""))
	pgtest.Migrate(t, server.DSN("template"), migrations.Outbox)
	receiver := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(receiver.Close)
	healthy := func(t *testing.T, name string) *patient {
		t.Helper()
		relaytest.Must(t, server.CreateDatabase(t.Context(), name, "template"))
		dsn := server.DSN(name)
		p := &patient{Database: &relaytest.Database{TB: t, DSN: dsn, Pool: pgtest.Pool(t, dsn)}, server: server, name: name, dsn: dsn}
		p.cfg = ops.ExamineConfig{
			Environment:  "production",
			Destinations: []post.Destination{{Name: "default", URL: receiver.URL, SigningSecrets: make([]webhook.Secret, 1)}},
		}
		p.Route()
		p.Serve("default")
		_, err := ops.New(p.Pool).AcceptIdentity(t.Context(), "production")
		relaytest.Must(t, err)
		return p
	}
	examine := func(p *patient) ops.Checkup {
		p.Helper()
		found, err := ops.New(pgtest.Pool(p, p.dsn)).Examine(p.Context(), p.cfg)
		relaytest.Must(p, err)
		return found
	}
	t.Run("healthy", func(t *testing.T) {
		t.Parallel()
		p := healthy(t, "healthy")
		// Roles belong to the whole server. This one was made for another database of it.
		p.execute("DO $$ BEGIN CREATE ROLE outbox_producer; EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$")
		if found := examine(p); len(found.Findings) != 0 || len(found.Checks) != 16 || found.Failed() {
			t.Errorf("%+v", found)
		}
	})
	number := 0
	for name, f := range faults {
		number++
		database := fmt.Sprint("patient", number)
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := healthy(t, database)
			f.plant(p)
			found := examine(p)
			matches := 0
			for _, x := range found.Findings {
				if x.Check == f.check && strings.Contains(x.Text, f.says) && strings.Contains(x.Remedy, f.mends) {
					matches++
				}
				if x.Remedy != "" && strings.Contains(x.Text, x.Remedy) {
					t.Errorf("the remedy is said twice: %+v", x)
				}
			}
			if matches != 1 {
				t.Errorf("found %+v, want %s: %s; %s", found.Findings, f.check, f.says, f.mends)
			}
		})
	}
}

// Of many findings of one kind some are told, and how many are left out.
func TestCheckupIsBounded(t *testing.T) {
	t.Parallel()
	c := ops.Checkup{Findings: []ops.Finding{{Check: "server", Level: ops.LevelError, Text: "first"}}}
	for i := range 500 {
		c.Findings = append(c.Findings, ops.Finding{Check: "destinations", Level: []string{ops.LevelError, ops.LevelWarning}[i%2], Text: strconv.Itoa(i)})
	}
	c.Findings = append(c.Findings, ops.Finding{Check: "intake", Level: ops.LevelWarning, Text: "last"})
	b := c.Bounded()
	if len(b.Findings) != 202 || b.FindingsLeft != 300 || b.Findings[201].Text != "last" || len(c.Findings) != 502 {
		t.Errorf("%d findings, %d left, the last %+v", len(b.Findings), b.FindingsLeft, b.Findings[len(b.Findings)-1])
	}
}
