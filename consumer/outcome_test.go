package consumer_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/breaker"
)

func TestErrorHandler(t *testing.T) {
	errStock := errors.New("no stock: postgres://stock:hunter2@db/x password=hunter2")
	conflicting := func(e *env, r *http.Request) error {
		return e.exec(r.Context(), "DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = 'serialization_failure'; END $$")
	}
	cases := map[string]struct {
		end     func(e *env, w http.ResponseWriter, r *http.Request) error
		status  int
		problem string
		retry   string // Retry-After
		result  consumer.Result
		final   bool
		effects int
		err     error
		log     string
	}{
		"nothing written": {
			end:    func(*env, http.ResponseWriter, *http.Request) error { return nil },
			status: 204, result: consumer.ResultProcessed, effects: 1, log: "DEBUG",
		},
		"a refusal written": {
			end: func(_ *env, w http.ResponseWriter, _ *http.Request) error {
				w.WriteHeader(http.StatusTeapot)
				return nil
			},
			status: 418, result: consumer.ResultFailed, log: "DEBUG",
		},
		"an error": {
			end:    func(*env, http.ResponseWriter, *http.Request) error { return errStock },
			status: 500, problem: "handler-failed", result: consumer.ResultFailed, err: errStock, log: "WARN",
		},
		"an error after 200": {
			end: func(_ *env, w http.ResponseWriter, _ *http.Request) error {
				w.Header().Set("X-Written", "1")
				io.WriteString(w, "done")
				return errStock
			},
			status: 500, problem: "handler-failed", result: consumer.ResultFailed, err: errStock, log: "WARN",
		},
		"an error without a text": {
			end:    func(*env, http.ResponseWriter, *http.Request) error { return errors.New("") },
			status: 500, problem: "handler-failed", result: consumer.ResultFailed, log: "WARN",
		},
		"permanent": {
			end:    func(*env, http.ResponseWriter, *http.Request) error { return consumer.Permanent(errStock) },
			status: 422, problem: "permanent-failure", result: consumer.ResultFailed, final: true, err: errStock, log: "ERROR",
		},
		"later": {
			end: func(*env, http.ResponseWriter, *http.Request) error {
				return fmt.Errorf("reserve: %w", consumer.RetryAfter(errStock, 90*time.Second+time.Millisecond))
			},
			status: 503, problem: "retry-later", retry: "91", result: consumer.ResultFailed, err: errStock, log: "WARN",
		},
		"soon": {
			end:    func(*env, http.ResponseWriter, *http.Request) error { return consumer.RetryAfter(errStock, 0) },
			status: 503, problem: "retry-later", retry: "1", result: consumer.ResultFailed, err: errStock, log: "WARN",
		},
		"unknown": {
			end: func(_ *env, _ http.ResponseWriter, r *http.Request) error {
				return consumer.NewRouter().Dispatch(r.Context(), consumer.EventFrom(r.Context()), nil)
			},
			status: 422, problem: "event-unknown", result: consumer.ResultFailed, final: true, err: consumer.ErrUnknownEvent, log: "ERROR",
		},
		"unknown, to be tried again": {
			end: func(_ *env, _ http.ResponseWriter, r *http.Request) error {
				err := consumer.NewRouter().Dispatch(r.Context(), consumer.EventFrom(r.Context()), nil)
				return consumer.RetryAfter(err, time.Hour)
			},
			status: 503, problem: "retry-later", retry: "3600", result: consumer.ResultFailed, err: consumer.ErrUnknownEvent, log: "WARN",
		},
		"a conflict": {
			end:    func(e *env, _ http.ResponseWriter, r *http.Request) error { return conflicting(e, r) },
			status: 503, problem: "serialization-failure", retry: "1", result: consumer.ResultFailed, log: "WARN",
		},
		"a conflict called permanent": {
			end: func(e *env, _ http.ResponseWriter, r *http.Request) error {
				return consumer.Permanent(conflicting(e, r))
			},
			status: 422, problem: "permanent-failure", result: consumer.ResultFailed, final: true, log: "ERROR",
		},
		"ignored": {
			end: func(_ *env, w http.ResponseWriter, _ *http.Request) error {
				io.WriteString(w, "not sent")
				return consumer.Ignore("a test invoice, token=hunter2")
			},
			status: 204, result: consumer.ResultIgnored, effects: 1, log: "INFO",
		},
		"ignored without a reason": {
			end:    func(*env, http.ResponseWriter, *http.Request) error { return consumer.Ignore("") },
			status: 204, result: consumer.ResultIgnored, effects: 1, log: "INFO",
		},
	}
	eachFlavour(t, func(t *testing.T, f flavour) {
		for name, c := range cases {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				e := newEnv(t, f, consumer.Config{}, func(e *env) http.HandlerFunc {
					return consumer.ErrorHandler(func(w http.ResponseWriter, r *http.Request) error {
						if err := e.exec(r.Context(), "INSERT INTO effect VALUES ($1)", consumer.EventFrom(r.Context()).Key); err != nil {
							return err
						}
						return c.end(e, w, r)
					}).ServeHTTP
				})
				got := e.post("k", "{}")
				if c.problem != "" && c.retry == "" {
					wantProblem(t, got, c.status, c.problem)
				}
				if got.status != c.status || !strings.Contains(got.body, c.problem) || got.header.Get("Retry-After") != c.retry || got.header.Get("X-Written") != "" {
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
func TestErrorHandlerOfErrorsThatPanic(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		for name, bad := range errorsThatPanic() {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				e := newEnv(t, f, consumer.Config{Breaker: breaker.New(breaker.Config{})}, func(e *env) http.HandlerFunc {
					return consumer.ErrorHandler(func(w http.ResponseWriter, r *http.Request) error {
						effect(e)(w, r)
						return bad
					}).ServeHTTP
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

func TestErrorHandlerPassesWhatWasWritten(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, func(e *env) http.HandlerFunc {
			inner := consumer.ErrorHandler(func(w http.ResponseWriter, r *http.Request) error {
				effect(e)(w, r)
				w.Header().Del("X-Outer")
				return nil
			})
			bare := consumer.ErrorHandler(func(w http.ResponseWriter, _ *http.Request) error {
				w.Header().Set("X-Handler", "ran")
				return nil
			})
			return func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("X-Kept", "1")
				if consumer.EventFrom(r.Context()).Key == "bare" {
					bare.ServeHTTP(w, r)
					return
				}
				inner.ServeHTTP(w, r)
			}
		})
		got := e.post("k", "{}")
		wantFirst(t, got, 201, `{"done":"k"}`)
		if got.header.Get("X-Handler") != "ran" || got.header.Get("X-Kept") != "1" {
			t.Errorf("header %v", got.header)
		}
		wantReplayed(t, e.post("k", "{}"), 201, "")
		got = e.post("bare", "{}")
		wantFirst(t, got, 204, "")
		if got.header.Get("X-Handler") != "ran" || got.header.Get("X-Kept") != "1" {
			t.Errorf("header %v", got.header)
		}
	})
}

// What stands between the middleware and the handler may answer otherwise than the handler's error asks for. The answer
// counts.
func TestErrorHandlerBehindOthers(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, func(e *env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				inner := httptest.NewRecorder()
				consumer.ErrorHandler(func(w http.ResponseWriter, r *http.Request) error {
					effect(e)(w, r)
					if r.Header.Get("Test-Ignore") != "" {
						return consumer.Ignore("of no concern")
					}
					return consumer.Permanent(errors.New("no"))
				}).ServeHTTP(inner, r)
				if inner.Code == http.StatusNoContent {
					w.WriteHeader(http.StatusBadGateway)
				}
			}
		})
		if got := e.do(e.newRequest("ignored", "{}", with("Test-Ignore", "yes"))); got.status != 502 {
			t.Errorf("got %d", got.status)
		}
		if report := e.wantResult(consumer.ResultFailed); report.Err != nil || report.Final {
			t.Errorf("report %+v", report)
		}
		e.wantRows("ignored", 0, 0)
		wantFirst(t, e.post("refused", "{}"), 200, "")
		if report := e.wantResult(consumer.ResultProcessed); report.Err != nil || report.Final {
			t.Errorf("report %+v", report)
		}
		e.wantRows("refused", 1, 1)
	})
}

// An ErrorHandler that is called without the middleware, as in its author's tests, answers the same.
func TestErrorHandlerAlone(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	consumer.ErrorHandler(func(http.ResponseWriter, *http.Request) error {
		return consumer.Permanent(errors.New("token=hunter2"))
	}).ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/", nil))
	if w.Code != 422 || strings.Contains(w.Body.String(), "hunter2") {
		t.Errorf("got %d %s", w.Code, w.Body)
	}
	for name, misuse := range map[string]func(){
		"nil": func() { consumer.ErrorHandler(nil) },
		"a router": func() {
			consumer.NewRouter().ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/", nil))
		},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			misuse()
		}()
	}
}

func TestReasonsAreRedactedByTheApplicationToo(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		cfg := consumer.Config{Redact: func(text string) string { return strings.ReplaceAll(text, "Ada Lovelace", "a customer") }}
		e := newEnv(t, f, cfg, func(*env) http.HandlerFunc {
			return consumer.ErrorHandler(func(_ http.ResponseWriter, r *http.Request) error {
				if r.Header.Get("Test-Ignore") != "" {
					return consumer.Ignore("Ada Lovelace is a test")
				}
				return errors.New("no address of Ada Lovelace")
			}).ServeHTTP
		})
		got := e.post("k", "{}")
		e.do(e.newRequest("ignored", "{}", with("Test-Ignore", "yes")))
		if all := got.body + e.logged.String(); !strings.Contains(got.body, "no address of a customer") || strings.Contains(all, "Ada") {
			t.Errorf("answered and logged %s", all)
		}
		if e.count("SELECT count(*) FROM processed_events WHERE last_error = 'a customer is a test'") != 1 {
			t.Error("the reason is not there, or not redacted")
		}
	})
}
