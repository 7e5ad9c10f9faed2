package consumer_test

import (
	"context"
	"fmt"
	"net/http"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// newLeavingEnv is NewEnv with a handler that leaves its connection as the statement of its key does. Requests that come one
// after the other mostly get the same one.
func newLeavingEnv(t *testing.T, f receivertest.Flavour, leave map[string]string) *receivertest.Env {
	t.Helper()
	e := receivertest.NewEnv(t, f, consumer.Config{}, func(e *receivertest.Env) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			mustNot(e, e.Exec(r.Context(), "INSERT INTO public.met SELECT $1, current_user, current_setting('search_path')", consumer.EventFrom(r.Context()).Key))
			if statement := leave[consumer.EventFrom(r.Context()).Key]; statement != "" {
				mustNot(e, e.Exec(r.Context(), statement))
			}
			mustNot(e, e.Exec(r.Context(), "INSERT INTO public.effect VALUES ($1)", consumer.EventFrom(r.Context()).Key))
			status := http.StatusNoContent
			if r.Header.Get("Test-Refuse") != "" {
				status = http.StatusTeapot
			}
			w.WriteHeader(status)
		}
	})
	e.MustExec(`CREATE TABLE met (key text, role text, path text)`)
	return e
}

// Multi-tenant code sets search_path for the session. Where the tenant's schema has a table of that name, too, the next event
// would be remembered there, and its duplicate would take effect again.
func TestSearchPathOfATenantReachesNoOtherEvent(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		tenant := "SELECT set_config('search_path', 'tenant, public', false)"
		e := newLeavingEnv(t, f, map[string]string{"a": tenant, "b": tenant, "local": "SET LOCAL search_path = tenant, public"})
		e.MustExec(`CREATE SCHEMA tenant; CREATE TABLE tenant.processed_events (LIKE public.processed_events INCLUDING ALL)`)
		for range 2 {
			for _, key := range []string{"a", "plain", "b", "local", "plain too"} {
				if got := e.Post(key, "{}"); got.Status != http.StatusNoContent {
					t.Errorf("%s: %d %s", key, got.Status, got.Body)
				}
				e.WantRows(key, 1, 1)
			}
		}
		if n := e.Count("SELECT count(*) FROM tenant.processed_events"); n != 0 {
			t.Errorf("%d events are remembered in the tenant's schema", n)
		}
		if n := e.Count("SELECT count(DISTINCT path) FROM met"); n != 1 {
			t.Errorf("handlers met %d search paths, want 1", n)
		}
	})
}

// A role and session locks that a handler leaves behind reach no other event, whether its work is committed or not.
func TestRolesAndLocksReachNoOtherEvent(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := newLeavingEnv(t, f, map[string]string{
			"role": "SET ROLE pg_read_all_data", "lock": "SELECT pg_advisory_lock(4711)",
		})
		e.MustExec(`GRANT ALL ON ALL TABLES IN SCHEMA public TO pg_read_all_data`) // a role that every server has
		for _, key := range []string{"role", "lock"} {
			wantTeapot := e.NewRequest(key, "{}", receivertest.With("Test-Refuse", "yes"))
			if got := e.Do(wantTeapot); got.Status != http.StatusTeapot {
				t.Errorf("%s: %d %s", key, got.Status, got.Body)
			}
			if got := e.Post(key, "{}"); got.Status != http.StatusNoContent {
				t.Errorf("%s: %d %s", key, got.Status, got.Body)
			}
			if got := e.Post("after "+key, "{}"); got.Status != http.StatusNoContent {
				t.Errorf("after %s: %d %s", key, got.Status, got.Body)
			}
			if n := e.Count("SELECT count(*) FROM (" + receivertest.AdvisoryLocks + " AND objid = 4711) held"); n != 0 {
				t.Errorf("after %s: %d locks are held", key, n)
			}
		}
		if n := e.Count("SELECT count(DISTINCT role) FROM met"); n != 1 {
			t.Errorf("handlers met %d roles, want 1", n)
		}
	})
}

// changes are ways in which a handler changes its session, and ends.
var changes = map[string][]string{
	"limits":      {"SET statement_timeout = '7s'", "SET lock_timeout = '7s'", "SET idle_in_transaction_session_timeout = '7s'"},
	"tenant":      {"SET app.tenant = '42'", "SET row_security = off", "SET ROLE NONE"},
	"default":     {"SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE READ ONLY", "SET session_replication_role = replica"},
	"function":    {"SELECT set_config('TimeZone', 'Asia/Tokyo', false), set_config('app.other', 'x', false)"},
	"twice":       {"SET LOCAL work_mem = '64kB'", "SET work_mem = '128kB'", "RESET app.tenant"},
	"savepoint":   {"SAVEPOINT s", "SET DateStyle = 'German'", "RELEASE s"},
	"exchange":    {unseen + "COMMIT AND CHAIN", "SET bytea_output = 'escape'", unseen + "COMMIT AND CHAIN"},
	"search path": {"SET search_path = pg_catalog, public"},
	"everything":  {"SET app.tenant = '42'", "RESET ALL", "SET app.tenant = '43'"},
}

// No setting of a handler reaches the next event, whatever it is, and whether the handler succeeds or fails. What the pool has given
// the session does.
func TestSecuritySettingsReachNoOtherEvent(t *testing.T) {
	receivertest.EachFlavourAlways(t, func(t *testing.T, f receivertest.Flavour) {
		dsn := receivertest.WithSetting(pgtest.New(t, migrations.Inbox), "application_name", "receiver")
		if f.Name == "pgx" {
			dsn = receivertest.WithSetting(dsn, "pool_max_conns", "1")
		}
		e := newAnswering(t, f, dsn, answers["204"], func(http.HandlerFunc) func(e *receivertest.Env) http.HandlerFunc {
			return func(e *receivertest.Env) http.HandlerFunc {
				return func(w http.ResponseWriter, r *http.Request) {
					mustNot(e, e.Exec(r.Context(), `INSERT INTO met SELECT $1, current_setting('application_name'),
						(SELECT string_agg(name || '=' || setting, ' ' ORDER BY name) FROM pg_settings WHERE source = 'session')`, consumer.EventFrom(r.Context()).Key))
					for _, statement := range r.Header["Test-Statement"] {
						mustNot(e, e.Exec(r.Context(), statement))
					}
					status := http.StatusNoContent
					if r.Header.Get("Test-Refuse") != "" {
						status = http.StatusTeapot
					}
					w.WriteHeader(status)
				}
			}
		})
		e.MustExec(`CREATE TABLE met (key text, name text, session text)`)
		for name, statements := range changes {
			e.Do(e.NewRequest(name, "{}", running(statements...)))
			e.Do(e.NewRequest(name+", refused", "{}", running(statements...), receivertest.With("Test-Refuse", "yes")))
			if got := e.Post("after "+name, "{}"); got.Status != http.StatusNoContent {
				t.Errorf("after %s: %d %s", name, got.Status, got.Body)
			}
		}
		for _, what := range []string{"name", "session"} {
			if n := e.Count("SELECT count(DISTINCT " + what + ") FROM met"); n != 1 {
				var all string
				mustNot(e, e.Pool.QueryRow(t.Context(), "SELECT string_agg(key || ': ' || name || ': ' || session, E'\n') FROM met").Scan(&all))
				t.Errorf("handlers met %d sessions, want 1:\n%s", n, all)
			}
		}
	})
}

// What the pool sets on each of its connections is the session's own, and every event finds it.
func TestSettingsOfThePoolStay(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Inbox)
	cfg, err := pgxpool.ParseConfig(receivertest.WithSetting(dsn, "pool_max_conns", "1"))
	pgtest.Must(t, err)
	cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `SET app.region = 'it''s "north"'; SET search_path = public, pg_catalog; SET work_mem = '5MB'`)
		return err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	pgtest.Must(t, err)
	t.Cleanup(pool.Close)
	e := receivertest.StartEnv(t, receivertest.PGX(), dsn, consumer.Config{}, func(e *receivertest.Env, cfg consumer.Config) http.Handler {
		return receivertest.Must(consumer.New(pool, cfg, func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
			_, err := tx.Exec(ctx, `INSERT INTO met SELECT pg_backend_pid(), concat_ws(' ', current_setting('app.region'), current_setting('search_path'), current_setting('work_mem'));
				SET app.region = 'south'; SET work_mem = '6MB'; SET search_path = pg_catalog, public`, pgx.QueryExecModeSimpleProtocol)
			return err
		}))
	})
	e.MustExec(`CREATE TABLE met (pid int, session text)`)
	for i := range 3 {
		if got := e.Post(fmt.Sprint(i), "{}"); got.Status != http.StatusNoContent {
			t.Errorf("answered %d %s", got.Status, got.Body)
		}
	}
	if n := e.Count(`SELECT count(DISTINCT (pid, session)) FROM met WHERE session = 'it''s "north" public, pg_catalog 5MB'`); n != 1 {
		t.Errorf("handlers met %d connections with the pool's settings, want 1", n)
	}
}
