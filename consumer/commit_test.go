package consumer_test

import (
	"context"
	"database/sql"
	"errors"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/breaker"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/consumer/sqlconsumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// discardWriter takes the answer of a handler that is called for its effect.
type discardWriter struct{}

func (discardWriter) Header() http.Header         { return http.Header{} }
func (discardWriter) WriteHeader(int)             {}
func (discardWriter) Write(p []byte) (int, error) { return len(p), nil }

// unseen is put before what Tx would refuse if it stood first: so it is sent, by both drivers, and must show at the end.
const unseen = "/* */ "

func TestCommitFailuresOfNormalLife(t *testing.T) {
	cases := map[string]struct {
		cfg     consumer.Config
		spoil   func(e *env, r *http.Request) // what dooms the transaction before the handler answers 200
		status  int
		problem string
		log     string
	}{
		"deferred constraint": {
			spoil: func(e *env, r *http.Request) {
				mustNot(e, e.exec(r.Context(), "INSERT INTO child VALUES (1)"))
			},
			status: 500, problem: "commit-failed", log: "23503",
		},
		"serialization failure": {
			cfg:    consumer.Config{Isolation: sql.LevelSerializable},
			spoil:  skewWrites,
			status: 503, problem: "serialization-failure", log: "40001",
		},
		"swallowed error": {
			spoil: func(e *env, r *http.Request) {
				if e.exec(r.Context(), "SELECT 1/0") == nil {
					e.t.Error("division by zero went well")
				}
			},
			status: 500, problem: "commit-failed", log: "a statement of the handler failed",
		},
		"killed backend": {
			spoil: func(e *env, r *http.Request) {
				mustNot(e, e.exec(r.Context(), "SET LOCAL application_name = 'doomed'"))
				e.mustExec("SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE application_name = 'doomed' AND datname = current_database()")
			},
			status: 500, problem: "commit-failed", log: "commit",
		},
		"rolls back with SQL": {
			spoil:  func(e *env, r *http.Request) { mustNot(e, e.exec(r.Context(), unseen+"ROLLBACK")) },
			status: 500, problem: "handler-ended-transaction", log: "itself",
		},
		"rolls back and begins again": {
			spoil:  func(e *env, r *http.Request) { mustNot(e, e.exec(r.Context(), unseen+"ROLLBACK AND CHAIN")) },
			status: 500, problem: "handler-ended-transaction", log: "itself",
		},
	}
	eachFlavour(t, func(t *testing.T, f flavour) {
		for name, c := range cases {
			t.Run(name, func(t *testing.T) {
				testsize.OneIn(t, 2)
				t.Parallel()
				e := newEnv(t, f, c.cfg, func(e *env) http.HandlerFunc {
					return func(w http.ResponseWriter, r *http.Request) {
						effect(e)(w, r)
						if r.Header.Get("Test-Spoil") != "" {
							c.spoil(e, r)
						}
					}
				})
				wantProblem(t, e.do(e.newRequest("k", "{}", with("Test-Spoil", "yes"))), c.status, c.problem)
				if report := e.wantResult(consumer.ResultCommitFailed); report.Err == nil || report.Status != c.status {
					t.Errorf("report %+v", report)
				}
				if log := e.logged.String(); !strings.Contains(log, "level=ERROR") || !strings.Contains(log, c.log) {
					t.Errorf("logged %s", log)
				}
				e.wantRows("k", 0, 0)

				wantFirst(t, e.post("k", "{}"), 201, `{"done":"k"}`)
				e.wantRows("k", 1, 1)
			})
		}
	})
}

func mustNot(e *env, err error) {
	if err != nil {
		e.t.Error(err)
	}
}

// skewWrites commits a transaction that, with the handler's, has no serial order: each reads what the other writes.
func skewWrites(e *env, r *http.Request) {
	ctx := context.WithoutCancel(r.Context())
	mustNot(e, e.exec(ctx, "INSERT INTO parent SELECT 100 + count(*) FROM parent"))
	mustNot(e, pgx.BeginTxFunc(ctx, e.pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "INSERT INTO parent SELECT 200 + count(*) FROM parent")
		return err
	}))
}

// A pgx.Tx is lent under guard; a *sql.Tx cannot be, so what the handler ends is found out.
func TestHandlerCannotEndTheTransaction(t *testing.T) {
	t.Run("pgx commit is refused and does no harm", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, flavours[0], consumer.Config{}, func(e *env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				effect(e)(w, r)
				if err := consumer.Tx(r.Context()).Commit(r.Context()); !errors.Is(err, consumer.ErrMiddlewareCommits) {
					t.Errorf("commit: %v", err)
				}
			}
		})
		wantFirst(t, e.post("k", "{}"), 201, `{"done":"k"}`)
		e.wantRows("k", 1, 1)
	})
	t.Run("pgx rollback is remembered", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, flavours[0], consumer.Config{}, func(e *env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				effect(e)(w, r)
				if err := consumer.Tx(r.Context()).Rollback(r.Context()); !errors.Is(err, consumer.ErrMiddlewareCommits) {
					t.Errorf("rollback: %v", err)
				}
			}
		})
		wantProblem(t, e.post("k", "{}"), 500, "handler-ended-transaction")
		e.wantRows("k", 0, 0)
	})
	for _, f := range flavours {
		for _, statement := range []string{"COMMIT", "COMMIT AND CHAIN"} {
			t.Run(f.name+" "+statement+" takes effect once", func(t *testing.T) {
				t.Parallel()
				e := newEnv(t, f, consumer.Config{}, func(e *env) http.HandlerFunc {
					return func(w http.ResponseWriter, r *http.Request) {
						effect(e)(w, r)
						mustNot(e, e.exec(r.Context(), unseen+statement))
					}
				})
				wantProblem(t, e.post("k", "{}"), 500, "handler-ended-transaction")
				wantReplayed(t, e.post("k", "{}"), 204, "") // done, but never answered
				e.wantRows("k", 1, 1)
			})
		}
	}
	t.Run("sql rollback", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, flavours[1], consumer.Config{}, func(e *env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				effect(e)(w, r)
				mustNot(e, sqlconsumer.Tx(r.Context()).Rollback())
			}
		})
		wantProblem(t, e.post("k", "{}"), 500, "handler-ended-transaction")
		e.wantRows("k", 0, 0)
	})
	t.Run("sql commit takes effect once", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, flavours[1], consumer.Config{}, func(e *env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				effect(e)(w, r)
				mustNot(e, sqlconsumer.Tx(r.Context()).Commit())
			}
		})
		wantProblem(t, e.post("k", "{}"), 500, "handler-ended-transaction")
		wantReplayed(t, e.post("k", "{}"), 204, "") // done, but never answered
		e.wantRows("k", 1, 1)
	})
}

// The answer that is stored at admission needs no statement that meets its row: what the handler ended shows all the same.
func TestHandlerThatEndsTheTransactionAndAnswers204(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, func(e *env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				effect(e)(discardWriter{}, r)
				mustNot(e, e.exec(r.Context(), unseen+r.Header.Get("Test-Statement")))
				w.WriteHeader(http.StatusNoContent)
			}
		})
		for statement, rows := range map[string]int{"COMMIT": 1, "COMMIT AND CHAIN": 1, "ROLLBACK": 0, "ROLLBACK AND CHAIN": 0} {
			got := e.do(e.newRequest(statement, "{}", with("Test-Statement", statement)))
			wantProblem(t, got, 500, "handler-ended-transaction")
			e.wantResult(consumer.ResultCommitFailed)
			e.wantRows(statement, rows, rows)
		}
	})
}

// What a handler writes into a transaction that it put in the place of the middleware's has no row of the event beside it:
// if it were committed, every request would write it again.
func TestWritesAfterTheTransactionWasExchanged(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		exchanging := func(answer http.HandlerFunc) func(e *env) http.HandlerFunc {
			return func(e *env) http.HandlerFunc {
				return func(w http.ResponseWriter, r *http.Request) {
					mustNot(e, e.exec(r.Context(), unseen+r.Header.Get("Test-Statement")))
					effect(e)(discardWriter{}, r)
					answer(w, r)
				}
			}
		}
		for name, answer := range answers {
			e := newAnswering(t, f, pgtest.New(t, migrations.Inbox), answer, exchanging)
			for statement, rows := range map[string]int{"ROLLBACK AND CHAIN": 0, "COMMIT AND CHAIN": 1} {
				key := statement + name
				wantProblem(t, e.do(e.newRequest(key, "{}", with("Test-Statement", statement))), 500, "handler-ended-transaction")
				e.wantResult(consumer.ResultCommitFailed)
				e.wantRows(key, 0, rows)
			}
		}
	})
}

func TestClientGoneAfterTheWorkIsDone(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		working, gone := make(chan struct{}), make(chan struct{})
		e := newEnv(t, f, consumer.Config{}, func(e *env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Test-Hang-Up") == "" {
					return
				}
				effect(e)(w, r)
				close(working)
				<-r.Context().Done() // the server has noticed
				close(gone)
			}
		})
		ctx, hangUp := context.WithCancel(t.Context())
		request := e.newRequest("k", "{}", with("Test-Hang-Up", "yes")).WithContext(ctx)
		sent := make(chan error, 1)
		go func() {
			_, err := e.try(request)
			sent <- err
		}()
		<-working
		hangUp()
		if err := <-sent; !errors.Is(err, context.Canceled) {
			t.Fatalf("the client got %v", err)
		}
		<-gone
		e.wantResult(consumer.ResultProcessed)
		e.wantRows("k", 1, 1)
		wantReplayed(t, e.post("k", "{}"), 201, "")
	})
}

// A COMMIT that hangs must not hold the request for ever; its outcome is then unknown, and the row decides.
func TestCommitTimeout(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{CommitTimeout: 2 * time.Second}, effect)
		e.mustExec(`
			CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NULL; END';
			CREATE CONSTRAINT TRIGGER waits AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait()`)
		release := e.hold(func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), "SELECT pg_advisory_xact_lock(42)")
			return err
		})
		wantProblem(t, e.post("k", "{}"), 500, "commit-failed")
		release()
		e.await("SELECT NOT EXISTS (" + advisoryLocks + ")") // the abandoned backend has ended
		if got := e.post("k", "{}"); got.status != 201 {
			t.Errorf("the retry got %d %s", got.status, got.body)
		}
		e.wantRows("k", 1, 1)
	})
}

// Nor must a ROLLBACK: a handler that has failed is answered for, whatever has become of the database since.
func TestRollbackTimeout(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{CommitTimeout: 100 * time.Millisecond}, func(e *env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				pid := e.count("SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'")
				mustNot(e, syscall.Kill(pid, syscall.SIGSTOP))
				t.Cleanup(func() { mustNot(e, syscall.Kill(pid, syscall.SIGCONT)) })
				w.WriteHeader(http.StatusTeapot)
			}
		})
		if got := e.post("k", "{}"); got.status != http.StatusTeapot {
			t.Errorf("answered %d %s", got.status, got.body)
		}
		e.wantResult(consumer.ResultFailed)
	})
}

// samplesCommit tells at COMMIT how the transaction of an event is going to be written to the disk.
const samplesCommit = `
CREATE TABLE sampled (synchronous_commit text);
CREATE FUNCTION sample() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
	INSERT INTO sampled SELECT current_setting('synchronous_commit'); RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER sample AFTER INSERT ON processed_events DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION sample()`

// The sender forgets what it was answered 2xx for. So the commit waits for the disk where the database is told not to wait,
// and as long as it is told where it says more.
func TestAnswerWaitsForTheDisk(t *testing.T) {
	t.Parallel()
	for set, want := range map[string]string{"off": "on", "on": "on", "local": "local", "remote_apply": "remote_apply"} {
		for _, f := range flavours {
			t.Run(f.name+"/"+set, func(t *testing.T) {
				testsize.OneIn(t, 2)
				t.Parallel()
				dsn := withSetting(pgtest.New(t, migrations.Inbox), "synchronous_commit", set)
				e := newEnvAt(t, f, dsn, consumer.Config{}, effect)
				e.mustExec(schema + samplesCommit)
				wantFirst(t, e.post("k", "{}"), 201, `{"done":"k"}`)
				if n := e.count("SELECT count(*) FROM sampled WHERE synchronous_commit = $1", want); n != 1 {
					t.Errorf("the commit was not %s", want)
				}
			})
		}
		t.Run("inbox/"+set, func(t *testing.T) {
			t.Parallel()
			p := newInbox(t, inbox.Config{})
			p.mustExec(samplesCommit)
			p.mustExec(`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = ` + set + `', current_database()); END $$`)
			p.again(inbox.Config{}).record("k")
			if n := p.count("SELECT count(*) FROM sampled WHERE synchronous_commit = $1", want); n != 1 {
				t.Errorf("the commit was not %s", want)
			}
		})
	}
}

// Rows that a handler forgot to close are its own mistake: no other request is kept away for it.
func TestRowsLeftOpenOpenNoBreaker(t *testing.T) {
	t.Parallel()
	b := breaker.MustNew(breaker.Config{Failures: 1})
	e := newEnv(t, flavours[0], consumer.Config{Breaker: b}, func(*env) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			rows, err := consumer.Tx(r.Context()).Query(r.Context(), "SELECT generate_series(1, 1000)")
			if err != nil || !rows.Next() {
				t.Errorf("no rows: %v", err)
			}
			w.WriteHeader(http.StatusNoContent)
		}
	})
	wantProblem(t, e.post("k", "{}"), 500, "commit-failed")
	if report := e.wantResult(consumer.ResultCommitFailed); report.Err == nil || !strings.Contains(report.Err.Error(), "left rows of a query open") {
		t.Errorf("reported %v", report.Err)
	}
	if state := b.State(); state != breaker.Closed {
		t.Errorf("the breaker is %s", state)
	}
	e.wantRows("k", 0, 0)
}
