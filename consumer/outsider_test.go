package consumer_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// The trigger that keeps an event's row sees neither what runs with triggers off nor a row that a savepoint has written anew.
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
	eachFlavour(t, func(t *testing.T, f flavour) {
		for name, statements := range cases {
			t.Run(name, func(t *testing.T) {
				testsize.OneIn(t, 3)
				t.Parallel()
				e := newAnswering(t, f, pgtest.New(t, migrations.Inbox), answers["204"], sending)
				e.mustExec(`CREATE FUNCTION anonymise() RETURNS void LANGUAGE plpgsql AS $$
					BEGIN UPDATE processed_events SET related_reference = NULL; EXCEPTION WHEN division_by_zero THEN NULL; END $$;
					CREATE TABLE last (n int);
					CREATE FUNCTION at_last() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN DELETE FROM processed_events; RETURN NULL; END $$;
					CREATE CONSTRAINT TRIGGER at_last AFTER INSERT ON last DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION at_last()`)
				for range 2 {
					if got := e.do(e.newRequest("k", "{}", running(statements...))); got.status != http.StatusInternalServerError {
						t.Errorf("answered %d %s", got.status, got.body)
					}
				}
				e.wantRows("k", 0, 0)
			})
		}
	})
}

// A handler that serves several transports may call Once for each of its events. Here it would be told that another has worked the
// event, and the effect would be lost.
func TestOnceForTheHandlersOwnEvent(t *testing.T) {
	t.Parallel()
	onceThenEffect := func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		first, err := consumer.Once(ctx, tx, event.Receiver, event.Source, event.Key)
		if err != nil || !first {
			return err
		}
		return effectOf(ctx, event.Key)
	}
	e := newHandlerEnv(t, flavours[0], consumer.Config{}, func(*env) handlerFunc {
		return func(ctx context.Context, event consumer.Event) error {
			return onceThenEffect(ctx, consumer.Tx(ctx), event)
		}
	})
	if got := e.post("k", "{}"); got.status != http.StatusInternalServerError || !strings.Contains(got.body, "recorded already") {
		t.Errorf("answered %d %s", got.status, got.body)
	}
	e.wantRows("k", 0, 0)

	p := newInbox(t, inbox.Config{MaxAttempts: 1, Handle: onceThenEffect})
	p.run()
	p.record("k")
	p.wantWorked("k", consumer.ResultFailed)
	p.wantState("k", inbox.StateFailed, 1)
}

// seesCommit notes what synchronous_commit is when a transaction commits: a deferred trigger runs then.
const seesCommit = `
CREATE TABLE noting (n int);
CREATE TABLE noted (setting text);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO noted SELECT current_setting('synchronous_commit'); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER note AFTER INSERT ON noting DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION note()`

// A handler that turns the wait for the disk off for itself must not turn it off for the event, which its sender never sends again.
func TestCommitWaitsForTheDiskAfterAnyHandler(t *testing.T) {
	statements := []string{"INSERT INTO noting VALUES (1)", "SET LOCAL synchronous_commit = off"}
	wantOn := func(t *testing.T, e *env) {
		t.Helper()
		if n := e.count("SELECT count(*) FROM noted WHERE setting = 'on'"); n != 1 {
			t.Errorf("%d commits waited for the disk, want 1", n)
		}
	}
	eachFlavour(t, func(t *testing.T, f flavour) {
		for name, answer := range answers {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				e := newAnswering(t, f, pgtest.New(t, migrations.Inbox), answer, sending)
				e.mustExec(seesCommit)
				e.do(e.newRequest("k", "{}", running(statements...)))
				wantOn(t, e)
			})
		}
	})
	t.Run("inbox", func(t *testing.T) {
		t.Parallel()
		p := newInbox(t, inbox.Config{Handle: func(ctx context.Context, tx pgx.Tx, _ consumer.Event) (err error) {
			for _, statement := range statements {
				_, failed := tx.Exec(ctx, statement)
				err = errors.Join(err, failed)
			}
			return err
		}})
		p.mustExec(seesCommit)
		p.run()
		p.record("k")
		p.wantWorked("k", consumer.ResultProcessed)
		wantOn(t, p.env)
	})
}

// A handler that waits for a statement under a context of its own must not keep its event, its connection and its worker for ever.
func TestStatementUnderAnotherContextEnds(t *testing.T) {
	const forever = "SELECT pg_sleep(1e6)"
	cfg := consumer.Config{HandlerTimeout: 50 * time.Millisecond, CommitTimeout: time.Second}
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, cfg, func(e *env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				if err := e.exec(context.WithoutCancel(r.Context()), forever); err == nil {
					t.Error("it slept for days")
				}
				w.WriteHeader(http.StatusNoContent)
			}
		})
		if got := e.post("k", "{}"); got.status != http.StatusInternalServerError {
			t.Errorf("answered %d %s", got.status, got.body)
		}
		e.wantRows("k", 0, 0)
	})
	t.Run("inbox", func(t *testing.T) {
		t.Parallel()
		p := newInbox(t, inbox.Config{Config: cfg, MaxAttempts: 1, Handle: func(ctx context.Context, tx pgx.Tx, _ consumer.Event) error {
			_, err := tx.Exec(context.WithoutCancel(ctx), forever)
			return err
		}})
		p.run()
		p.record("k")
		p.wantWorked("k", consumer.ResultFailed)
	})
}

// What a handler leaves on the connection must not keep the next events away, or have them remembered where nothing lasts.
func TestConnectionsThatCannotBeUsedAreClosed(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		for name, statement := range map[string]string{
			"read only":     "SET default_transaction_read_only = on", // as after a failover, on connections to the former primary
			"memory hidden": "CREATE TEMP TABLE processed_events (LIKE public.processed_events INCLUDING ALL)",
			"effect hidden": "CREATE TEMP TABLE effect (LIKE public.effect)",
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				dsn := pgtest.New(t, migrations.Inbox)
				if f.name == "pgx" {
					dsn = withSetting(dsn, "pool_max_conns", "1")
				}
				e := newAnswering(t, f, dsn, answers["204"], sending)
				e.do(e.newRequest("first", "{}", running(statement)))
				for range 3 {
					e.post("k", "{}")
				}
				e.wantRows("k", 1, 1)
			})
		}
	})
}

// A statement that a handler prepares under the name of another would take its place for every event on the connection: without a
// transaction, the event is remembered although its handler refuses it.
func TestPreparedStatementsNamedAsTheEndOfATransaction(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"begin", "commit", "rollback", "begin isolation level serializable"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn := withSetting(pgtest.New(t, migrations.Inbox), "pool_max_conns", "1")
			e := newHandlerEnvAt(t, flavours[0], dsn, consumer.Config{}, func(e *env) handlerFunc {
				return func(ctx context.Context, event consumer.Event) error {
					if event.Key == "first" {
						_, err := consumer.Tx(ctx).Prepare(ctx, name, "SELECT 1")
						if !errors.Is(err, consumer.ErrMiddlewareCommits) {
							t.Errorf("Prepare: %v", err)
						}
						return nil
					}
					return errHandler
				}
			})
			e.mustExec(schema)
			e.post("first", "{}")
			e.post("k", "{}")
			e.wantRows("k", 0, 0)
		})
	}
}

// A goroutine that a handler has left behind with the connection must not write into another event's transaction.
func TestConnectionEndsWithItsTransaction(t *testing.T) {
	t.Parallel()
	kept := make(chan *pgx.Conn, 1)
	dsn := withSetting(pgtest.New(t, migrations.Inbox), "pool_max_conns", "1")
	e := newHandlerEnvAt(t, flavours[0], dsn, consumer.Config{}, func(*env) handlerFunc {
		return func(ctx context.Context, event consumer.Event) error {
			if event.Key == "first" {
				kept <- consumer.Tx(ctx).Conn()
			} else if _, err := (<-kept).Exec(ctx, "INSERT INTO effect VALUES ('late')"); err == nil {
				t.Error("a statement of another event runs in this transaction")
			}
			return nil
		}
	})
	e.mustExec(schema)
	e.post("first", "{}")
	e.post("second", "{}")
	e.wantRows("late", 0, 0)
	e.wantRows("second", 0, 1)
}

// A ResponseWriter that hides the connection, as some middlewares for logs have it, takes BodyTimeout's effect. The log must say so.
func TestHiddenDeadlinesAreReported(t *testing.T) {
	t.Parallel()
	hides := func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			next.ServeHTTP(struct{ http.ResponseWriter }{w}, r)
		})
	}
	for name, wrap := range map[string]func(http.Handler) http.Handler{"hidden": hides, "plain": func(next http.Handler) http.Handler { return next }} {
		dsn := pgtest.New(t, migrations.Inbox)
		e := startEnv(t, flavours[0], dsn, consumer.Config{}, func(_ *env, cfg consumer.Config) http.Handler {
			handler, err := consumer.New(pgtest.Pool(t, dsn), cfg, func(context.Context, pgx.Tx, consumer.Event) error { return nil })
			if err != nil {
				t.Fatal(err)
			}
			return wrap(handler)
		})
		for _, key := range []string{"a", "b"} {
			if got := e.post(key, "{}"); got.status != http.StatusNoContent {
				t.Errorf("answered %d %s", got.status, got.body)
			}
		}
		want := map[string]int{"hidden": 1}[name]
		if n := strings.Count(e.logged.String(), "BodyTimeout has no effect"); n != want {
			t.Errorf("%s: reported %d times, want %d", name, n, want)
		}
	}
}

// Application code may share the pool, and leave a search_path on a connection. In the table that it leads to a duplicate would be
// unknown.
func TestConnectionThatRemembersElsewhere(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Inbox)
	pool := pgtest.Pool(t, withSetting(dsn, "pool_max_conns", "1"))
	e := startEnv(t, flavours[0], dsn, consumer.Config{}, func(e *env, cfg consumer.Config) http.Handler {
		return consumer.Must(consumer.Middleware(pool, cfg))(effect(e))
	})
	e.mustExec(schema)
	e.mustExec(`CREATE SCHEMA tenant; CREATE TABLE tenant.processed_events (LIKE processed_events INCLUDING ALL)`)
	if got := e.post("k", "{}"); got.status != http.StatusCreated {
		t.Fatalf("answered %d %s", got.status, got.body)
	}
	if _, err := pool.Exec(t.Context(), `SELECT set_config('search_path', 'tenant, public', false)`); err != nil {
		t.Fatal(err)
	}
	for _, want := range []int{http.StatusServiceUnavailable, http.StatusCreated} { // the second on a new connection
		if got := e.post("k", "{}"); got.status != want {
			t.Errorf("a duplicate is answered %d %s, want %d", got.status, got.body, want)
		}
	}
	e.wantRows("k", 1, 1)
	if !strings.Contains(e.logged.String(), "give the receiver a pool of its own") {
		t.Error("the log does not say what to do")
	}
}
