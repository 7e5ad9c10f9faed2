package outbox_test

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// logins are what an attacker may have taken over, each with the role of migrations/roles.sql that
// it was granted. The stranger may connect to the database, and that is all.
var logins = map[string]string{
	"producer": "outbox_producer", "neighbour": "outbox_producer", "relay": "outbox_relay", "reader": "outbox_reader", "support": "outbox_support",
	"receiver": "inbox_receiver", "stranger": "",
}

// newTarget returns a database that holds an outbox and an inbox, with the roles and the logins.
func newTarget(t *testing.T) *database {
	t.Helper()
	dsn := pgtest.New(t, migrations.Outbox, migrations.Inbox)
	db := &database{t: t, dsn: dsn, pool: pgtest.Pool(t, dsn)}
	db.applyRoles()
	rolesLock.Lock()
	defer rolesLock.Unlock()
	for login, role := range logins {
		if len(db.strings(`SELECT rolname FROM pg_roles WHERE rolname = $1`, "attack_"+login)) > 0 {
			continue
		}
		db.exec(`CREATE ROLE attack_` + login + ` LOGIN`)
		if role != "" {
			db.exec(`GRANT ` + role + ` TO attack_` + login)
		}
	}
	return db
}

// A session belongs to one login. SET ROLE in a superuser's session would not do: an attacker could
// undo it.
type session struct {
	t    *testing.T
	name string
	conn *pgx.Conn
}

func (db *database) login(name string) *session {
	db.t.Helper()
	u, err := url.Parse(db.dsn)
	pgtest.Must(db.t, err)
	u.User = url.User("attack_" + name)
	cfg, err := pgx.ParseConfig(u.String())
	pgtest.Must(db.t, err)
	cfg.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol // several statements in one, as psql sends them
	conn, err := pgx.ConnectConfig(db.t.Context(), cfg)
	pgtest.Must(db.t, err)
	db.t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(db.t.Context())) })
	return &session{db.t, name, conn}
}

// tries runs a statement, undoes it, and returns with what PostgreSQL refused it, "" for nothing.
func (s *session) tries(statement string) string {
	s.t.Helper()
	ctx := s.t.Context()
	tx, err := s.conn.Begin(ctx)
	pgtest.Must(s.t, err)
	_, err = tx.Exec(ctx, statement)
	pgtest.Must(s.t, tx.Rollback(ctx))
	return refusal(s.t, err)
}

// runs runs a statement that is no attack.
func (s *session) runs(statement string) {
	s.t.Helper()
	_, err := s.conn.Exec(s.t.Context(), statement)
	if err != nil {
		s.t.Fatalf("%s: %s: %v", s.name, statement, err)
	}
}

// decoys are temporary tables of the names and columns of all real ones, without the domains, which
// others may not use. Their triggers record the role that they run as.
func (db *database) decoys() string {
	db.t.Helper()
	decoys := db.strings(`
		SELECT format('CREATE TEMP TABLE %I (%s); CREATE TRIGGER spy BEFORE INSERT OR UPDATE OR DELETE ON pg_temp.%I FOR EACH ROW EXECUTE FUNCTION pg_temp.spy();
			CREATE TRIGGER spy_on_statements BEFORE INSERT OR UPDATE OR DELETE ON pg_temp.%I FOR EACH STATEMENT EXECUTE FUNCTION pg_temp.spy();',
			relname, (SELECT string_agg(format('%I %s', attname, format_type(coalesce(nullif(t.typbasetype, 0), t.oid), atttypmod)), ', ' ORDER BY attnum)
			          FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid WHERE a.attrelid = c.oid AND attnum > 0 AND NOT attisdropped), relname, relname)
		FROM pg_class c WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') ORDER BY relname`)
	return `CREATE TEMP TABLE caught (role name);
		CREATE FUNCTION pg_temp.spy() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO pg_temp.caught VALUES (current_user); RETURN NEW; END';
		` + strings.Join(decoys, "\n") + `
		CREATE TEMP SEQUENCE outbox_armed;
		SET search_path = pg_temp, public`
}

// No temporary table of the caller's stands in for a real one, neither in a default nor in a
// function that runs with its owner's rights: a trigger on such a table would run with them, too.
// Every function has something to do here.
func TestSecurityTemporaryTables(t *testing.T) {
	t.Parallel()
	db := newTarget(t)
	db.exec(`INSERT INTO outbox_route VALUES ('*', 'logistics'); SELECT setval('outbox_armed', (extract(epoch FROM now()) * 1000)::bigint + 600000)`)
	decoys := db.decoys()
	caught := func(s *session, by string) {
		t.Helper()
		var roles string
		pgtest.Must(t, s.conn.QueryRow(t.Context(), `SELECT coalesce(string_agg(role, ' '), '') FROM pg_temp.caught`).Scan(&roles))
		testkit.Equal(t, "roles that "+by+" lent to the decoys", roles, "")
	}
	producer := db.login("producer")
	producer.runs(decoys)
	producer.runs(`INSERT INTO public.outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'old'), ('t', '1', 'missing')`)
	caught(producer, "an insert")
	relay := db.login("relay")
	relay.runs(decoys)
	relay.runs(`SELECT public.outbox_cover_events(0, 100, '3:3:')`) // no event is visible in this snapshot
	caught(relay, "outbox_cover_events")
	testkit.Equal(t, "deliveries", db.strings(`SELECT event_id || destination FROM outbox_delivery ORDER BY 1`), []string{"1logistics", "2logistics"})

	db.exec(`ALTER TABLE outbox DISABLE TRIGGER ALL; UPDATE outbox SET created_at = '2020-01-01' WHERE idempotency_key = 'old'; ALTER TABLE outbox ENABLE TRIGGER ALL;
		UPDATE outbox_delivery SET status = 'delivered', delivered_at = '2020-01-01', next_attempt_at = '2020-01-01' WHERE event_id = 1;
		DELETE FROM outbox_delivery WHERE event_id = 2;
		INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay_id, destination, outcome, reason) VALUES (1, 1, '2020-01-01', 1, 1, 1, 'x', 'retry', 'x');
		INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, received_at, processed_at) VALUES ('test', 's', 'k', 'succeeded', '2020-01-01', '2020-01-01')`)
	for call, counted := range map[string]string{
		`outbox_is_routed(1)`:                                               `SELECT true`,
		`outbox_create_deliveries()`:                                        `SELECT count(*) = 1 FROM outbox_delivery WHERE event_id = 2`,
		`outbox_archive_batch(0, 100, interval '400 days', false)`:          `SELECT count(*) = 1 FROM outbox_archive`,
		`outbox_prune_attempts(0, 100, interval '400 days', false)`:         `SELECT count(*) = 0 FROM outbox_attempt`,
		`outbox_prune_processed_events(0, 100, interval '400 days', true)`:  `SELECT true`,
		`outbox_prune_processed_events(0, 100, interval '400 days', false)`: `SELECT count(*) = 1 FROM inbox_forgotten`,
	} {
		relay.runs(`SELECT public.` + call)
		caught(relay, call)
		testkit.Equal(t, "done: "+call, db.strings(`SELECT CASE WHEN (`+counted+`) THEN 'yes' ELSE 'no' END`), []string{"yes"})
	}
	db.exec(`UPDATE outbox_archive SET archived_at = '2020-01-01'`)
	relay.runs(`SELECT public.outbox_drop_archive(interval '400 days', false, '')`)
	caught(relay, "outbox_drop_archive")
	testkit.Equal(t, "partitions", db.strings(`SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'outbox_archive'::regclass`), []string{})
}

// What each login may try to become more than it is, or to see more than roles.sql shows it: all of
// it is refused.
func TestSecurityNoLoginRises(t *testing.T) {
	t.Parallel()
	db := newTarget(t)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{"salary": 1}', 'of the neighbour')`)
	db.exec(`ANALYZE`)
	for login := range logins {
		s := db.login(login)
		for _, statement := range []string{
			`SET ROLE postgres`,
			`SET SESSION AUTHORIZATION postgres`,
			`SET session_replication_role = replica`,
			`ALTER ROLE postgres SET search_path = evil`,
			`ALTER ROLE outbox_relay SUPERUSER`,
			`ALTER DATABASE ` + s.conn.Config().Database + ` SET search_path = evil`,
			`GRANT outbox_relay, outbox_producer, outbox_reader TO attack_stranger`,
			`GRANT pg_read_all_data TO attack_` + login,
			`CREATE ROLE evil`,
			`CREATE SCHEMA evil`,
			`CREATE EXTENSION dblink`,
			`CREATE EVENT TRIGGER evil ON ddl_command_start EXECUTE FUNCTION outbox_refuse_update()`,
			`CREATE PUBLICATION evil FOR TABLE outbox`,
			`CREATE STATISTICS evil ON event_type, payload FROM outbox`,
			`CREATE TEMP TABLE evil () INHERITS (outbox)`,
			`CREATE FUNCTION pg_temp.evil() RETURNS void LANGUAGE internal AS 'evil'`,
			`ALTER FUNCTION outbox_wake() OWNER TO CURRENT_USER`,
			`CREATE TRIGGER evil AFTER INSERT ON pg_temp.x EXECUTE FUNCTION outbox_count_change()`,
			`ALTER SCHEMA public RENAME TO evil`,
			`REINDEX TABLE outbox`,
			`CLUSTER outbox USING outbox_pkey`,
			`COMMENT ON TABLE outbox IS 'evil'`,
			`COPY pg_temp.x FROM PROGRAM 'id'`,
			`SELECT pg_read_file('/etc/passwd')`,
			`SELECT lo_import('/etc/passwd')`,
			`SELECT pg_create_physical_replication_slot('evil')`,
			`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'postgres'`,
		} {
			statement = `CREATE TEMP TABLE x (t text); ` + statement
			testkit.Equal(t, login+": "+statement, s.tries(statement), insufficientPrivilege)
		}
		if login == "relay" || login == "reader" {
			continue // may see events
		}
		for _, statement := range []string{
			`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'of the neighbour') ON CONFLICT (idempotency_key) DO UPDATE SET payload = '2'`,
			`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'mine') RETURNING id`,
			`WITH mine AS (INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'mine') RETURNING payload) SELECT * FROM mine`,
			`COPY outbox TO STDOUT`,
			`COPY outbox (payload) TO STDOUT`,
			`EXPLAIN ANALYZE SELECT payload FROM outbox`,
			`CREATE TEMP TABLE mine (LIKE outbox)`,
			`CREATE TEMP VIEW mine AS SELECT * FROM outbox; SELECT * FROM mine`,
			`SELECT currval('outbox_id_seq')`,
			`DO 'BEGIN PERFORM FROM outbox; END'`,
		} {
			testkit.Equal(t, login+": "+statement, s.tries(statement), insufficientPrivilege)
		}
		var seen int
		pgtest.Must(t, s.conn.QueryRow(t.Context(), `SELECT count(*) FROM pg_stats WHERE schemaname = 'public'
			AND tablename IN ('outbox', 'outbox_delivery', 'outbox_destination', 'outbox_identity', 'outbox_alert')`).Scan(&seen))
		testkit.Equal(t, "statistics that "+login+" sees", seen, 0)
	}
}

// A login with CONNECT alone listens, leaves a transaction open and fills the server's queue of
// notifications. Producers insert all the same: an event that wakes no relay is found by polling.
// PostgreSQL 17 lets the queue be small enough to try.
func TestSecurityFullNotificationQueue(t *testing.T) {
	t.Parallel()
	if newDatabase(t).strings(`SELECT CASE WHEN current_setting('server_version_num')::int < 170000 THEN 'old' ELSE 'new' END`)[0] == "old" {
		t.Skip("the queue holds 8 GB before PostgreSQL 17")
	}
	server := pgtest.StartCopy(t, localpg.Options{Settings: map[string]string{"max_notify_queue_pages": "64"}})
	pgtest.Migrate(t, server.DSN(""), migrations.Outbox)
	db := &database{t: t, dsn: server.DSN(""), pool: pgtest.Pool(t, server.DSN(""))}
	db.applyRoles()
	for _, login := range []string{"producer", "stranger"} {
		db.exec(`CREATE ROLE attack_` + login + ` LOGIN`)
	}
	db.exec(`GRANT outbox_producer TO attack_producer`)
	db.exec(`SELECT setval('outbox_armed', (extract(epoch FROM now() + interval '1 hour') * 1000)::bigint)`) // relays are idle
	listener, filler := db.login("stranger"), db.login("stranger")
	listener.runs(`LISTEN x`)
	listener.runs(`BEGIN; SELECT 1`)
	for i := range 100 {
		if _, err := filler.conn.Exec(t.Context(), fmt.Sprintf(`SELECT pg_notify('x', '%d%s')`, i, strings.Repeat("x", 7900))); err != nil {
			break
		}
	}
	producer := db.login("producer")
	producer.runs(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'k')`)
	testkit.Equal(t, "events", db.keys(), []string{"k"})
}
