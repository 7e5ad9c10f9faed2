package consumer_test

import (
	"context"
	"errors"
	"net/http"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// unseen is put before what Tx would refuse if it stood first: so it is sent, by both drivers, and
// must show at the end.
const unseen = "/* */ "

func mustNot(e *receivertest.Env, err error) {
	if err != nil {
		e.T.Error(err)
	}
}

// skewWrites commits a transaction that, with the handler's, has no serial order: each reads what
// the other writes.
func skewWrites(e *receivertest.Env, r *http.Request) {
	ctx := context.WithoutCancel(r.Context())
	mustNot(e, e.Exec(ctx, "INSERT INTO parent SELECT 100 + count(*) FROM parent"))
	mustNot(e, pgx.BeginTxFunc(ctx, e.Pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "INSERT INTO parent SELECT 200 + count(*) FROM parent")
		return err
	}))
}

// A handler that ends the transaction by a statement is found out, whatever it answers. What it
// writes into a transaction that it put in the place of the middleware's has no row of the event
// beside it: if that were committed, every request would write it again.
func TestHandlerThatEndsTheTransaction(t *testing.T) {
	ending := func(answer http.HandlerFunc) func(e *receivertest.Env) http.HandlerFunc {
		return func(e *receivertest.Env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				for _, statement := range r.Header["Test-Statement"] {
					mustNot(e, e.Exec(r.Context(), unseen+statement))
				}
				answer(w, r)
			}
		}
	}
	const effect = "INSERT INTO effect VALUES ('k')"
	cases := []struct {
		statements      []string
		effects, events int
	}{
		{[]string{effect, "ROLLBACK"}, 0, 0},
		{[]string{effect, "ROLLBACK AND CHAIN"}, 0, 0},
		{[]string{"ROLLBACK AND CHAIN", effect}, 0, 0},
		{[]string{"COMMIT AND CHAIN", effect}, 0, 1},
		{[]string{effect, "COMMIT"}, 1, 1},
		{[]string{effect, "COMMIT AND CHAIN"}, 1, 1},
	}
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		for name, answer := range answers {
			e := newAnswering(t, f, pgtest.New(t, migrations.Inbox), answer, ending)
			for _, c := range cases {
				receivertest.WantProblem(t, e.Do(e.NewRequest("k", "{}", running(c.statements...))), 500, "handler-ended-transaction")
				e.WantResult(consumer.ResultCommitFailed)
				e.WantRows("k", c.effects, c.events)
				if c.events > 0 {
					wantNoted(e)
				}
				if e.MustExec("TRUNCATE effect, processed_events"); t.Failed() {
					t.Fatalf("%s: %q", name, c.statements)
				}
			}
		}
	})
}

// wantNoted asserts that the row of k says that its handler has committed by itself, and the answer
// to a duplicate and the log, too.
func wantNoted(e *receivertest.Env) {
	e.T.Helper()
	if n := e.Count(`SELECT count(*) FROM processed_events WHERE processing_state = 'failed' AND last_error = 'the handler committed or rolled back the transaction itself'`); n != 1 {
		e.T.Error("the row does not say what the handler did")
	}
	receivertest.WantReplayed(e.T, e.Post("k", "{}"), 422, "")
	e.WantResult(consumer.ResultDuplicate)
	if !strings.Contains(e.Logged.String(), `level=ERROR msg="consumer: request commit_failed" result=commit_failed`) {
		e.T.Errorf("not logged: %s", e.Logged)
	}
}

// A handler that commits by itself and fails, or panics, would have its event count as succeeded
// when the event is sent again.
func TestHandlerThatCommitsAndFails(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		for name, answer := range map[string]http.HandlerFunc{
			"503":    func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) },
			"nobody": func(http.ResponseWriter, *http.Request) { runtime.Goexit() },
			"panic":  func(http.ResponseWriter, *http.Request) { panic("mistake") },
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				e := newAnswering(t, f, pgtest.New(t, migrations.Inbox), answer, func(answer http.HandlerFunc) func(e *receivertest.Env) http.HandlerFunc {
					return func(e *receivertest.Env) http.HandlerFunc {
						return func(w http.ResponseWriter, r *http.Request) {
							mustNot(e, e.Exec(r.Context(), "INSERT INTO effect VALUES ('k')"))
							for _, statement := range r.Header["Test-Statement"] {
								mustNot(e, e.Exec(r.Context(), unseen+statement))
							}
							answer(w, r)
						}
					}
				})
				for _, end := range []string{"COMMIT", "COMMIT AND CHAIN"} {
					_, _ = e.Try(e.NewRequest("k", "{}", running(end))) // may be cut off
					e.WantResult(consumer.ResultCommitFailed)
					e.WantRows("k", 1, 1)
					wantNoted(e)
					e.MustExec("TRUNCATE effect, processed_events")
				}
				_, _ = e.Try(e.NewRequest("k", "{}"))
				e.WantResult(consumer.ResultFailed)
				e.WantRows("k", 0, 0)
			})
		}
	})
}

func TestClientGoneAfterTheWorkIsDone(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		working, gone := make(chan struct{}), make(chan struct{})
		e := receivertest.NewEnv(t, f, consumer.Config{}, func(e *receivertest.Env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Test-Hang-Up") == "" {
					return
				}
				receivertest.Effect(e)(w, r)
				close(working)
				<-r.Context().Done() // the server has noticed
				close(gone)
			}
		})
		ctx, hangUp := context.WithCancel(t.Context())
		request := e.NewRequest("k", "{}", receivertest.With("Test-Hang-Up", "yes")).WithContext(ctx)
		sent := make(chan error, 1)
		go func() {
			_, err := e.Try(request)
			sent <- err
		}()
		<-working
		hangUp()
		if err := <-sent; !errors.Is(err, context.Canceled) {
			t.Fatalf("the client got %v", err)
		}
		<-gone
		e.WantResult(consumer.ResultProcessed)
		e.WantRows("k", 1, 1)
		receivertest.WantReplayed(t, e.Post("k", "{}"), 201, "")
	})
}

// A COMMIT that hangs must not hold the request for ever; its outcome is then unknown, and the row
// decides.
func TestCommitTimeout(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{Limits: consumer.Limits{CommitTimeout: 5 * time.Second}}, receivertest.Effect)
		e.MustExec(`
			CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NULL; END';
			CREATE CONSTRAINT TRIGGER waits AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait()`)
		release := e.Hold(func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), "SELECT pg_advisory_xact_lock(42)")
			return err
		})
		receivertest.WantProblem(t, e.Post("k", "{}"), 500, "commit-failed")
		release()
		e.Await("SELECT NOT EXISTS (" + receivertest.AdvisoryLocks + ")") // the abandoned backend has ended
		if got := e.Post("k", "{}"); got.Status != 201 {
			t.Errorf("the retry got %d %s", got.Status, got.Body)
		}
		e.WantRows("k", 1, 1)
	})
}

// Nor must a ROLLBACK: a handler that has failed is answered for, whatever has become of the
// database since.
func TestRollbackTimeout(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{Limits: consumer.Limits{CommitTimeout: 100 * time.Millisecond}}, func(e *receivertest.Env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				pid := e.Count("SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'")
				mustNot(e, syscall.Kill(pid, syscall.SIGSTOP))
				t.Cleanup(func() { mustNot(e, syscall.Kill(pid, syscall.SIGCONT)) })
				w.WriteHeader(http.StatusTeapot)
			}
		})
		if got := e.Post("k", "{}"); got.Status != http.StatusTeapot {
			t.Errorf("answered %d %s", got.Status, got.Body)
		}
		e.WantResult(consumer.ResultFailed)
	})
}

// The sender forgets what it was answered 2xx for. So the commit waits for the disk where the
// database is told not to wait, and as long as it is told where it says more.
func TestAnswerWaitsForTheDisk(t *testing.T) {
	t.Parallel()
	for set, want := range map[string]string{"off": "on", "on": "on", "local": "local", "remote_apply": "remote_apply"} {
		for _, f := range receivertest.Flavours() {
			t.Run(f.Name+"/"+set, func(t *testing.T) {
				testsize.OneIn(t, 2)
				t.Parallel()
				dsn := receivertest.WithSetting(pgtest.New(t, migrations.Inbox), "synchronous_commit", set)
				e := receivertest.NewEnvAt(t, f, dsn, consumer.Config{}, receivertest.Effect)
				e.MustExec(receivertest.Schema)
				e.SampleCommits("processed_events")
				receivertest.WantFirst(t, e.Post("k", "{}"), 201, `{"done":"k"}`)
				e.WantCommit(want)
			})
		}
	}
}
