package consumer_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/breaker"
	"github.com/outbox-relay/outbox-relay/consumer/sqlconsumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

func TestHandlersErrors(t *testing.T) {
	errStock := errors.New("no stock: postgres://stock:hunter2@db/x password=hunter2")
	conflicting := func(ctx context.Context, e *receivertest.Env) error {
		return e.Exec(ctx, "DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = 'serialization_failure'; END $$")
	}
	unknown := func(ctx context.Context) error {
		return consumer.NewRouter().Dispatch(ctx, nil, consumer.EventFrom(ctx))
	}
	cases := map[string]struct {
		end     func(ctx context.Context, e *receivertest.Env) error
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
			end:    func(context.Context, *receivertest.Env) error { return nil },
			status: 204, result: consumer.ResultProcessed, effects: 1, log: "DEBUG",
		},
		"an error": {
			end:    func(context.Context, *receivertest.Env) error { return errStock },
			status: 500, problem: "handler-failed", result: consumer.ResultFailed, err: errStock, log: "WARN",
		},
		"an error without a text": {
			end:    func(context.Context, *receivertest.Env) error { return errors.New("") },
			status: 500, problem: "handler-failed", result: consumer.ResultFailed, log: "WARN",
		},
		"permanent": {
			end:    func(context.Context, *receivertest.Env) error { return consumer.Permanent(errStock) },
			status: 422, problem: "permanent-failure", result: consumer.ResultFailed, final: true, err: errStock, log: "ERROR",
		},
		"later": {
			end: func(context.Context, *receivertest.Env) error {
				return fmt.Errorf("reserve: %w", consumer.RetryAfter(errStock, 90*time.Second+time.Millisecond))
			},
			status: 503, problem: "retry-later", retry: "91", result: consumer.ResultFailed, err: errStock, log: "WARN",
		},
		"soon": {
			end:    func(context.Context, *receivertest.Env) error { return consumer.RetryAfter(errStock, 0) },
			status: 503, problem: "retry-later", retry: "1", result: consumer.ResultFailed, err: errStock, log: "WARN",
		},
		"a dependency is down": {
			end:    func(context.Context, *receivertest.Env) error { return consumer.DependencyDown(errStock) },
			status: 503, problem: "retry-later", retry: "1", result: consumer.ResultFailed, err: errStock, log: "WARN",
		},
		"unknown": {
			end:    func(ctx context.Context, _ *receivertest.Env) error { return unknown(ctx) },
			status: 422, problem: "event-unknown", result: consumer.ResultFailed, final: true, err: consumer.ErrUnknownEvent, log: "ERROR",
		},
		"unknown, to be tried again": {
			end: func(ctx context.Context, _ *receivertest.Env) error {
				return consumer.RetryAfter(unknown(ctx), time.Hour)
			},
			status: 503, problem: "retry-later", retry: "3600", result: consumer.ResultFailed, err: consumer.ErrUnknownEvent, log: "WARN",
		},
		"a conflict": {
			end:    conflicting,
			status: 503, problem: "serialization-failure", retry: "1", result: consumer.ResultFailed, log: "WARN",
		},
		"a conflict called permanent": {
			end:    func(ctx context.Context, e *receivertest.Env) error { return consumer.Permanent(conflicting(ctx, e)) },
			status: 422, problem: "permanent-failure", result: consumer.ResultFailed, final: true, log: "ERROR",
		},
		"ignored": {
			end: func(context.Context, *receivertest.Env) error {
				return consumer.Ignore("a test invoice, token=hunter2")
			},
			status: 204, result: consumer.ResultIgnored, effects: 1, log: "INFO",
		},
		"ignored without a reason": {
			end:    func(context.Context, *receivertest.Env) error { return consumer.Ignore("") },
			status: 204, result: consumer.ResultIgnored, effects: 1, log: "INFO",
		},
	}
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		for name, c := range cases {
			t.Run(name, func(t *testing.T) {
				testsize.OneIn(t, 2)
				t.Parallel()
				e := receivertest.NewHandlerEnv(t, f, consumer.Config{}, func(e *receivertest.Env) receivertest.HandlerFunc {
					return func(ctx context.Context, event consumer.Event) error {
						if err := e.Exec(ctx, "INSERT INTO effect VALUES ($1)", event.IdempotencyKey); err != nil {
							return err
						}
						return c.end(ctx, e)
					}
				})
				got := e.Post("k", "{}")
				if c.problem != "" && c.retry == "" {
					receivertest.WantProblem(t, got, c.status, c.problem)
				}
				if got.Status != c.status || !strings.Contains(got.Body, c.problem) || got.Header.Get("Retry-After") != c.retry {
					t.Errorf("got %d %v %s", got.Status, got.Header, got.Body)
				}
				report := e.WantResult(c.result)
				if report.Final != c.final || report.Status != c.status || c.err != nil && !errors.Is(report.Err, c.err) {
					t.Errorf("report %+v", report)
				}
				e.WantRows("k", c.effects, c.effects)
				if log := e.Logged.String(); !strings.Contains(log, "level="+c.log) || strings.Contains(log+got.Body, "hunter2") {
					t.Errorf("answered %s\nlogged %s", got.Body, log)
				}
				if c.effects > 0 {
					receivertest.WantReplayed(t, e.Post("k", "{}"), 204, "")
					e.WantResult(consumer.ResultDuplicate)
				}
				if c.result == consumer.ResultIgnored {
					if n := e.Count(`SELECT count(*) FROM processed_events WHERE processing_state = 'ignored' AND response_status = 204
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
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		for name, bad := range receivertest.ErrorsThatPanic() {
			t.Run(name, func(t *testing.T) {
				testsize.OneIn(t, 3)
				t.Parallel()
				e := receivertest.NewHandlerEnv(t, f, consumer.Config{Breaker: receivertest.Must(breaker.New(breaker.Config{}))}, func(e *receivertest.Env) receivertest.HandlerFunc {
					return func(ctx context.Context, event consumer.Event) error {
						mustNot(e, e.Exec(ctx, "INSERT INTO effect VALUES ($1)", event.IdempotencyKey))
						return bad
					}
				})
				receivertest.WantProblem(t, e.Post("k", "{}"), 500, "handler-panicked")
				if report := e.WantResult(consumer.ResultFailed); report.Final || report.Err == nil {
					t.Errorf("report %+v", report)
				}
				e.WantRows("k", 0, 0)
			})
		}
	})
}

// A handler writes through its parameter, and finds the same in its context. Payloads reach it, and
// no observer.
func TestHandlerGetsTransactionAndPayload(t *testing.T) {
	receivertest.EachFlavourAlways(t, func(t *testing.T, f receivertest.Flavour) {
		const body = "{ \"a\" : 1e3 }\n\x00\xff"
		dsn := pgtest.New(t, migrations.Inbox)
		got := make(chan consumer.Event, 1)
		check := func(ctx context.Context, same bool, event consumer.Event) {
			if !same || !reflect.DeepEqual(event, consumer.EventFrom(ctx)) {
				t.Errorf("the context has another transaction, or the event %+v", consumer.EventFrom(ctx))
			}
			got <- event
		}
		e := receivertest.StartEnv(t, f, dsn, consumer.Config{}, func(_ *receivertest.Env, cfg consumer.Config) http.Handler {
			if f.Name == "pgx" {
				return receivertest.Must(consumer.New(pgtest.Pool(t, dsn), cfg, func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
					check(ctx, tx == consumer.Tx(ctx), event)
					_, err := tx.Exec(ctx, "INSERT INTO effect VALUES ($1)", event.IdempotencyKey)
					return err
				}))
			}
			return receivertest.Must(sqlconsumer.New(receivertest.OpenSQL(t, dsn), cfg, func(ctx context.Context, tx *sql.Tx, event consumer.Event) error {
				check(ctx, tx == sqlconsumer.Tx(ctx), event)
				_, err := tx.ExecContext(ctx, "INSERT INTO effect VALUES ($1)", event.IdempotencyKey)
				return err
			}))
		})
		e.MustExec(receivertest.Schema)
		receivertest.WantFirst(t, e.Post("k", body), 204, "")
		e.WantRows("k", 1, 1)
		event, report := <-got, e.WantResult(consumer.ResultProcessed)
		if event.IdempotencyKey != "k" || string(event.Payload) != body || report.Event.IdempotencyKey != "k" || report.Event.Payload != nil {
			t.Errorf("the handler got %+v, the report has %+v", event, report.Event)
		}
	})
}

// A handler of a framework may return an error that is answered only when the middleware has
// returned: what it wrote until then must not be committed.
func TestHandlerThatAnswersNothing(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		dsn := pgtest.New(t, migrations.Inbox)
		e := receivertest.StartEnv(t, f, dsn, consumer.Config{}, func(e *receivertest.Env, cfg consumer.Config) http.Handler {
			return f.Wrap(t, dsn, cfg)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				receivertest.Effect(e)(receivertest.DiscardWriter{}, r)
				w.Header().Set("X-Set", "no answer yet")
				if r.Header.Get("Test-Hints") != "" {
					w.WriteHeader(http.StatusEarlyHints)
				}
				if r.Header.Get("Test-Answer") != "" {
					w.WriteHeader(http.StatusNoContent)
				}
			}))
		})
		e.MustExec(receivertest.Schema)
		for _, hints := range []string{"", "sent"} {
			got := e.Do(e.NewRequest("k", "{}", receivertest.With("Test-Hints", hints)))
			receivertest.WantProblem(t, got, 500, "no-answer")
			if report := e.WantResult(consumer.ResultFailed); report.Err == nil || report.Final || report.Status != 500 || got.Header.Get("X-Set") != "" {
				t.Errorf("report %+v, header %v", report, got.Header)
			}
			e.WantRows("k", 0, 0)
		}
		testkit.Contains(t, "logged", e.Logged.String(), "level=WARN", "without writing a status")
		receivertest.WantFirst(t, e.Do(e.NewRequest("k", "{}", receivertest.With("Test-Answer", "204"))), 204, "")
		e.WantRows("k", 1, 1)
	})
}

func TestReasonsAreRedactedByTheApplicationToo(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		cfg := consumer.Config{Redact: func(text string) string { return strings.ReplaceAll(text, "Ada Lovelace", "a customer") }}
		e := receivertest.NewHandlerEnv(t, f, cfg, func(*receivertest.Env) receivertest.HandlerFunc {
			return func(_ context.Context, event consumer.Event) error {
				if event.IdempotencyKey == "ignored" {
					return consumer.Ignore("Ada Lovelace is a test")
				}
				return errors.New("no address of Ada Lovelace")
			}
		})
		got := e.Post("k", "{}")
		e.Post("ignored", "{}")
		if all := got.Body + e.Logged.String(); !strings.Contains(got.Body, "no address of a customer") || strings.Contains(all, "Ada") {
			t.Errorf("answered and logged %s", all)
		}
		testkit.Equal(t, "the reason is not there, or not redacted", e.Count("SELECT count(*) FROM processed_events WHERE last_error = 'a customer is a test'"), 1)
	})
}

// wantHeld asserts that an open breaker refused, and told to come back within the given seconds.
func wantHeld(t testing.TB, got receivertest.Response, least, most int) {
	t.Helper()
	if got.Status != http.StatusServiceUnavailable || !strings.Contains(got.Body, `"urn:outbox-relay:problem:dependency-unavailable"`) {
		t.Errorf("got %d %s, want 503 dependency-unavailable", got.Status, got.Body)
	}
	if after, err := strconv.Atoi(got.Header.Get("Retry-After")); err != nil || after < least || after > most {
		t.Errorf("Retry-After %q, want %d to %d", got.Header.Get("Retry-After"), least, most)
	}
}

// answering is a handler that takes effect and answers with the status of the day.
func answering(status *atomic.Int64) func(e *receivertest.Env) http.HandlerFunc {
	return func(e *receivertest.Env) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			receivertest.Effect(e)(receivertest.DiscardWriter{}, r)
			w.WriteHeader(int(status.Load()))
		}
	}
}

func TestOpenBreakerAnswersAtOnce(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		var status atomic.Int64
		status.Store(http.StatusBadGateway)
		b := receivertest.Must(breaker.New(breaker.Config{Failures: 3, OpenFor: time.Hour}))
		e := receivertest.NewEnv(t, f, consumer.Config{Breaker: b}, answering(&status))
		for i := range 3 {
			if got := e.Post(fmt.Sprint("k", i), "{}"); got.Status != http.StatusBadGateway {
				t.Errorf("request %d got %d", i, got.Status)
			}
			e.WantResult(consumer.ResultFailed)
		}
		if got := b.State(); got != breaker.Open {
			t.Fatalf("the breaker is %s", got)
		}
		status.Store(http.StatusNoContent) // if the handler ran, it would succeed
		wantHeld(t, e.Post("k", "{}"), 3599, 4501)
		if report := e.WantResult(consumer.ResultBreakerOpen); report.Event.IdempotencyKey != "k" || report.HandlerDuration != 0 {
			t.Errorf("report %+v", report)
		}
		e.WantRows("k", 0, 0)

		// A sender without a signature learns nothing of it.
		forged := e.NewRequest("k", "{}")
		forged.Header.Set(webhook.Signature, "v1,AAAA")
		receivertest.WantProblem(t, e.Do(forged), 401, "signature-invalid")

		// Another middleware that depends on the same thing holds too, without touching its
		// database: it has none.
		other := unreachable(t, f, consumer.Config{Breaker: b})
		wantHeld(t, other.Post("k", "{}"), 3599, 4501)
		other.WantResult(consumer.ResultBreakerOpen)
	})
}

func TestBreakerClosesAgain(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		var status atomic.Int64
		status.Store(http.StatusServiceUnavailable)
		b := receivertest.Must(breaker.New(breaker.Config{Failures: 2, OpenFor: 1, OpenMax: 1, Successes: 2})) // the wait is over at once
		e := receivertest.NewEnv(t, f, consumer.Config{Breaker: b}, answering(&status))
		want := func(key string, code int, state breaker.State) {
			t.Helper()
			if got := e.Post(key, "{}"); got.Status != code || b.State() != state {
				t.Errorf("%s got %d, the breaker is %s; want %d and %s", key, got.Status, b.State(), code, state)
			}
		}
		want("a", 503, breaker.Closed)
		want("a", 503, breaker.Open)
		want("a", 503, breaker.Open) // a probe
		status.Store(http.StatusInternalServerError)
		want("a", 500, breaker.HalfOpen) // proves nothing
		status.Store(http.StatusNoContent)
		want("a", 204, breaker.HalfOpen)
		want("a", 204, breaker.HalfOpen) // a duplicate proves nothing either
		want("b", 204, breaker.Closed)
		e.WantRows("a", 1, 1)
		e.WantRows("b", 1, 1)
	})
}
