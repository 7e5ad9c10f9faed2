package consumer_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// answers are those for which the memory of an event is closed in different ways.
var answers = map[string]http.HandlerFunc{
	"204":    func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) },
	"201":    func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusCreated) },
	"ignore": nil, // the event is ignored: see newAnswering
}

// newAnswering is NewEnv for a handler that ends with one of the answers.
func newAnswering(t testing.TB, f receivertest.Flavour, dsn string, answer http.HandlerFunc, handler func(answer http.HandlerFunc) func(e *receivertest.Env) http.HandlerFunc) (e *receivertest.Env) {
	t.Helper()
	if answer == nil {
		e = receivertest.NewHandlerEnvAt(t, f, dsn, consumer.Config{}, receivertest.Ignoring(handler(func(http.ResponseWriter, *http.Request) {})))
	} else {
		e = receivertest.NewEnvAt(t, f, dsn, consumer.Config{}, handler(answer))
	}
	e.MustExec(receivertest.Schema)
	return e
}

// sending is a handler that runs those of the request's Test-Statement headers after its effect.
func sending(answer http.HandlerFunc) func(e *receivertest.Env) http.HandlerFunc {
	return func(e *receivertest.Env) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			receivertest.Effect(e)(receivertest.DiscardWriter{}, r)
			for _, statement := range r.Header["Test-Statement"] {
				if err := e.Exec(r.Context(), statement); err != nil && !strings.Contains(err.Error(), "keeps its row") {
					e.T.Error(err)
				}
			}
			answer(w, r)
		}
	}
}

func running(all ...string) func(http.Header) {
	return func(h http.Header) {
		h["Test-Statement"] = all
		h.Set(webhook.RelatedReference, "customer 42")
	}
}

// An effect whose event is not remembered would come again with every request.
func TestHandlerThatRemovesItsOwnMemory(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		for name, answer := range answers {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				e := newAnswering(t, f, pgtest.New(t, migrations.Inbox), answer, sending)
				e.MustExec(`CREATE FUNCTION erase(key text) RETURNS void LANGUAGE sql AS 'DELETE FROM processed_events WHERE idempotency_key = key'`)
				for _, statement := range []string{
					"SELECT erase('k')",
					"UPDATE processed_events SET receiver = 'another' WHERE idempotency_key = 'k'",
					"DELETE FROM processed_events WHERE related_reference = 'customer 42'",
					"WITH gone AS (DELETE FROM public.\"processed_events\" RETURNING 1) SELECT count(*) FROM gone",
					"UPDATE Processed_Events SET idempotency_key = 'anonymous'",
					"TRUNCATE processed_events",
				} {
					for range 2 {
						// The handler minds no errors.
						receivertest.WantProblem(t, e.Do(e.NewRequest("k", "{}", running(statement))), 500, "commit-failed")
						report := e.WantResult(consumer.ResultCommitFailed)
						if report.Err == nil || !strings.Contains(report.Err.Error(), "a statement of the handler failed and the handler answered 2xx all the same") {
							t.Errorf("%s: reported %v", statement, report.Err)
						}
						e.WantRows("k", 0, 0)
					}
				}
				// What is personal in the row may go: it is the same row.
				got := e.Do(e.NewRequest("k", "{}", running("UPDATE processed_events SET related_reference = NULL WHERE related_reference = 'customer 42'")))
				if got.Status/100 != 2 || got.Header.Get(webhook.Replayed) != "" {
					t.Errorf("answered %d %s", got.Status, got.Body)
				}
				receivertest.WantReplayed(t, e.Post("k", "{}"), got.Status, "")
				e.WantRows("k", 1, 1)
				e.MustExec("DELETE FROM processed_events; TRUNCATE processed_events") // in another transaction than the event's
			})
		}
	})
}

// A handler may leave the transaction where processed_events is another table, or none. One that
// leaves it to a role without the right is told so, and nothing of it stays.
func TestHandlerThatLeavesMemoryOutOfReach(t *testing.T) {
	const away, back = "SET LOCAL search_path = tenant, public", "SET LOCAL search_path = public"
	cases := map[string]struct {
		statements []string
		problem    string // empty: it is as any other handler
	}{
		"another schema with a table of that name":   {[]string{"CREATE TABLE IF NOT EXISTS tenant.processed_events (LIKE processed_events)", away}, ""},
		"another schema without one":                 {[]string{"SET LOCAL search_path = tenant"}, ""},
		"a role that may not read it":                {[]string{"SET LOCAL ROLE pg_monitor"}, "commit-failed"},
		"another schema, put back":                   {[]string{away, back}, ""},
		"another schema before that of the table":    {[]string{away}, ""},
		"another role, put back":                     {[]string{"SET LOCAL ROLE pg_monitor", "RESET ROLE"}, ""},
		"another schema for the time of a savepoint": {[]string{"SAVEPOINT s", away, "ROLLBACK TO s"}, ""},
	}
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		for name, answer := range answers {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				e := newAnswering(t, f, pgtest.New(t, migrations.Inbox), answer, sending)
				e.MustExec("CREATE SCHEMA tenant")
				for key, test := range cases {
					key = strings.ReplaceAll(key, " ", "-")
					for range 2 {
						got := e.Do(e.NewRequest(key, "{}", running(test.statements...)))
						report := <-e.Reports
						if test.problem == "" {
							if got.Status/100 != 2 {
								t.Errorf("%s: answered %d %s (%v)", key, got.Status, got.Body, report.Err)
							}
							e.WantRows(key, 1, 1)
							continue
						}
						receivertest.WantProblem(t, got, 500, test.problem)
						if report.Result != consumer.ResultCommitFailed || !strings.Contains(report.Err.Error(), "role") {
							t.Errorf("%s: reported %+v", key, report)
						}
						e.WantRows(key, 0, 0)
					}
				}
			})
		}
	})
}

// Large objects do not ask whether the transaction that they are for is over. They must not find
// another in its place.
func TestLargeObjectsEndWithTheirTransaction(t *testing.T) {
	t.Parallel()
	for name, answer := range answers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			kept := make(chan receivertest.LargeObjects, 1)
			dsn := receivertest.WithSetting(pgtest.New(t, migrations.Inbox), "pool_max_conns", "1")
			e := newAnswering(t, receivertest.PGX(), dsn, answer, func(answer http.HandlerFunc) func(e *receivertest.Env) http.HandlerFunc {
				return func(e *receivertest.Env) http.HandlerFunc {
					return func(w http.ResponseWriter, r *http.Request) {
						receivertest.Effect(e)(receivertest.DiscardWriter{}, r)
						if consumer.EventFrom(r.Context()).IdempotencyKey == "first" {
							left, err := receivertest.WriteLargeObject(r.Context(), consumer.Tx(r.Context()))
							mustNot(e, err)
							kept <- left
						} else {
							(<-kept).Use(context.WithoutCancel(r.Context()), t)
						}
						answer(w, r)
					}
				}
			})
			for _, key := range []string{"first", "second"} {
				if got := e.Post(key, "{}"); got.Status/100 != 2 {
					t.Errorf("%s: answered %d %s", key, got.Status, got.Body)
				}
				e.WantRows(key, 1, 1)
			}
			testkit.Equal(t, "large objects are as they were committed", e.Count("SELECT count(*) FROM pg_largeobject_metadata m WHERE lo_get(m.oid) = 'kept'"), 1)
			if n := e.Count("SELECT count(*) FROM pg_largeobject_metadata"); n != 1 {
				t.Errorf("there are %d large objects, want 1", n)
			}
		})
	}
}

// The trigger that keeps an event's row sees neither what runs with triggers off nor a row that a
// savepoint has written again.
func TestRowThatTheTriggerDoesNotKeep(t *testing.T) {
	cases := map[string][]string{
		"triggers off":            {"SET LOCAL session_replication_role = replica", "DELETE FROM processed_events"},
		"trigger disabled":        {"ALTER TABLE processed_events DISABLE TRIGGER USER", "DELETE FROM processed_events", "ALTER TABLE processed_events ENABLE TRIGGER USER"},
		"written in a savepoint":  {"SAVEPOINT s", "UPDATE processed_events SET related_reference = NULL", "RELEASE s", "DELETE FROM processed_events"},
		"written in a function":   {"SELECT anonymise()", "DELETE FROM processed_events"},
		"key, after a savepoint":  {"SELECT anonymise()", "UPDATE processed_events SET idempotency_key = 'another'"},
		"all, after a RESET ALL":  {"RESET ALL", "TRUNCATE processed_events"},
		"another table for this":  {"ALTER TABLE processed_events RENAME TO past", "CREATE TABLE processed_events (LIKE past INCLUDING ALL)"},
		"while it commits":        {"INSERT INTO last VALUES (1)"}, // a deferred trigger, behind the last look
		"by a MERGE of savepoint": {"SELECT anonymise()", "MERGE INTO processed_events p USING (SELECT 1) x ON true WHEN MATCHED THEN DELETE"},
	}
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		for name, statements := range cases {
			t.Run(name, func(t *testing.T) {
				testsize.OneIn(t, 3)
				t.Parallel()
				e := newAnswering(t, f, pgtest.New(t, migrations.Inbox), answers["204"], sending)
				e.MustExec(`CREATE FUNCTION anonymise() RETURNS void LANGUAGE plpgsql AS $$
					BEGIN UPDATE processed_events SET related_reference = NULL; EXCEPTION WHEN division_by_zero THEN NULL; END $$;
					CREATE TABLE last (n int);
					CREATE FUNCTION at_last() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN DELETE FROM processed_events; RETURN NULL; END $$;
					CREATE CONSTRAINT TRIGGER at_last AFTER INSERT ON last DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION at_last()`)
				for range 2 {
					if got := e.Do(e.NewRequest("k", "{}", running(statements...))); got.Status != http.StatusInternalServerError {
						t.Errorf("answered %d %s", got.Status, got.Body)
					}
				}
				e.WantRows("k", 0, 0)
			})
		}
	})
}

// A handler that serves several transports may call Once for each of its events. Here it would be
// told that another has worked the event, and the effect would be lost.
func TestOnceForTheHandlersOwnEvent(t *testing.T) {
	t.Parallel()
	e := receivertest.NewHandlerEnv(t, receivertest.PGX(), consumer.Config{}, func(*receivertest.Env) receivertest.HandlerFunc {
		return func(ctx context.Context, event consumer.Event) error {
			return receivertest.OnceThenEffect(ctx, consumer.Tx(ctx), event)
		}
	})
	if got := e.Post("k", "{}"); got.Status != http.StatusInternalServerError || !strings.Contains(got.Body, "recorded already") {
		t.Errorf("answered %d %s", got.Status, got.Body)
	}
	e.WantRows("k", 0, 0)
}

// A handler that turns the wait for the disk off for itself must not turn it off for the event,
// which its sender never sends again.
func TestCommitWaitsForTheDiskAfterAnyHandler(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		for name, answer := range answers {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				e := newAnswering(t, f, pgtest.New(t, migrations.Inbox), answer, sending)
				e.SampleCommits("effect")
				e.Do(e.NewRequest("k", "{}", running("SET LOCAL synchronous_commit = off")))
				e.WantCommit("on")
			})
		}
	})
}

// A handler that waits for a statement under its own context must not keep its event, its
// connection and its worker for ever.
func TestStatementUnderAnotherContextEnds(t *testing.T) {
	const forever = "SELECT pg_sleep(1e6)"
	cfg := consumer.Config{Limits: consumer.Limits{HandlerTimeout: 50 * time.Millisecond, CommitTimeout: time.Second}}
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, cfg, func(e *receivertest.Env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				if err := e.Exec(context.WithoutCancel(r.Context()), forever); err == nil {
					t.Error("it slept for days")
				}
				w.WriteHeader(http.StatusNoContent)
			}
		})
		if got := e.Post("k", "{}"); got.Status != http.StatusInternalServerError {
			t.Errorf("answered %d %s", got.Status, got.Body)
		}
		e.WantRows("k", 0, 0)
	})
}

// What a handler leaves on the connection must not keep the next events away, or have them
// remembered where nothing lasts.
func TestConnectionsThatCannotBeUsedAreClosed(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		for name, statement := range map[string]string{
			"read only":     "SET default_transaction_read_only = on", // as after a failover, on connections to the former primary
			"memory hidden": "CREATE TEMP TABLE processed_events (LIKE public.processed_events INCLUDING ALL)",
			"effect hidden": "CREATE TEMP TABLE effect (LIKE public.effect)",
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				dsn := pgtest.New(t, migrations.Inbox)
				if f.Name == "pgx" {
					dsn = receivertest.WithSetting(dsn, "pool_max_conns", "1")
				}
				e := newAnswering(t, f, dsn, answers["204"], sending)
				e.Do(e.NewRequest("first", "{}", running(statement)))
				for range 3 {
					e.Post("k", "{}")
				}
				e.WantRows("k", 1, 1)
				if f.Name != "pgx" {
					return // it takes no batches
				}
				e.Do(e.NewRequest("second", "{}", running(statement)))
				for range 3 {
					e.Do(batchRequest(e, "l"))
				}
				e.WantRows("l", 1, 1)
			})
		}
	})
}

// A cursor WITH HOLD outlives its transaction. The next event must neither read from it nor fail
// because its name is taken.
func TestHeldCursorReachesNoOtherEvent(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		for name, answer := range answers {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				dsn := pgtest.New(t, migrations.Inbox)
				if f.Name == "pgx" {
					dsn = receivertest.WithSetting(dsn, "pool_max_conns", "1")
				}
				e := newAnswering(t, f, dsn, answer, sending)
				for _, key := range []string{"first", "second"} {
					e.Do(e.NewRequest(key, "{}", running("DECLARE held CURSOR WITH HOLD FOR SELECT 1")))
					e.WantRows(key, 1, 1)
				}
			})
		}
	})
}

// A statement that a handler prepares under the name of another would take its place for every
// event on the connection: without a transaction, the event is remembered although its handler
// refuses it.
func TestPreparedStatementsNamedAsTheEndOfATransaction(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"begin", "commit", "rollback", "begin isolation level serializable"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn := receivertest.WithSetting(pgtest.New(t, migrations.Inbox), "pool_max_conns", "1")
			e := receivertest.NewHandlerEnvAt(t, receivertest.PGX(), dsn, consumer.Config{}, func(e *receivertest.Env) receivertest.HandlerFunc {
				return func(ctx context.Context, event consumer.Event) error {
					if event.IdempotencyKey == "first" {
						_, err := consumer.Tx(ctx).Prepare(ctx, name, "SELECT 1")
						testkit.ErrorIs(t, "Prepare", err, consumer.ErrMiddlewareCommits)
						return nil
					}
					return receivertest.ErrHandler
				}
			})
			e.MustExec(receivertest.Schema)
			e.Post("first", "{}")
			e.Post("k", "{}")
			e.WantRows("k", 0, 0)
		})
	}
}

// A goroutine that a handler has left behind with the connection must not write into another
// event's transaction.
func TestConnectionEndsWithItsTransaction(t *testing.T) {
	t.Parallel()
	kept := make(chan *pgx.Conn, 1)
	dsn := receivertest.WithSetting(pgtest.New(t, migrations.Inbox), "pool_max_conns", "1")
	e := receivertest.NewHandlerEnvAt(t, receivertest.PGX(), dsn, consumer.Config{}, func(*receivertest.Env) receivertest.HandlerFunc {
		return func(ctx context.Context, event consumer.Event) error {
			if event.IdempotencyKey == "first" {
				kept <- consumer.Tx(ctx).Conn()
			} else if _, err := (<-kept).Exec(ctx, "INSERT INTO effect VALUES ('late')"); err == nil {
				t.Error("a statement of another event runs in this transaction")
			}
			return nil
		}
	})
	e.MustExec(receivertest.Schema)
	e.Post("first", "{}")
	e.Post("second", "{}")
	e.WantRows("late", 0, 0)
	e.WantRows("second", 0, 1)
}

// A ResponseWriter that hides the connection, as some middlewares for logs have it, takes
// BodyTimeout's effect. The log must say so.
func TestHiddenDeadlinesAreReported(t *testing.T) {
	t.Parallel()
	hides := func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			next.ServeHTTP(struct{ http.ResponseWriter }{w}, r)
		})
	}
	for name, wrap := range map[string]func(http.Handler) http.Handler{"hidden": hides, "plain": func(next http.Handler) http.Handler { return next }} {
		dsn := pgtest.New(t, migrations.Inbox)
		e := receivertest.StartEnv(t, receivertest.PGX(), dsn, consumer.Config{}, func(_ *receivertest.Env, cfg consumer.Config) http.Handler {
			handler, err := consumer.New(pgtest.Pool(t, dsn), cfg, func(context.Context, pgx.Tx, consumer.Event) error { return nil })
			pgtest.Must(t, err)
			return wrap(handler)
		})
		for _, key := range []string{"a", "b"} {
			if got := e.Post(key, "{}"); got.Status != http.StatusNoContent {
				t.Errorf("answered %d %s", got.Status, got.Body)
			}
		}
		want := map[string]int{"hidden": 1}[name]
		if n := strings.Count(e.Logged.String(), "BodyTimeout has no effect"); n != want {
			t.Errorf("%s: reported %d times, want %d", name, n, want)
		}
	}
}

// Application code may share the pool, and leave a search_path on a connection. In the table that
// it leads to a duplicate would be unknown.
func TestConnectionThatRemembersElsewhere(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Inbox)
	pool := pgtest.Pool(t, receivertest.WithSetting(dsn, "pool_max_conns", "1"))
	e := receivertest.StartEnv(t, receivertest.PGX(), dsn, consumer.Config{}, func(e *receivertest.Env, cfg consumer.Config) http.Handler {
		return receivertest.Must(consumer.Middleware(pool, cfg))(receivertest.Effect(e))
	})
	e.MustExec(receivertest.Schema)
	e.MustExec(`CREATE SCHEMA tenant; CREATE TABLE tenant.processed_events (LIKE processed_events INCLUDING ALL)`)
	if got := e.Post("k", "{}"); got.Status != http.StatusCreated {
		t.Fatalf("answered %d %s", got.Status, got.Body)
	}
	pgtest.Exec(t, pool, `SELECT set_config('search_path', 'tenant, public', false)`)
	for _, want := range []int{http.StatusServiceUnavailable, http.StatusCreated} { // the second on a new connection
		if got := e.Post("k", "{}"); got.Status != want {
			t.Errorf("a duplicate is answered %d %s, want %d", got.Status, got.Body, want)
		}
	}
	e.WantRows("k", 1, 1)
	testkit.Contains(t, "the log does not say what to do", e.Logged.String(), "give the receiver its own pool")
}
