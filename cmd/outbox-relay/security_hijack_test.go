package main

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// A login that may create objects in the schema, as every one up to PostgreSQL 14, makes operators
// and functions for all types that relay, commands and page use. None is called, whatever they do.
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
	decoys := pgtest.Hijack(t, dsn, "../../relay", "../../internal/relay", "../../internal/pg", "../../internal/inboxops", "../../internal/inboxsql", "../../internal/reconcile", "../../internal/cli")
	execute(t, db, `INSERT INTO public.outbox (event_type, payload, idempotency_key, ordering_key)
		SELECT 'paid', '{"n": 1}'::json, CASE WHEN i OPERATOR(pg_catalog.>) 2 THEN 'good-' ELSE 'bad-' END OPERATOR(pg_catalog.||) i::text, CASE WHEN i IN (2, 3, 4) THEN 'k' END
		FROM pg_catalog.generate_series(1, 6) i`)

	env := []string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=" + receiver.URL, "OUTBOX_SIGNING_SECRET=" + goodSecret, "RECEIVER_DATABASE_URL=" + dsn}
	s := start(t, append(slices.Clone(env), "OUTBOX_ADMIN_LISTEN=127.0.0.1:0", "OUTBOX_ADMIN_TOKEN="+pageToken, "OUTBOX_ADMIN_PATH_PREFIX=/outbox"), "--poll-interval=1s")
	c := s.console(t)
	testkit.Eventually(t, "all outcomes", func() bool {
		decoys.WantUnused(t, "deliveries")
		return query[int64](t, db, `SELECT pg_catalog.count(*) FROM public.outbox_delivery WHERE status OPERATOR(pg_catalog.=) ANY ('{delivered,failed}'::text[])`) == 4
	})
	for _, path := range []string{
		"/", "/destinations/default", "/events", "/events?status=failed", "/events/1", "/events/5", "/relays", "/alerts", "/audit", "/api/v1/overview", "/api/v1/events/1",
		"/api/v1/destinations/default", "/operations/new?action=replay&status=failed&destination=default&rate=0",
	} {
		if status, body := c.send("GET", path, nil); status != 200 {
			t.Errorf("%s: %d\n%s", path, status, body)
		}
		decoys.WantUnused(t, path)
	}
	for _, args := range []string{
		"status", "status --json", "status --healthcheck", "relays", "audit", "routes list", "routes test paid", "doctor", "identity show", "archive run", "archive run --dry-run",
		"migrate status", "migrate up", "migrate status --set inbox", "identity accept --yes",
		"events list", "events list --status failed", "events show 1", "events show 1 --payload", "explain 1", "explain 5", "explain good-5",
		"pause default", "resume default --reset-breaker", "retry --destination default --yes", "replay 1 --yes", "replay --destination default --yes", "discard --destination default --yes", "discard 2 --yes",
		"send paid --payload {}", "inbox status", "inbox list", "inbox list --remembered", "inbox show 1", "inbox replay 1 --yes", "inbox ignore 2 --yes", "inbox replay --status failed --yes",
		"inbox prune --older-than=2160h --yes", "reconcile --receiver=shipping --source=finance --settle=1ms --effects=SELECT/**/pattern/**/FROM/**/public.outbox_route",
	} {
		r := command(env, strings.Fields(args)...)
		decoys.WantUnused(t, args)
		if r.code != 0 && (r.code != cli.ExitFound || !strings.HasPrefix(args, "doctor") && !strings.HasSuffix(r.stderr, " never arrived\n")) {
			t.Errorf("%s: %+v", args, r)
		}
	}
	s.end(t, 0)
	decoys.WantUnused(t, "the stop")
	if strings.Contains(s.stderr.String(), "hijacked") {
		t.Errorf("the log:\n%s", s.stderr)
	}
}

// A superuser's login runs whatever others leave for it with all rights of the server. run refuses
// it where there are others.
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
