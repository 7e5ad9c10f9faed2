package migrations_test

import (
	"database/sql"
	"errors"
	"regexp"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// createDecoys makes functions, operators and types with the name of each one that the bodies of
// our functions mention, with every combination of the types that occur there. Each of them says
// who runs it.
const createDecoys = `
SET check_function_bodies = off;
SET search_path = pg_catalog; -- or the decoys would divert this block
DO $do$
DECLARE
    types CONSTANT text[] := ARRAY ['text', 'name', 'bigint', 'integer', 'numeric', 'boolean', 'timestamptz', 'interval', 'oid', 'regclass', 'tid',
        'jsonb', 'text[]', 'bigint[]', 'xid8', 'pg_snapshot'];
    -- Three arguments and more occur with these alone.
    few CONSTANT text[] := ARRAY ['text', 'name', 'bigint', 'timestamptz'];
    body CONSTANT text := 'LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION ''hijacked: %s runs as %%'', current_user; END $$';
    sources text := (SELECT string_agg(regexp_replace(prosrc, '--[^\n]*', '', 'g'), ' ') || ' = <> <= >= ~~ + - ' -- of IN, BETWEEN, LIKE
                     FROM pg_proc WHERE pronamespace = 'public'::regnamespace AND proname ~ '^(outbox|inbox)_');
    word record;
    l text; r text; m text; n text; fn text;
    number integer := 0;
BEGIN
    FOR word IN
        SELECT p.proname AS name, bool_or(p.pronargs = 0) AS none, bool_or(p.pronargs = 1 OR p.provariadic <> 0) AS one,
               bool_or(p.pronargs = 2 OR p.provariadic <> 0) AS two, bool_or(p.pronargs = 3 OR p.provariadic <> 0) AS three,
               coalesce(min(format_type(p.prorettype, NULL)) FILTER (WHERE t.typtype <> 'p' OR t.typname = 'void'), 'text') AS returns
        FROM pg_proc p JOIN pg_type t ON t.oid = p.prorettype
        WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind <> 'p'
          AND p.proname IN (SELECT m.found[1] FROM regexp_matches(sources, '[a-z_][a-z0-9_]*', 'g') m (found))
          AND p.proname NOT IN (SELECT typname FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace)
        GROUP BY p.proname
    LOOP
        IF word.none THEN
            EXECUTE format('CREATE FUNCTION public.%I() RETURNS %s ' || body, word.name, word.returns, word.name || '()');
        END IF;
        FOREACH l IN ARRAY types LOOP
            IF word.one THEN
                fn := format('%I(%s)', word.name, l);
                EXECUTE format('CREATE FUNCTION public.%s RETURNS %s ' || body, fn, word.returns, fn);
            END IF;
            FOREACH r IN ARRAY CASE WHEN word.two THEN types ELSE '{}' END LOOP
                fn := format('%I(%s, %s)', word.name, l, r);
                EXECUTE format('CREATE FUNCTION public.%s RETURNS %s ' || body, fn, word.returns, fn);
            END LOOP;
        END LOOP;
        FOREACH l IN ARRAY CASE WHEN word.three THEN few ELSE '{}' END LOOP
            FOREACH m IN ARRAY few LOOP
                FOREACH r IN ARRAY few LOOP
                    fn := format('%I(%s, %s, %s)', word.name, l, m, r);
                    EXECUTE format('CREATE FUNCTION public.%s RETURNS %s ' || body, fn, word.returns, fn);
                END LOOP;
            END LOOP;
        END LOOP;
    END LOOP;
    FOR word IN
        SELECT o.oprname AS name, min(format_type(o.oprresult, NULL)) FILTER (WHERE t.typtype <> 'p') AS returns
        FROM pg_operator o JOIN pg_type t ON t.oid = o.oprresult
        WHERE o.oprnamespace = 'pg_catalog'::regnamespace AND position(' ' || o.oprname || ' ' IN sources) > 0 AND o.oprkind = 'b'
        GROUP BY o.oprname
    LOOP
        number := number + 1;
        FOREACH l IN ARRAY types LOOP
            FOREACH r IN ARRAY types LOOP
                fn := format('decoy_%s(%s, %s)', number, l, r);
                EXECUTE format('CREATE FUNCTION public.%s RETURNS %s ' || body, fn, word.returns, word.name || ' of ' || l || ', ' || r);
                EXECUTE format('CREATE OPERATOR public.%s (FUNCTION = public.decoy_%s, LEFTARG = %s, RIGHTARG = %s)', word.name, number, l, r);
            END LOOP;
        END LOOP;
    END LOOP;
    FOR word IN
        SELECT t.typname AS name FROM pg_type t
        WHERE t.typnamespace = 'pg_catalog'::regnamespace AND t.typtype IN ('b', 'p')
          AND t.typname IN (SELECT m.found[1] FROM regexp_matches(sources || ' int8 int4 int2 bool float8', '[a-z_][a-z0-9_]*', 'g') m (found))
    LOOP
        EXECUTE format('CREATE DOMAIN public.%I AS pg_catalog.text', word.name);
    END LOOP;
    -- One of our own, called with what an overload would fit better.
    EXECUTE format('CREATE FUNCTION public.inbox_prune(varchar, bigint, integer, interval, boolean, OUT next_page bigint, OUT finished boolean, OUT removed integer) ' || body, 'inbox_prune(varchar)');
END
$do$`

// createTemporaryDecoys makes a temporary table and a type of each name that the bodies mention.
const createTemporaryDecoys = `
DO $do$
DECLARE
    word pg_catalog.text;
BEGIN
    FOR word IN
        SELECT DISTINCT c.relname FROM pg_catalog.pg_class c
        WHERE c.relkind IN ('r', 'p', 'v', 'S') AND (c.relnamespace = 'public'::pg_catalog.regnamespace
              OR c.relname IN ('pg_class', 'pg_proc', 'pg_inherits', 'pg_namespace', 'pg_stat_activity'))
    LOOP
        EXECUTE pg_catalog.format('CREATE TEMPORARY TABLE %I (decoy pg_catalog.int4)', word);
    END LOOP;
    FOREACH word IN ARRAY ARRAY ['text', 'int8', 'int4', 'tid', 'interval', 'timestamptz', 'regclass', 'bool', 'record', 'name'] LOOP
        EXECUTE pg_catalog.format('CREATE DOMAIN pg_temp.%I AS pg_catalog.text', word);
    END LOOP;
    CREATE TEMPORARY TABLE new_route (decoy pg_catalog.int4);
END
$do$`

// A producer who may create objects in the schema makes decoys of everything that the functions
// use. None of them runs.
func TestSecurityNoFunctionIsHijacked(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	s := newShop(t, migrations.Outbox, migrations.Inbox)
	owner := s.as("shop_owner")
	owner.exec(`
		INSERT INTO outbox (event_type, payload, idempotency_key, created_at, available_at) VALUES
			('t', '1', 'settled', now() - interval '70 days', now() - interval '70 days'), ('t', '1', 'without deliveries', now(), now());
		` + cover + `;
		UPDATE outbox_delivery SET status = 'delivered', attempts = 1, delivered_at = now() - interval '60 days', next_attempt_at = now() - interval '70 days';
		DELETE FROM outbox_delivery WHERE event_id = 2;
		INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('later', '1', 'parked', 'k');
		INSERT INTO outbox_delivery (event_id, destination, ordering_key) VALUES (3, '', 'k');
		INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay_id, destination, outcome, reason)
			VALUES (1, 1, now() - interval '70 days', 1, 1, 1, 'logistics', 'retry', 'x');
		INSERT INTO outbox_alert (rule, subject) VALUES ('failed', 'logistics');
		CREATE TABLE old PARTITION OF outbox_archive FOR VALUES FROM ('2020-01-01') TO ('2020-02-01');
		SELECT setval('outbox_armed', (extract(epoch FROM now()) * 1000)::bigint + 1000000);
		INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, received_at)
			VALUES ('test', 's', 'k', 'succeeded', now() - interval '70 days'), ('test', 'r', 'k', 'recorded', now() - interval '70 days');
		INSERT INTO inbox_events (receiver, source, idempotency_key, processing_state, received_at, processed_at)
			VALUES ('test', 'r', 'k', 'succeeded', now() - interval '70 days', now() - interval '70 days');
		INSERT INTO inbox_forgotten (receiver, source, received_before, announced_at)
			VALUES ('test', 's', now() - interval '30 days', now() - interval '2 days'), ('test', 'r', now() - interval '30 days', now() - interval '2 days')`)
	s.superuser(`GRANT CREATE ON SCHEMA public TO PUBLIC`) // as up to PostgreSQL 14
	s.as("producer").exec(createDecoys)

	// The sessions of the victims find nothing but pg_catalog by themselves; what their statements
	// mean is up to them.
	producer, relay := s.as("other_producer"), s.as("relay")
	for _, session := range []*session{producer, relay} {
		session.exec(createTemporaryDecoys)
		session.exec(`SET search_path = pg_catalog`)
	}
	relay.exec(`INSERT INTO public.outbox_route (pattern, destination) VALUES ('*', 'logistics')`)
	producer.exec(`INSERT INTO public.outbox (event_type, payload, idempotency_key, headers) VALUES ('t', '1', 'new', '{"a": "b"}')`)
	relay.wants("1", `SELECT deliveries FROM public.outbox_cover_events(3::bigint, 100, '3:3:')`)
	relay.wants("true", `SELECT public.outbox_is_routed(1::bigint)::text`)
	relay.exec(`INSERT INTO public.outbox_destination (destination, paused, paused_at) VALUES ('paused', true, now())`)
	relay.wants("1 1", `SELECT routes || ' ' || destinations FROM public.outbox_intake`)
	relay.wants("1", `SELECT settled FROM public.outbox_archive_batch(0::bigint, 100, interval '1 day', false)`)
	relay.wants("old", `SELECT public.outbox_drop_archive(interval '365 days', true, ''::text)`)
	relay.wants("old", `SELECT public.outbox_drop_archive(interval '365 days', false, ''::text)`)
	relay.wants("1", `SELECT removed FROM public.outbox_prune_attempts(0::bigint, 100, interval '1 day', false)`)
	relay.wants("2", `SELECT removed FROM public.outbox_prune_processed_events(0::bigint, 100, interval '40 days', false)`)
	relay.wants("1", `SELECT events FROM public.outbox_create_deliveries(0::bigint, 100)`)
	relay.exec(`UPDATE public.outbox_alert SET count = count + 1`)
	relay.wants("1", `SELECT public.outbox_release_parked(0::bigint, 100::bigint)`)

	owner.exec(`SET search_path = pg_catalog`)
	owner.wants("2logistics 3logistics 4logistics", `SELECT string_agg(event_id || destination, ' ' ORDER BY event_id) FROM public.outbox_delivery`)
	owner.refused("23000", `UPDATE public.outbox SET event_type = 'x'`)
}

// The two that were seen to run as the owner before the bodies searched pg_catalog alone.
func TestSecurityKnownHijackers(t *testing.T) {
	t.Parallel()
	s := newShop(t, migrations.Outbox, migrations.Inbox)
	owner := s.as("shop_owner")
	owner.exec(`SELECT setval('outbox_armed', (extract(epoch FROM now()) * 1000)::bigint + 1000000)`)
	s.superuser(`GRANT CREATE ON SCHEMA public TO PUBLIC`)
	attacker := s.as("producer")
	attacker.exec(`
		CREATE TABLE loot (who text); GRANT INSERT ON loot TO PUBLIC;
		CREATE FUNCTION public.pg_notify(text, name) RETURNS void LANGUAGE sql AS 'INSERT INTO public.loot VALUES (''pg_notify as '' || current_user)';
		CREATE FUNCTION public.format(text, bigint) RETURNS text LANGUAGE plpgsql AS
			'BEGIN INSERT INTO public.loot VALUES (''format as '' || current_user); RETURN ''(0,0)''; END'`)
	s.as("other_producer").exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'k')`)
	s.as("relay").exec(`SELECT outbox_prune_processed_events(0, 1, interval '40 days', false)`)
	attacker.wants("none", `SELECT coalesce(string_agg(who, ', '), 'none') FROM loot`)
}

// Where no receiver is, a login that may create objects makes its tables and functions: the relay
// must not run them as the owner.
func TestSecurityForgedReceiver(t *testing.T) {
	t.Parallel()
	s := newShop(t, migrations.Outbox)
	s.superuser(`GRANT CREATE ON SCHEMA public TO PUBLIC`)
	attacker, relay := s.as("stranger"), s.as("relay")
	attacker.exec(`
		CREATE TABLE loot (who text); GRANT INSERT ON loot TO PUBLIC;
		CREATE TABLE processed_events (source text, idempotency_key text, processing_state text, received_at timestamptz, processed_at timestamptz);
		GRANT ALL ON processed_events TO PUBLIC;
		INSERT INTO processed_events VALUES ('s', 'k', 'succeeded', '2020-01-01', '2020-01-01');
		CREATE FUNCTION steal() RETURNS trigger LANGUAGE plpgsql AS
			'BEGIN INSERT INTO public.loot VALUES (''a trigger as '' || current_user); RETURN OLD; END';
		CREATE TRIGGER steal BEFORE DELETE ON processed_events FOR EACH ROW EXECUTE FUNCTION steal()`)
	const prune = `SELECT outbox_prune_processed_events(0, 1, interval '40 days', false)`
	relay.refused("55000", prune)
	attacker.exec(`
		CREATE FUNCTION inbox_prune(text, bigint, integer, interval, boolean, OUT next_page bigint, OUT finished boolean, OUT removed integer)
		LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS
			'BEGIN INSERT INTO public.loot VALUES (''inbox_prune as '' || current_user); END'`)
	relay.refused("55000", prune)
	attacker.wants("none", `SELECT coalesce(string_agg(who, ', '), 'none') FROM loot`)
}

// roles.sql is run by a superuser, and grants nothing in a schema in which others may create. What
// they left there does not run.
func TestSecurityRolesRefuseAnOpenSchema(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	s := newShop(t, migrations.Outbox)
	s.superuser(`CREATE ROLE "Odd one"; GRANT CREATE ON SCHEMA public TO PUBLIC, "Odd one"`)
	attacker := s.as("stranger")
	attacker.exec(`CREATE TABLE loot (who text); GRANT INSERT ON loot TO PUBLIC`)
	for _, arguments := range []string{"text, text", "text, name", "text, name, text", "text, name, name", "text, text, text"} {
		attacker.exec(`CREATE FUNCTION public.format(` + arguments + `) RETURNS text LANGUAGE plpgsql AS
			'BEGIN INSERT INTO public.loot VALUES (''format as '' || current_user); RETURN ''SELECT 1''; END'`)
	}
	s.superuser(`REVOKE ALL ON outbox FROM outbox_reader`)
	err := s.applyRoles(s.superuserName())
	if err == nil || !strings.Contains(err.Error(), `in schema public others may create functions that run with the rights of its users: "Odd one", PUBLIC`) {
		t.Errorf("roles.sql ended with %v", err)
	}
	before, statements, _ := strings.Cut(hintOf(err), ": ")
	if before != "Run this first, as "+s.superuserName()+" or a superuser" ||
		statements != `REVOKE CREATE ON SCHEMA public FROM "Odd one", PUBLIC; GRANT CREATE ON SCHEMA public TO shop_owner;` {
		t.Errorf("the hint is %q", hintOf(err))
	}
	s.as("reader").refused(insufficientPrivilege, `SELECT FROM outbox`)
	s.superuser(statements)
	if err := s.applyRoles(s.superuserName()); err != nil {
		t.Error(err)
	}
	s.as("reader").exec(`SELECT FROM outbox`)
	attacker.wants("none", `SELECT coalesce(string_agg(who, ', '), 'none') FROM loot`)
}

// What a login has made before the first migration becomes no part of what the migrations make, and
// is not called by them.
func TestSecurityMigrationsAreNotHijacked(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	dsn := pgtest.New(t)
	decoys := pgtest.Hijack(t, dsn, ".")
	pgtest.Migrate(t, dsn, migrations.Outbox, migrations.Inbox)
	decoys.WantUnused(t, "up")
}

// A login that may create objects makes the table of versions before the first migration, with a
// trigger that would run as who migrates.
func TestSecurityForgedVersionTable(t *testing.T) {
	t.Parallel()
	s := newShop(t, migrations.Inbox)
	s.superuser(`GRANT CREATE ON SCHEMA public TO PUBLIC`)
	attacker := s.as("stranger")
	attacker.exec(`
		CREATE TABLE loot (who text); GRANT INSERT ON loot TO PUBLIC;
		CREATE TABLE outbox_schema_version (id serial PRIMARY KEY, version_id bigint, is_applied boolean, tstamp timestamp DEFAULT now());
		INSERT INTO outbox_schema_version (version_id, is_applied) VALUES (0, true);
		GRANT ALL ON outbox_schema_version, outbox_schema_version_id_seq TO PUBLIC;
		CREATE FUNCTION steal() RETURNS trigger LANGUAGE plpgsql AS
			'BEGIN INSERT INTO public.loot VALUES (''a trigger as '' || current_user); RETURN NEW; END';
		CREATE TRIGGER steal BEFORE INSERT ON outbox_schema_version FOR EACH ROW EXECUTE FUNCTION steal()`)
	for _, login := range []string{s.superuserName(), "shop_owner"} {
		err := s.migrate(login)
		if !errors.Is(err, migrations.ErrForeignVersionTable) || !strings.Contains(err.Error(), "table outbox_schema_version belongs to stranger: ") {
			t.Errorf("as %s: %v", login, err)
		}
	}
	attacker.wants("none", `SELECT coalesce(string_agg(who, ', '), 'none') FROM loot`)
	attacker.exec(`DROP TABLE outbox_schema_version`)
	for _, login := range []string{"shop_owner", s.superuserName()} { // the second finds what the first one made
		if err := s.migrate(login); err != nil {
			t.Errorf("as %s: %v", login, err)
		}
	}
	attacker.wants("none", `SELECT coalesce(string_agg(who, ', '), 'none') FROM loot`)
}

// A login that may create schemas makes one named as the login of who migrates, to which "$user"
// leads.
func TestSecurityForgedSchemaOfTheMigrator(t *testing.T) {
	t.Parallel()
	s := newShop(t, migrations.Outbox)
	s.superuser(`DO $$ BEGIN EXECUTE format('GRANT CREATE ON DATABASE %I TO stranger', current_database()); END $$`)
	s.as("stranger").exec(`CREATE SCHEMA shop_owner; GRANT ALL ON SCHEMA shop_owner TO PUBLIC`)
	err := s.migrate("shop_owner")
	if !errors.Is(err, migrations.ErrForeignVersionTable) || !strings.Contains(err.Error(), "schema shop_owner, which is named as this login, belongs to stranger: ") {
		t.Errorf("migrate up: %v", err)
	}
	s.as("shop_owner").wants("0", `SELECT count(*)::text FROM pg_class WHERE relnamespace = 'shop_owner'::regnamespace`)
	s.superuser(`ALTER SCHEMA shop_owner OWNER TO shop_owner`)
	if err := s.migrate("shop_owner"); err != nil {
		t.Errorf("in its own schema: %v", err)
	}
}

func (s *shop) migrate(login string) error {
	s.Helper()
	db, err := sql.Open("pgx", s.dsn(login))
	pgtest.Must(s, err)
	defer db.Close()
	return migrations.Up(s.Context(), db, migrations.Outbox)
}

// Whoever may use the schema can name a table in a view, and could make a column of its type. The
// types are refused, and the error of a migration names what is in its way, and whose it is.
func TestSecurityObjectsInTheWayOfAMigrationAreNamed(t *testing.T) {
	t.Parallel()
	s := newShop(t, migrations.Outbox)
	stranger := s.as("stranger")
	stranger.refused(insufficientPrivilege, `CREATE TEMPORARY TABLE t (e outbox)`, `CREATE TEMPORARY TABLE t (e outbox_delivery[])`, `CREATE TEMPORARY TABLE t (e outbox_event_type)`,
		`CREATE DOMAIN pg_temp.t AS outbox_idempotency_key`, `CREATE FUNCTION pg_temp.f(outbox_archive) RETURNS integer LANGUAGE sql AS 'SELECT 1'`, `CREATE TEMPORARY VIEW v AS SELECT d FROM outbox_delivery d`)
	s.as("producer").exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'k')`)
	stranger.exec(`CREATE TEMPORARY VIEW seen AS SELECT joined FROM outbox_delivery; CREATE TEMPORARY TABLE woken (a integer DEFAULT outbox_compatible_since())`)
	m, err := migrations.New(open(t, s.dsn("shop_owner")), migrations.Outbox, migrations.Options{})
	pgtest.Must(t, err)
	_, err = m.DownTo(t.Context(), 1)
	if err == nil || !regexp.MustCompile(`^00002_\S+: .*; in the way are table pg_temp_\d+\.woken of stranger, view pg_temp_\d+\.seen of stranger: let their owners drop them`).MatchString(err.Error()) {
		t.Fatalf("DownTo = %v", err)
	}
	stranger.exec(`DISCARD TEMP`)
	if _, err = m.DownTo(t.Context(), 1); err != nil {
		t.Error(err)
	}
}
