package consumer_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/breaker"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

func TestResponseWriterOffersNoWayAround(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, func(e *receivertest.Env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				c := http.NewResponseController(w)
				_, _, hijack := c.Hijack()
				for name, err := range map[string]error{
					"Flush": c.Flush(), "Hijack": hijack, "EnableFullDuplex": c.EnableFullDuplex(),
					"SetReadDeadline": c.SetReadDeadline(time.Time{}), "SetWriteDeadline": c.SetWriteDeadline(time.Time{}),
				} {
					testkit.ErrorIs(t, name, err, http.ErrNotSupported)
				}
				if _, ok := w.(interface{ Unwrap() http.ResponseWriter }); ok {
					t.Error("the writer can be unwrapped")
				}
				if _, ok := w.(io.ReaderFrom); ok {
					t.Error("the writer reads by itself")
				}
				w.WriteHeader(http.StatusNoContent)
				if _, err := w.Write([]byte("x")); !errors.Is(err, http.ErrBodyNotAllowed) {
					t.Errorf("write after 204: %v", err)
				}
			}
		})
		receivertest.WantFirst(t, e.Post("k", "{}"), 204, "")
	})
}

func TestSavepointsWork(t *testing.T) {
	t.Parallel()
	e := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{}, func(e *receivertest.Env) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			ctx, tx := r.Context(), consumer.Tx(r.Context())
			err := pgx.BeginFunc(ctx, tx, func(nested pgx.Tx) error {
				_, err := nested.Exec(ctx, "SELECT 1/0")
				return err
			})
			if err == nil {
				t.Error("the savepoint released a failed statement")
			}
			mustNot(e, pgx.BeginFunc(ctx, tx, func(nested pgx.Tx) error {
				_, err := nested.Exec(ctx, "INSERT INTO effect VALUES ('k')")
				return err
			}))
		}
	})
	receivertest.WantFirst(t, e.Post("k", "{}"), 200, "")
	e.WantRows("k", 1, 1)
}

// What a handler leaves behind must not reach the transaction of the connection's next user.
func TestTxIsClosedWhenTheHandlerReturns(t *testing.T) {
	t.Parallel()
	leaked := make(chan pgx.Tx, 2)
	e := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{}, func(e *receivertest.Env) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			tx := consumer.Tx(r.Context())
			nested, err := tx.Begin(r.Context())
			mustNot(e, err)
			leaked <- tx
			leaked <- nested
		}
	})
	receivertest.WantFirst(t, e.Post("k", "{}"), 200, "")
	for range 2 {
		tx, ctx, one := <-leaked, t.Context(), 0
		_, exec := tx.Exec(ctx, "INSERT INTO effect VALUES ('late')")
		rows, query := tx.Query(ctx, "SELECT 1")
		_, begin := tx.Begin(ctx)
		_, copied := tx.CopyFrom(ctx, pgx.Identifier{"effect"}, []string{"key"}, pgx.CopyFromRows(nil))
		_, prepared := tx.Prepare(ctx, "", "SELECT 1")
		large := tx.LargeObjects()
		_, object := large.Create(ctx, 0)
		for name, err := range map[string]error{
			"Exec": exec, "Query": query, "Rows": rows.Err(), "Begin": begin, "CopyFrom": copied, "Prepare": prepared, "LargeObjects": object,
			"QueryRow":  tx.QueryRow(ctx, "SELECT 1").Scan(&one),
			"SendBatch": tx.SendBatch(ctx, &pgx.Batch{}).Close(),
		} {
			testkit.ErrorIs(t, name, err, pgx.ErrTxClosed)
		}
	}
	e.WantRows("late", 0, 0)
}

// A result set that is left open blocks the connection: the commit cannot be sent. That is the
// handler's own mistake, and keeps no other request away.
func TestOpenRowsFailTheCommit(t *testing.T) {
	t.Parallel()
	b := receivertest.Must(breaker.New(breaker.Config{Failures: 1}))
	e := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{Breaker: b}, func(e *receivertest.Env) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			receivertest.Effect(e)(w, r)
			if r.Header.Get("Test-Leave-Open") != "" {
				rows, err := consumer.Tx(r.Context()).Query(r.Context(), "SELECT generate_series(1, 100000)")
				if err != nil || !rows.Next() {
					t.Errorf("no rows: %v", err)
				}
			}
		}
	})
	receivertest.WantProblem(t, e.Do(e.NewRequest("k", "{}", receivertest.With("Test-Leave-Open", "yes"))), 500, "commit-failed")
	if report := e.WantResult(consumer.ResultCommitFailed); report.Err == nil || !strings.Contains(report.Err.Error(), "left rows of a query open") {
		t.Errorf("reported %v", report.Err)
	}
	testkit.Equal(t, "the breaker", b.State(), breaker.Closed)
	e.Await("SELECT NOT EXISTS (" + receivertest.AdvisoryLocks + ")") // until the backend has noticed
	receivertest.WantFirst(t, e.Post("k", "{}"), 201, `{"done":"k"}`)
	e.WantRows("k", 1, 1)
}

func TestIsolationReachesTheDatabase(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		for level, want := range map[sql.IsolationLevel]string{
			sql.LevelDefault: "read committed", sql.LevelReadCommitted: "read committed",
			sql.LevelRepeatableRead: "repeatable read", sql.LevelSerializable: "serializable",
		} {
			e := receivertest.NewEnv(t, f, consumer.Config{Isolation: level}, func(e *receivertest.Env) http.HandlerFunc {
				return func(w http.ResponseWriter, r *http.Request) {
					mustNot(e, e.Exec(r.Context(), "INSERT INTO effect SELECT current_setting('transaction_isolation')"))
				}
			})
			receivertest.WantFirst(t, e.Post("k", "{}"), 200, "")
			receivertest.WantReplayed(t, e.Post("k", "{}"), 200, "")
			e.WantRows(want, 1, 0)
		}
	})
}

func TestTxOutsideTheMiddlewarePanics(t *testing.T) {
	t.Parallel()
	if event := consumer.EventFrom(context.Background()); !reflect.DeepEqual(event, consumer.Event{}) {
		t.Errorf("event %+v from nowhere", event)
	}
	wantPanic := func(want string, call func()) {
		t.Helper()
		defer func() {
			if message, _ := recover().(string); !strings.Contains(message, want) {
				t.Errorf("panic %q, want one with %q", message, want)
			}
		}()
		call()
	}
	wantPanic("came through Middleware", func() { consumer.Tx(context.Background()) })
	e := receivertest.NewEnv(t, receivertest.SQL(), consumer.Config{}, func(*receivertest.Env) http.HandlerFunc {
		return func(_ http.ResponseWriter, r *http.Request) {
			wantPanic("is sqlconsumer.Tx's", func() { consumer.Tx(r.Context()) })
		}
	})
	receivertest.WantFirst(t, e.Post("k", "{}"), 200, "")
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
	"schema":      {"SELECT set_config('search_path', 'tenant, public', false)"}, // which has a table of the same name
	"role":        {"SET ROLE pg_read_all_data"},
	"lock":        {"SELECT pg_advisory_lock(4711)"},
}

// No setting, role or lock of a handler reaches the next event, whether the handler succeeds or
// fails. What the pool has given the session does.
func TestSecuritySettingsReachNoOtherEvent(t *testing.T) {
	receivertest.EachFlavourAlways(t, func(t *testing.T, f receivertest.Flavour) {
		dsn := receivertest.WithSetting(pgtest.New(t, migrations.Inbox), "application_name", "receiver")
		if f.Name == "pgx" {
			dsn = receivertest.WithSetting(dsn, "pool_max_conns", "1")
		}
		e := newAnswering(t, f, dsn, answers["204"], func(http.HandlerFunc) func(e *receivertest.Env) http.HandlerFunc {
			return func(e *receivertest.Env) http.HandlerFunc {
				return func(w http.ResponseWriter, r *http.Request) {
					mustNot(e, e.Exec(r.Context(), `INSERT INTO public.met SELECT $1, current_setting('application_name') || ' ' || current_user,
						(SELECT string_agg(name || '=' || setting, ' ' ORDER BY name) FROM pg_settings WHERE source = 'session')`, consumer.EventFrom(r.Context()).IdempotencyKey))
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
		e.MustExec(`CREATE TABLE met (key text, name text, session text);
			CREATE SCHEMA tenant; CREATE TABLE tenant.processed_events (LIKE public.processed_events INCLUDING ALL);
			GRANT ALL ON ALL TABLES IN SCHEMA public TO pg_read_all_data`) // a role that every server has
		for name, statements := range changes {
			e.Do(e.NewRequest(name, "{}", running(statements...)))
			e.Do(e.NewRequest(name+", refused", "{}", running(statements...), receivertest.With("Test-Refuse", "yes")))
			if got := e.Post("after "+name, "{}"); got.Status != http.StatusNoContent {
				t.Errorf("after %s: %d %s", name, got.Status, got.Body)
			}
			if got := e.Post(name, "{}"); got.Header.Get(webhook.Replayed) != "true" {
				t.Errorf("%s again: %d %s", name, got.Status, got.Body)
			}
			if n := e.Count("SELECT count(*) FROM (" + receivertest.AdvisoryLocks + " AND objid = 4711) held"); n != 0 {
				t.Errorf("after %s: %d locks are held", name, n)
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
	pool := pgtest.PoolWith(t, dsn, func(cfg *pgxpool.Config) {
		cfg.MaxConns = 1
		cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `SET app.region = 'it''s "north"'; SET search_path = public, pg_catalog; SET work_mem = '5MB'`)
			return err
		}
	})
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
