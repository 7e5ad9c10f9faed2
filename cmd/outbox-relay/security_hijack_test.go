package main

import (
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// hijackers makes an operator of each name with each pair of types, and a function with the name of each word in $1 that is one of
// pg_catalog, with each type, pair of types and no argument. What is called counts.
const hijackers = `
CREATE SEQUENCE public.hijacked;
GRANT ALL ON SEQUENCE public.hijacked TO PUBLIC;
SET search_path = pg_catalog; -- or they would divert this block
DO $do$
DECLARE
    types CONSTANT text[] := ARRAY ['text', 'name', 'bigint', 'integer', 'smallint', 'numeric', 'float8', 'boolean', 'timestamptz', 'interval', 'oid', 'regclass',
        'tid', 'json', 'jsonb', 'xid', 'xid8', 'pg_snapshot', '"char"', 'bytea', 'text[]', 'bigint[]', 'integer[]', 'oid[]'];
    body CONSTANT text := 'LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_catalog.nextval(''public.hijacked''); RAISE EXCEPTION ''hijacked: %s''; END $$';
    word record;
    l text; r text; fn text;
    number integer := 0;
BEGIN
    FOR word IN
        SELECT p.proname AS name, coalesce(min(format_type(p.prorettype, NULL)) FILTER (WHERE t.typtype <> 'p'), 'text') AS returns
        FROM pg_proc p JOIN pg_type t ON t.oid = p.prorettype
        WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind <> 'p' AND p.proname = ANY ($words)
          AND p.proname NOT IN (SELECT typname FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace)
        GROUP BY p.proname
    LOOP
        EXECUTE format('CREATE FUNCTION public.%I() RETURNS %s ' || body, word.name, word.returns, word.name || '()');
        FOREACH l IN ARRAY types LOOP
            fn := format('%I(%s)', word.name, l);
            EXECUTE format('CREATE FUNCTION public.%s RETURNS %s ' || body, fn, word.returns, fn);
            FOREACH r IN ARRAY types[1:$pairs] LOOP
                fn := format('%I(%s, %s)', word.name, l, r);
                EXECUTE format('CREATE FUNCTION public.%s RETURNS %s ' || body, fn, word.returns, fn);
            END LOOP;
        END LOOP;
    END LOOP;
    FOR word IN
        SELECT o.oprname AS name, min(format_type(o.oprresult, NULL)) AS returns
        FROM pg_operator o JOIN pg_type t ON t.oid = o.oprresult
        WHERE o.oprnamespace = 'pg_catalog'::regnamespace AND o.oprkind = 'b' AND t.typtype <> 'p'
          AND o.oprname IN ('=', '<>', '<', '<=', '>', '>=', '~~', '~', '!~', '||', '+', '-', '*', '/', '#', '&', '->', '->>', '@>', '&&')
        GROUP BY o.oprname
    LOOP
        number := number + 1;
        FOREACH l IN ARRAY types LOOP
            FOREACH r IN ARRAY types LOOP
                fn := format('hijacker_%s(%s, %s)', number, l, r);
                EXECUTE format('CREATE FUNCTION public.%s RETURNS %s ' || body, fn, word.returns, word.name || ' of ' || l || ', ' || r);
                EXECUTE format('CREATE OPERATOR public.%s (FUNCTION = public.hijacker_%s, LEFTARG = %s, RIGHTARG = %s)', word.name, number, l, r);
            END LOOP;
        END LOOP;
    END LOOP;
END
$do$;
RESET search_path`

// wordsOfStatements returns the words of all files with SQL, as an array of PostgreSQL.
func wordsOfStatements(t *testing.T) string {
	t.Helper()
	var words []string
	for _, dir := range []string{"../../relay", "../../internal/inboxops", "../../internal/cli"} {
		files := os.DirFS(dir)
		err := fs.WalkDir(files, ".", func(file string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasPrefix(path.Base(file), "store") || !strings.HasSuffix(file, ".go") {
				return err
			}
			text, err := fs.ReadFile(files, file)
			words = append(words, regexp.MustCompile(`[a-z][a-z0-9_]+`).FindAllString(string(text), -1)...)
			return err
		})
		pgtest.Must(t, err)
	}
	slices.Sort(words)
	return "'{" + strings.Join(slices.Compact(words), ",") + "}'::text[]"
}

// A login that may create objects in the schema, as every one up to PostgreSQL 14, makes operators and functions for all types that
// relay, commands and page use. None is called, whatever they do.
func TestSecurityNoStatementIsHijacked(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.Header.Get("X-Idempotency-Key"), "bad") {
			w.WriteHeader(http.StatusUnprocessableEntity)
		}
	}))
	defer receiver.Close()
	dsn := pgtest.New(t, migrations.Outbox, migrations.Inbox)
	db := open(t, dsn)
	execute(t, db, fillInbox, 4)
	execute(t, db, rememberInbox)
	execute(t, db, strings.NewReplacer("$words", wordsOfStatements(t), "$pairs", "12").Replace(hijackers))
	execute(t, db, `INSERT INTO public.outbox (event_type, payload, idempotency_key, ordering_key)
		SELECT 'paid', '{"n": 1}'::json, CASE WHEN i OPERATOR(pg_catalog.>) 2 THEN 'good-' ELSE 'bad-' END OPERATOR(pg_catalog.||) i::text, CASE WHEN i IN (2, 3, 4) THEN 'k' END
		FROM pg_catalog.generate_series(1, 6) i`)

	env := []string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=" + receiver.URL, "OUTBOX_SIGNING_SECRET=" + goodSecret}
	s := start(t, append(slices.Clone(env), "OUTBOX_ADMIN_LISTEN=127.0.0.1:0", "OUTBOX_ADMIN_TOKEN="+pageToken, "OUTBOX_ADMIN_PATH_PREFIX=/outbox"), "--poll-interval=1s")
	c := s.console(t)
	calls := func(after string) {
		t.Helper()
		if n := query[int64](t, db, `SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM public.hijacked`); n != 0 {
			t.Fatalf("after %s: %d calls\n%s", after, n, s.stderr)
		}
	}
	waitUntil(t, "all outcomes", func() bool {
		calls("deliveries")
		return query[int64](t, db, `SELECT pg_catalog.count(*) FROM public.outbox_delivery WHERE status OPERATOR(pg_catalog.=) ANY ('{delivered,failed}'::text[])`) == 4
	})
	for _, path := range []string{
		"/", "/destinations/default", "/events", "/events?status=failed", "/events/1", "/events/5", "/relays", "/alerts", "/audit", "/api/v1/overview", "/api/v1/events/1",
		"/api/v1/destinations/default", "/operations/new?action=replay&status=failed&destination=default&rate=0",
	} {
		if status, body := c.send("GET", path, nil); status != 200 {
			t.Errorf("%s: %d\n%s", path, status, body)
		}
		calls(path)
	}
	for _, args := range []string{
		"status", "status --json", "status --healthcheck", "relays", "audit", "routes list", "routes test paid", "doctor", "identity show", "archive run", "archive run --dry-run",
		"events list", "events list --status failed", "events show 1", "events show 1 --payload", "explain 1", "explain 5", "explain good-5",
		"pause default", "resume default --reset-breaker", "retry --destination default --yes", "replay 1 --yes", "replay --destination default --yes", "discard --destination default --yes", "discard 2 --yes",
		"send paid --payload {}", "inbox status", "inbox list", "inbox list --remembered", "inbox show 1", "inbox replay 1 --yes", "inbox ignore 2 --yes", "inbox replay --status failed --yes",
		"inbox prune --older-than=2160h --yes",
	} {
		r := command(env, strings.Fields(args)...)
		calls(args)
		if r.code != 0 && (r.code != 1 || !strings.HasPrefix(args, "doctor")) {
			t.Errorf("%s: %+v", args, r)
		}
	}
	s.end(t, 0)
	calls("the stop")
	if strings.Contains(s.stderr.String(), "hijacked") {
		t.Errorf("the log:\n%s", s.stderr)
	}
}

// A superuser's login runs whatever others leave for it with all rights of the server. run refuses it where there are others.
func TestSecurityRunRefusesASuperuser(t *testing.T) {
	t.Parallel()
	server := pgtest.StartCopy(t, localpg.Options{}) // roles belong to the whole server
	dsn := server.DSN("")
	pgtest.Migrate(t, dsn, migrations.Outbox)
	db := open(t, dsn)
	env := []string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=http://127.0.0.1:1/", "OUTBOX_DATABASE_ALLOW_SUPERUSER=false"}
	registers := func(env []string) {
		t.Helper()
		s := start(t, env)
		s.stderr.wait(t, `"registered"`, s.code)
		s.end(t, 0)
	}
	registers(env) // as in the quick start: the server has no other login
	execute(t, db, migrations.Roles()+"; CREATE ROLE other LOGIN; CREATE ROLE mine LOGIN IN ROLE outbox_relay")
	s := start(t, env)
	if code := <-s.code; code != cli.ExitConfig || !strings.Contains(s.stderr.String(), "the login of the relay is a superuser, and other logins may connect to this database: postgres; give the relay a login") {
		t.Errorf("exit code %d\n%s", code, s.stderr)
	}
	registers(append(slices.Clone(env[:2]), allowSuperuser))
	registers(append(slices.Clone(env), "OUTBOX_DATABASE_URL="+strings.Replace(dsn, "://postgres@", "://mine@", 1)))
}
