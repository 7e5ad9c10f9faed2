package receivertest

import (
	"cmp"
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// Patience ends a test that would hang. No assertion depends on it.
const Patience = 30 * time.Second

// Env is a receiver: its own database, the middleware, a real server and a real client.
type Env struct {
	Flavour
	T       testing.TB
	DSN     string
	Pool    *pgxpool.Pool // for assertions, apart from the middleware's own connections
	URL     string
	Client  *http.Client
	Reports chan consumer.Report
	Logged  *testkit.Buffer
}

// Schema is what the handlers write: effects, and a deferred foreign key that fails at COMMIT.
const Schema = `
CREATE TABLE effect (key text NOT NULL);
CREATE TABLE parent (id int PRIMARY KEY);
CREATE TABLE child (parent int REFERENCES parent DEFERRABLE INITIALLY DEFERRED);`

// NewEnv returns a receiver with its own database, whose handler answers over HTTP.
func NewEnv(t testing.TB, f Flavour, cfg consumer.Config, handler func(e *Env) http.HandlerFunc) *Env {
	t.Helper()
	e := NewEnvAt(t, f, pgtest.New(t, migrations.Inbox), cfg, handler)
	e.MustExec(Schema)
	return e
}

// NewEnvAt returns one more receiver at an existing database. A handler that writes nothing answers
// 200.
func NewEnvAt(t testing.TB, f Flavour, dsn string, cfg consumer.Config, handler func(e *Env) http.HandlerFunc) *Env {
	t.Helper()
	return StartEnv(t, f, dsn, cfg, func(e *Env, cfg consumer.Config) http.Handler {
		plain := handler(e)
		return f.Wrap(t, dsn, cfg)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			plain(w, r)
			w.WriteHeader(http.StatusOK) // without effect after another
		}))
	})
}

// NewHandlerEnv is [NewEnv] for a handler that returns an error.
func NewHandlerEnv(t testing.TB, f Flavour, cfg consumer.Config, handler func(e *Env) HandlerFunc) *Env {
	t.Helper()
	e := NewHandlerEnvAt(t, f, pgtest.New(t, migrations.Inbox), cfg, handler)
	e.MustExec(Schema)
	return e
}

// NewHandlerEnvAt is [NewEnvAt] for a handler that returns an error.
func NewHandlerEnvAt(t testing.TB, f Flavour, dsn string, cfg consumer.Config, handler func(e *Env) HandlerFunc) *Env {
	t.Helper()
	return StartEnv(t, f, dsn, cfg, func(e *Env, cfg consumer.Config) http.Handler {
		inner := f.call(t, dsn, cfg, handler(e))
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			inner.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), requestKey{}, r)))
		})
	})
}

// StartEnv serves the receiver that receive returns.
func StartEnv(t testing.TB, f Flavour, dsn string, cfg consumer.Config, receive func(e *Env, cfg consumer.Config) http.Handler) *Env {
	t.Helper()
	e := &Env{
		Flavour: f,
		T:       t,
		DSN:     dsn,
		Pool:    pgtest.Pool(t, dsn),
		Reports: make(chan consumer.Report, 1000),
		Logged:  &testkit.Buffer{},
	}
	cfg.Receiver = cmp.Or(cfg.Receiver, "test")
	if len(cfg.Secrets) == 0 && !cfg.Verify.AllowUnsigned && cfg.Verify.Custom == nil {
		cfg.Secrets = []string{SecretText}
	}
	if cfg.Observe == nil {
		cfg.Observe = func(_ context.Context, r consumer.Report) { e.Reports <- r }
	}
	cfg.Logger = slog.New(slog.NewTextHandler(e.Logged, &slog.HandlerOptions{Level: slog.LevelDebug}))
	server := httptest.NewUnstartedServer(receive(e, cfg))
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError) // aborted handlers
	server.Start()
	t.Cleanup(server.Close)
	e.URL, e.Client = server.URL, server.Client()
	e.Client.Timeout = Patience
	e.Client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return e
}

// MustExec runs a statement, or several without arguments.
func (e *Env) MustExec(query string, args ...any) {
	e.T.Helper()
	if _, err := e.Pool.Exec(context.Background(), query, args...); err != nil {
		e.T.Fatalf("%s: %v", query, err)
	}
}

// Count returns the only number that query answers.
func (e *Env) Count(query string, args ...any) (n int) {
	e.T.Helper()
	if err := e.Pool.QueryRow(context.Background(), query, args...).Scan(&n); err != nil {
		e.T.Fatalf("%s: %v", query, err)
	}
	return n
}

// WantRows asserts what the database remembers of key: its effects and its row in the inbox.
func (e *Env) WantRows(key string, effects, processed int) {
	e.T.Helper()
	if n := e.Count("SELECT count(*) FROM effect WHERE key = $1", key); n != effects {
		e.T.Errorf("%d effects of %s, want %d", n, key, effects)
	}
	if n := e.Count("SELECT count(*) FROM processed_events WHERE idempotency_key = $1", key); n != processed {
		e.T.Errorf("%d rows in processed_events for %s, want %d", n, key, processed)
	}
}

// WantResult asserts the outcome of the earliest request not yet asked about.
func (e *Env) WantResult(want consumer.Result) consumer.Report {
	e.T.Helper()
	select {
	case report := <-e.Reports:
		if report.Result != want {
			e.T.Errorf("result %q (%v), want %q", report.Result, report.Err, want)
		}
		return report
	case <-e.T.Context().Done():
		e.T.Fatal("no result")
	}
	return consumer.Report{}
}

// AdvisoryLocks are those of the test's own database: pg_locks shows the whole server.
const AdvisoryLocks = `SELECT FROM pg_locks
	WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`

// Await asks the database until query is true. The tests use it for what PostgreSQL cannot signal:
// that a session waits.
func (e *Env) Await(query string, args ...any) {
	e.T.Helper()
	pause := time.NewTicker(2 * time.Millisecond)
	defer pause.Stop()
	for reached := false; !reached; <-pause.C {
		if err := e.Pool.QueryRow(e.T.Context(), query, args...).Scan(&reached); err != nil {
			e.T.Fatalf("%s: %v", query, err)
		}
	}
}

// Hold runs what in a transaction that stays open until release is called; release commits it.
func (e *Env) Hold(what func(tx pgx.Tx) error) (release func()) {
	e.T.Helper()
	tx, err := e.Pool.Begin(e.T.Context())
	if err == nil {
		err = what(tx)
	}
	pgtest.Must(e.T, err)
	e.T.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return func() {
		e.T.Helper()
		pgtest.Must(e.T, tx.Commit(context.Background()))
	}
}
