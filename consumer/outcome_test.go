package consumer_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/breaker"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/consumer/sqlconsumer"
	"github.com/outbox-relay/outbox-relay/consumer/store"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

func TestHandlersErrors(t *testing.T) {
	errStock := errors.New("no stock: postgres://stock:hunter2@db/x password=hunter2")
	conflicting := func(ctx context.Context, e *env) error {
		return e.exec(ctx, "DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = 'serialization_failure'; END $$")
	}
	unknown := func(ctx context.Context) error {
		return consumer.NewRouter().Dispatch(ctx, nil, consumer.EventFrom(ctx))
	}
	cases := map[string]struct {
		end     func(ctx context.Context, e *env) error
		status  int
		problem string
		retry   string // Retry-After
		result  consumer.Result
		final   bool
		effects int
		err     error
		log     string
	}{
		"nil": {
			end:    func(context.Context, *env) error { return nil },
			status: 204, result: consumer.ResultProcessed, effects: 1, log: "DEBUG",
		},
		"an error": {
			end:    func(context.Context, *env) error { return errStock },
			status: 500, problem: "handler-failed", result: consumer.ResultFailed, err: errStock, log: "WARN",
		},
		"an error without a text": {
			end:    func(context.Context, *env) error { return errors.New("") },
			status: 500, problem: "handler-failed", result: consumer.ResultFailed, log: "WARN",
		},
		"permanent": {
			end:    func(context.Context, *env) error { return consumer.Permanent(errStock) },
			status: 422, problem: "permanent-failure", result: consumer.ResultFailed, final: true, err: errStock, log: "ERROR",
		},
		"later": {
			end: func(context.Context, *env) error {
				return fmt.Errorf("reserve: %w", consumer.RetryAfter(errStock, 90*time.Second+time.Millisecond))
			},
			status: 503, problem: "retry-later", retry: "91", result: consumer.ResultFailed, err: errStock, log: "WARN",
		},
		"soon": {
			end:    func(context.Context, *env) error { return consumer.RetryAfter(errStock, 0) },
			status: 503, problem: "retry-later", retry: "1", result: consumer.ResultFailed, err: errStock, log: "WARN",
		},
		"a dependency is down": {
			end:    func(context.Context, *env) error { return consumer.DependencyDown(errStock) },
			status: 503, problem: "retry-later", retry: "1", result: consumer.ResultFailed, err: errStock, log: "WARN",
		},
		"unknown": {
			end:    func(ctx context.Context, _ *env) error { return unknown(ctx) },
			status: 422, problem: "event-unknown", result: consumer.ResultFailed, final: true, err: consumer.ErrUnknownEvent, log: "ERROR",
		},
		"unknown, to be tried again": {
			end:    func(ctx context.Context, _ *env) error { return consumer.RetryAfter(unknown(ctx), time.Hour) },
			status: 503, problem: "retry-later", retry: "3600", result: consumer.ResultFailed, err: consumer.ErrUnknownEvent, log: "WARN",
		},
		"a conflict": {
			end:    conflicting,
			status: 503, problem: "serialization-failure", retry: "1", result: consumer.ResultFailed, log: "WARN",
		},
		"a conflict called permanent": {
			end:    func(ctx context.Context, e *env) error { return consumer.Permanent(conflicting(ctx, e)) },
			status: 422, problem: "permanent-failure", result: consumer.ResultFailed, final: true, log: "ERROR",
		},
		"ignored": {
			end:    func(context.Context, *env) error { return consumer.Ignore("a test invoice, token=hunter2") },
			status: 204, result: consumer.ResultIgnored, effects: 1, log: "INFO",
		},
		"ignored without a reason": {
			end:    func(context.Context, *env) error { return consumer.Ignore("") },
			status: 204, result: consumer.ResultIgnored, effects: 1, log: "INFO",
		},
	}
	eachFlavour(t, func(t *testing.T, f flavour) {
		for name, c := range cases {
			t.Run(name, func(t *testing.T) {
				testsize.OneIn(t, 2)
				t.Parallel()
				e := newHandlerEnv(t, f, consumer.Config{}, func(e *env) handlerFunc {
					return func(ctx context.Context, event consumer.Event) error {
						if err := e.exec(ctx, "INSERT INTO effect VALUES ($1)", event.Key); err != nil {
							return err
						}
						return c.end(ctx, e)
					}
				})
				got := e.post("k", "{}")
				if c.problem != "" && c.retry == "" {
					wantProblem(t, got, c.status, c.problem)
				}
				if got.status != c.status || !strings.Contains(got.body, c.problem) || got.header.Get("Retry-After") != c.retry {
					t.Errorf("got %d %v %s", got.status, got.header, got.body)
				}
				report := e.wantResult(c.result)
				if report.Final != c.final || report.Status != c.status || c.err != nil && !errors.Is(report.Err, c.err) {
					t.Errorf("report %+v", report)
				}
				e.wantRows("k", c.effects, c.effects)
				if log := e.logged.String(); !strings.Contains(log, "level="+c.log) || strings.Contains(log+got.body, "hunter2") {
					t.Errorf("answered %s\nlogged %s", got.body, log)
				}
				if c.effects > 0 {
					wantReplayed(t, e.post("k", "{}"), 204, "")
					e.wantResult(consumer.ResultDuplicate)
				}
				if c.result == consumer.ResultIgnored {
					if n := e.count(`SELECT count(*) FROM processed_events WHERE processing_state = 'ignored' AND response_status = 204
						AND last_error IN ('a test invoice, token=***', 'The handler gave no reason.')`); n != 1 {
						t.Error("the event is not remembered as ignored, with its reason")
					}
				}
			})
		}
	})
}

// An error that panics when it is looked at is a panic of the handler.
func TestHandlersErrorsThatPanic(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		for name, bad := range errorsThatPanic() {
			t.Run(name, func(t *testing.T) {
				testsize.OneIn(t, 3)
				t.Parallel()
				e := newHandlerEnv(t, f, consumer.Config{Breaker: breaker.MustNew(breaker.Config{})}, func(e *env) handlerFunc {
					return func(ctx context.Context, event consumer.Event) error {
						mustNot(e, e.exec(ctx, "INSERT INTO effect VALUES ($1)", event.Key))
						return bad
					}
				})
				wantProblem(t, e.post("k", "{}"), 500, "handler-panicked")
				if report := e.wantResult(consumer.ResultFailed); report.Final || report.Err == nil {
					t.Errorf("report %+v", report)
				}
				e.wantRows("k", 0, 0)
			})
		}
	})
}

// A handler writes through its parameter, and finds the same in its context. Payloads reach it, and no observer.
func TestHandlerGetsTransactionAndPayload(t *testing.T) {
	eachFlavourAlways(t, func(t *testing.T, f flavour) {
		const body = "{ \"a\" : 1e3 }\n\x00\xff"
		dsn := pgtest.New(t, migrations.Inbox)
		got := make(chan consumer.Event, 1)
		check := func(ctx context.Context, same bool, event consumer.Event) {
			if !same || !reflect.DeepEqual(event, consumer.EventFrom(ctx)) {
				t.Errorf("the context has another transaction, or the event %+v", consumer.EventFrom(ctx))
			}
			got <- event
		}
		e := startEnv(t, f, dsn, consumer.Config{}, func(_ *env, cfg consumer.Config) http.Handler {
			if f.name == "pgx" {
				return consumer.Must(consumer.New(pgtest.Pool(t, dsn), cfg, func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
					check(ctx, tx == consumer.Tx(ctx), event)
					_, err := tx.Exec(ctx, "INSERT INTO effect VALUES ($1)", event.Key)
					return err
				}))
			}
			return consumer.Must(sqlconsumer.New(openSQL(t, dsn), cfg, func(ctx context.Context, tx *sql.Tx, event consumer.Event) error {
				check(ctx, tx == sqlconsumer.Tx(ctx), event)
				_, err := tx.ExecContext(ctx, "INSERT INTO effect VALUES ($1)", event.Key)
				return err
			}))
		})
		e.mustExec(schema)
		wantFirst(t, e.post("k", body), 204, "")
		e.wantRows("k", 1, 1)
		event, report := <-got, e.wantResult(consumer.ResultProcessed)
		if event.Key != "k" || string(event.Payload) != body || report.Event.Key != "k" || report.Event.Payload != nil {
			t.Errorf("the handler got %+v, the report has %+v", event, report.Event)
		}
	})
}

// A handler of a framework may return an error that is answered only when the middleware has returned: what it wrote until then
// must not be committed.
func TestHandlerThatAnswersNothing(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		dsn := pgtest.New(t, migrations.Inbox)
		e := startEnv(t, f, dsn, consumer.Config{}, func(e *env, cfg consumer.Config) http.Handler {
			return f.wrap(t, dsn, cfg)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				effect(e)(discardWriter{}, r)
				w.Header().Set("X-Set", "no answer yet")
				if r.Header.Get("Test-Hints") != "" {
					w.WriteHeader(http.StatusEarlyHints)
				}
				if r.Header.Get("Test-Answer") != "" {
					w.WriteHeader(http.StatusNoContent)
				}
			}))
		})
		e.mustExec(schema)
		for _, hints := range []string{"", "sent"} {
			got := e.do(e.newRequest("k", "{}", with("Test-Hints", hints)))
			wantProblem(t, got, 500, "no-answer")
			if report := e.wantResult(consumer.ResultFailed); report.Err == nil || report.Final || report.Status != 500 || got.header.Get("X-Set") != "" {
				t.Errorf("report %+v, header %v", report, got.header)
			}
			e.wantRows("k", 0, 0)
		}
		if log := e.logged.String(); !strings.Contains(log, "level=WARN") || !strings.Contains(log, "without writing a status") {
			t.Errorf("logged %s", log)
		}
		wantFirst(t, e.do(e.newRequest("k", "{}", with("Test-Answer", "204"))), 204, "")
		e.wantRows("k", 1, 1)
	})
}

// The Must variants panic with the errors' texts; TestConfigMistakes has those of the Config.
func TestMistakesOfConstructors(t *testing.T) {
	t.Parallel()
	good := consumer.Config{Receiver: "test", Secrets: []string{secretText}}
	pool := pgtest.Pool(t, "postgres://stranger@127.0.0.1:1/none")
	db := openSQL(t, "postgres://stranger@127.0.0.1:1/none")
	handle := func(context.Context, pgx.Tx, consumer.Event) error { return nil }
	handleSQL := func(context.Context, *sql.Tx, consumer.Event) error { return nil }
	for want, call := range map[string]func() (any, error){
		"consumer: New needs a pool":        func() (any, error) { return consumer.New(nil, good, handle) },
		"consumer: New needs a handler":     func() (any, error) { return consumer.New(pool, good, nil) },
		"sqlconsumer: New needs a database": func() (any, error) { return sqlconsumer.New(nil, good, handleSQL) },
		"sqlconsumer: New needs a handler":  func() (any, error) { return sqlconsumer.New(db, good, nil) },
		"consumer: Config.Receiver is empty": func() (any, error) {
			return consumer.New(pool, consumer.Config{Secrets: []string{secretText}}, handle)
		},
		"consumer: Middleware needs a pool":        func() (any, error) { return consumer.Middleware((*pgxpool.Pool)(nil), good) },
		"sqlconsumer: Middleware needs a database": func() (any, error) { return sqlconsumer.Middleware(nil, good) },
		"store: Middleware needs a store":          func() (any, error) { return store.Middleware(nil, store.Config{Config: good}) },
		"inbox: New needs a pool":                  func() (any, error) { return inbox.New(nil, inbox.Config{Config: good, Handle: handle}) },
	} {
		_, err := call()
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: failed with %v", want, err)
		}
		func() {
			defer func() {
				if text, _ := recover().(string); !strings.HasPrefix(text, want) {
					t.Errorf("%s: panicked with %q", want, text)
				}
			}()
			consumer.Must(call())
		}()
	}
}

func TestReasonsAreRedactedByTheApplicationToo(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		cfg := consumer.Config{Redact: func(text string) string { return strings.ReplaceAll(text, "Ada Lovelace", "a customer") }}
		e := newHandlerEnv(t, f, cfg, func(*env) handlerFunc {
			return func(_ context.Context, event consumer.Event) error {
				if event.Key == "ignored" {
					return consumer.Ignore("Ada Lovelace is a test")
				}
				return errors.New("no address of Ada Lovelace")
			}
		})
		got := e.post("k", "{}")
		e.post("ignored", "{}")
		if all := got.body + e.logged.String(); !strings.Contains(got.body, "no address of a customer") || strings.Contains(all, "Ada") {
			t.Errorf("answered and logged %s", all)
		}
		if e.count("SELECT count(*) FROM processed_events WHERE last_error = 'a customer is a test'") != 1 {
			t.Error("the reason is not there, or not redacted")
		}
	})
}
