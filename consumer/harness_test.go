package consumer_test

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/sqlconsumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

const (
	secretText = "whsec_b3V0Ym94LXJlbGF5LXRlc3Qtc2VjcmV0LTAwMDE="
	otherText  = "whsec_b3V0Ym94LXJlbGF5LXRlc3Qtc2VjcmV0LTAwMDI="
)

var secret, otherSecret = mustSecret(secretText), mustSecret(otherText)

func mustSecret(text string) webhook.Secret {
	s, err := webhook.ParseSecret(text)
	if err != nil {
		panic(err)
	}
	return s
}

// patience ends a test that would hang. No assertion depends on it.
const patience = 30 * time.Second

// A flavour is one of the two drivers; every behaviour is tested through both.
type flavour struct {
	name string
	wrap func(t testing.TB, dsn string, cfg consumer.Config) func(http.Handler) http.Handler
	call func(t testing.TB, dsn string, cfg consumer.Config, handle handlerFunc) http.Handler
	exec func(ctx context.Context, query string, args ...any) error // in the handler's transaction
	once func(ctx context.Context, e *env, source, key string, hold func()) (bool, error)

	prune func(ctx context.Context, e *env, cfg consumer.PruneConfig) (consumer.Pruned, error)
}

// handlerFunc is a consumer.Handler of either flavour, which writes by flavour.exec.
type handlerFunc func(ctx context.Context, event consumer.Event) error

var flavours = []flavour{
	{
		name: "pgx",
		wrap: func(t testing.TB, dsn string, cfg consumer.Config) func(http.Handler) http.Handler {
			return consumer.Must(consumer.Middleware(pgtest.Pool(t, dsn), cfg))
		},
		call: func(t testing.TB, dsn string, cfg consumer.Config, handle handlerFunc) http.Handler {
			return consumer.Must(consumer.New(pgtest.Pool(t, dsn), cfg, func(ctx context.Context, _ pgx.Tx, event consumer.Event) error { return handle(ctx, event) }))
		},
		exec: func(ctx context.Context, query string, args ...any) error {
			_, err := consumer.Tx(ctx).Exec(ctx, query, args...)
			return err
		},
		once: func(ctx context.Context, e *env, source, key string, hold func()) (first bool, err error) {
			err = pgx.BeginFunc(ctx, e.pool, func(tx pgx.Tx) error {
				first, err = consumer.Once(ctx, tx, "test", source, key)
				hold()
				return err
			})
			return first, err
		},
		prune: func(ctx context.Context, e *env, cfg consumer.PruneConfig) (consumer.Pruned, error) {
			return consumer.Prune(ctx, e.pool, cfg)
		},
	},
	{
		name: "database/sql",
		wrap: func(t testing.TB, dsn string, cfg consumer.Config) func(http.Handler) http.Handler {
			return consumer.Must(sqlconsumer.Middleware(openSQL(t, dsn), cfg))
		},
		call: func(t testing.TB, dsn string, cfg consumer.Config, handle handlerFunc) http.Handler {
			return consumer.Must(sqlconsumer.New(openSQL(t, dsn), cfg, func(ctx context.Context, _ *sql.Tx, event consumer.Event) error { return handle(ctx, event) }))
		},
		exec: func(ctx context.Context, query string, args ...any) error {
			_, err := sqlconsumer.Tx(ctx).ExecContext(ctx, query, args...)
			return err
		},
		once: func(ctx context.Context, e *env, source, key string, hold func()) (bool, error) {
			tx, err := openSQL(e.t, e.dsn).BeginTx(ctx, nil)
			if err != nil {
				return false, err
			}
			defer tx.Rollback()
			first, err := sqlconsumer.Once(ctx, tx, "test", source, key)
			hold()
			if err != nil {
				return false, err
			}
			return first, tx.Commit()
		},
		prune: func(ctx context.Context, e *env, cfg consumer.PruneConfig) (consumer.Pruned, error) {
			db := openSQL(e.t, e.dsn)
			defer db.Close() // some tests prune very often
			return sqlconsumer.Prune(ctx, db, cfg)
		},
	},
}

func openSQL(t testing.TB, dsn string) *sql.DB {
	db, err := sql.Open("pgx", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

// withSetting adds a parameter to a DSN.
func withSetting(dsn, name, value string) string {
	u, err := url.Parse(dsn)
	if err != nil {
		panic(err)
	}
	query := u.Query()
	query.Set(name, value)
	u.RawQuery = query.Encode()
	return u.String()
}

// eachFlavour runs test once per driver, in parallel. In make test it runs it with pgx alone.
func eachFlavour(t *testing.T, test func(t *testing.T, f flavour)) {
	eachFlavourAlways(t, func(t *testing.T, f flavour) {
		if f.name != "pgx" {
			testsize.Long(t)
		}
		test(t, f)
	})
}

// eachFlavourAlways is eachFlavour for what is promised first: make test runs it with both drivers.
func eachFlavourAlways(t *testing.T, test func(t *testing.T, f flavour)) {
	t.Parallel()
	for _, f := range flavours {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			test(t, f)
		})
	}
}

// env is a receiver: a database of its own, the middleware, a real server and a real client.
type env struct {
	flavour
	t       testing.TB
	dsn     string
	pool    *pgxpool.Pool // for assertions, apart from the middleware's own connections
	url     string
	client  *http.Client
	reports chan consumer.Report
	logged  *syncBuffer
}

// schema is what the handlers write: effects, and a deferred foreign key that fails at COMMIT.
const schema = `
CREATE TABLE effect (key text NOT NULL);
CREATE TABLE parent (id int PRIMARY KEY);
CREATE TABLE child (parent int REFERENCES parent DEFERRABLE INITIALLY DEFERRED);`

func newEnv(t testing.TB, f flavour, cfg consumer.Config, handler func(e *env) http.HandlerFunc) *env {
	t.Helper()
	e := newEnvAt(t, f, pgtest.New(t, migrations.Inbox), cfg, handler)
	e.mustExec(schema)
	return e
}

// newEnvAt is one more receiver at an existing database. A handler that writes nothing answers 200.
func newEnvAt(t testing.TB, f flavour, dsn string, cfg consumer.Config, handler func(e *env) http.HandlerFunc) *env {
	t.Helper()
	return startEnv(t, f, dsn, cfg, func(e *env, cfg consumer.Config) http.Handler {
		plain := handler(e)
		return f.wrap(t, dsn, cfg)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			plain(w, r)
			w.WriteHeader(http.StatusOK) // without effect after another
		}))
	})
}

// newHandlerEnv is newEnv for a handler that returns an error.
func newHandlerEnv(t testing.TB, f flavour, cfg consumer.Config, handler func(e *env) handlerFunc) *env {
	t.Helper()
	e := newHandlerEnvAt(t, f, pgtest.New(t, migrations.Inbox), cfg, handler)
	e.mustExec(schema)
	return e
}

func newHandlerEnvAt(t testing.TB, f flavour, dsn string, cfg consumer.Config, handler func(e *env) handlerFunc) *env {
	t.Helper()
	return startEnv(t, f, dsn, cfg, func(e *env, cfg consumer.Config) http.Handler {
		inner := f.call(t, dsn, cfg, handler(e))
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			inner.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), requestKey{}, r)))
		})
	})
}

// requestKey is that of the request in the context of a handler of newHandlerEnv: tests tell their handlers by headers what to do.
type requestKey struct{}

// ignoring has the event ignored after what a plain handler does; the answer of that is dropped.
func ignoring(handler func(e *env) http.HandlerFunc) func(e *env) handlerFunc {
	return func(e *env) handlerFunc {
		plain := handler(e)
		return func(ctx context.Context, _ consumer.Event) error {
			plain(discardWriter{}, ctx.Value(requestKey{}).(*http.Request).WithContext(ctx))
			return consumer.Ignore("no concern")
		}
	}
}

// startEnv makes an env of the receiver that receive returns.
func startEnv(t testing.TB, f flavour, dsn string, cfg consumer.Config, receive func(e *env, cfg consumer.Config) http.Handler) *env {
	t.Helper()
	e := &env{
		flavour: f,
		t:       t,
		dsn:     dsn,
		pool:    pgtest.Pool(t, dsn),
		reports: make(chan consumer.Report, 1000),
		logged:  &syncBuffer{},
	}
	cfg.Receiver = cmp.Or(cfg.Receiver, "test")
	if len(cfg.Secrets) == 0 && !cfg.AllowUnsigned && cfg.Verify == nil {
		cfg.Secrets = []string{secretText}
	}
	if cfg.Observe == nil {
		cfg.Observe = func(_ context.Context, r consumer.Report) { e.reports <- r }
	}
	cfg.Logger = slog.New(slog.NewTextHandler(e.logged, &slog.HandlerOptions{Level: slog.LevelDebug}))
	server := httptest.NewUnstartedServer(receive(e, cfg))
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError) // aborted handlers
	server.Start()
	t.Cleanup(server.Close)
	e.url, e.client = server.URL, server.Client()
	e.client.Timeout = patience
	e.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return e
}

// effect is the ordinary handler: one row, and a response that tells runs apart from replays.
func effect(e *env) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		key := consumer.EventFrom(r.Context()).Key
		if err := e.exec(r.Context(), "INSERT INTO effect VALUES ($1)", key); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Handler", "ran")
		w.WriteHeader(http.StatusCreated)
		io.WriteString(w, `{"done":"`+key+`"}`)
	}
}

func (e *env) mustExec(query string, args ...any) {
	e.t.Helper()
	if _, err := e.pool.Exec(context.Background(), query, args...); err != nil {
		e.t.Fatalf("%s: %v", query, err)
	}
}

func (e *env) count(query string, args ...any) (n int) {
	e.t.Helper()
	if err := e.pool.QueryRow(context.Background(), query, args...).Scan(&n); err != nil {
		e.t.Fatalf("%s: %v", query, err)
	}
	return n
}

// wantRows asserts what the database remembers of key: its effects and its row in the inbox.
func (e *env) wantRows(key string, effects, processed int) {
	e.t.Helper()
	if n := e.count("SELECT count(*) FROM effect WHERE key = $1", key); n != effects {
		e.t.Errorf("%d effects of %s, want %d", n, key, effects)
	}
	if n := e.count("SELECT count(*) FROM processed_events WHERE idempotency_key = $1", key); n != processed {
		e.t.Errorf("%d rows in processed_events for %s, want %d", n, key, processed)
	}
}

// wantResult asserts the outcome of the earliest request not yet asked about.
func (e *env) wantResult(want consumer.Result) consumer.Report {
	e.t.Helper()
	select {
	case report := <-e.reports:
		if report.Result != want {
			e.t.Errorf("result %q (%v), want %q", report.Result, report.Err, want)
		}
		return report
	case <-e.t.Context().Done():
		e.t.Fatal("no result")
	}
	return consumer.Report{}
}

// newRequest is what a relay sends, except for what change does to its headers before they are signed.
func (e *env) newRequest(key, body string, change ...func(http.Header)) *http.Request {
	r, err := http.NewRequestWithContext(e.t.Context(), http.MethodPost, e.url, strings.NewReader(body))
	if err != nil {
		e.t.Fatal(err)
	}
	r.GetBody = nil // the transport must not repeat a request on its own
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set(webhook.IdempotencyKey, key)
	r.Header.Set(webhook.EventType, "invoice.created")
	r.Header.Set(webhook.Attempt, "1")
	for _, f := range change {
		f(r.Header)
	}
	webhook.Sign(r.Header, []byte(body), time.Now(), secret)
	return r
}

// newRequestTo is newRequest to another receiver, which listens at url.
func (e *env) newRequestTo(url, key, body string, change ...func(http.Header)) *http.Request {
	r := e.newRequest(key, body, change...)
	var err error
	if r.URL, err = r.URL.Parse(url); err != nil {
		e.t.Fatal(err)
	}
	return r
}

// with sets a header by which a test tells its handler what to do.
func with(name, value string) func(http.Header) {
	return func(h http.Header) { h.Set(name, value) }
}

// response is an answer read to its end.
type response struct {
	status int
	header http.Header
	body   string
}

func (e *env) do(r *http.Request) response {
	e.t.Helper()
	answer, err := e.try(r)
	if err != nil {
		e.t.Fatal(err)
	}
	return answer
}

func (e *env) try(r *http.Request) (response, error) {
	resp, err := e.client.Do(r)
	if err != nil {
		return response{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return response{resp.StatusCode, resp.Header, string(body)}, err
}

func (e *env) post(key, body string) response {
	e.t.Helper()
	return e.do(e.newRequest(key, body))
}

// wantProblem asserts a refusal: its status, its stable type and its form.
func wantProblem(t testing.TB, got response, status int, name string) {
	t.Helper()
	var p struct {
		Type, Title, Detail string
		Status              int
	}
	if err := json.Unmarshal([]byte(got.body), &p); err != nil {
		t.Fatalf("status %d, body %q: %v", got.status, got.body, err)
	}
	if got.status != status || p.Status != status || p.Type != "urn:outbox-relay:problem:"+name || p.Title == "" || p.Detail == "" {
		t.Errorf("status %d, problem %+v; want %d %s", got.status, p, status, name)
	}
	if got := got.header.Get("Content-Type"); got != "application/problem+json" {
		t.Errorf("Content-Type %q", got)
	}
	wantRetry := status == http.StatusConflict || status == http.StatusServiceUnavailable
	if got := got.header.Get("Retry-After"); (got == "1") != wantRetry {
		t.Errorf("Retry-After %q with status %d", got, status)
	}
}

func wantReplayed(t testing.TB, got response, status int, body string) {
	t.Helper()
	if got.status != status || got.body != body || got.header.Get(webhook.Replayed) != "true" {
		t.Errorf("got %d %q %v; want %d %q replayed", got.status, got.body, got.header, status, body)
	}
}

func wantFirst(t testing.TB, got response, status int, body string) {
	t.Helper()
	if got.status != status || got.body != body || got.header.Get(webhook.Replayed) != "" {
		t.Errorf("got %d %q %v; want %d %q, not replayed", got.status, got.body, got.header, status, body)
	}
}

// syncBuffer is a log that tests read while servers write.
type syncBuffer struct {
	mu   sync.Mutex // guards text
	text bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// advisoryLocks are those of the test's own database: pg_locks shows the whole server.
const advisoryLocks = `SELECT FROM pg_locks
	WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`

// await asks the database until query is true. The tests use it for what PostgreSQL cannot signal: that a session waits.
func (e *env) await(query string, args ...any) {
	e.t.Helper()
	pause := time.NewTicker(2 * time.Millisecond)
	defer pause.Stop()
	for reached := false; !reached; <-pause.C {
		if err := e.pool.QueryRow(e.t.Context(), query, args...).Scan(&reached); err != nil {
			e.t.Fatalf("%s: %v", query, err)
		}
	}
}

// hold runs what in a transaction that stays open until release is called; release commits it.
func (e *env) hold(what func(tx pgx.Tx) error) (release func()) {
	e.t.Helper()
	tx, err := e.pool.Begin(e.t.Context())
	if err == nil {
		err = what(tx)
	}
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return func() {
		e.t.Helper()
		if err := tx.Commit(context.Background()); err != nil {
			e.t.Fatal(err)
		}
	}
}
