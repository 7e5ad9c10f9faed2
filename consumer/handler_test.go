package consumer_test

import (
	"context"
	"database/sql"
	"errors"
	"io"
	"net/http"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/sqlconsumer"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

func TestHandlerThatDoesNotReturn(t *testing.T) {
	cases := map[string]struct {
		end      func(w http.ResponseWriter)
		answered bool
		log      string
	}{
		"panics":              {func(http.ResponseWriter) { panic("boom") }, true, "boom"},
		"panics with nil":     {func(http.ResponseWriter) { panic(any(nil)) }, true, "nil"},
		"panics with error":   {func(http.ResponseWriter) { panic(io.ErrUnexpectedEOF) }, true, "unexpected EOF"},
		"aborts":              {func(http.ResponseWriter) { panic(http.ErrAbortHandler) }, false, ""},
		"exits its goroutine": {func(http.ResponseWriter) { runtime.Goexit() }, false, "goroutine"},
		"status 0":            {func(w http.ResponseWriter) { w.WriteHeader(0) }, true, "invalid WriteHeader code 0"},
		"status 1000":         {func(w http.ResponseWriter) { w.WriteHeader(1000) }, true, "invalid WriteHeader code"},
		"switches protocols":  {func(w http.ResponseWriter) { w.WriteHeader(101) }, true, "switch protocols"},
	}
	eachFlavour(t, func(t *testing.T, f flavour) {
		for name, c := range cases {
			t.Run(name, func(t *testing.T) {
				testsize.OneIn(t, 3)
				t.Parallel()
				e := newEnv(t, f, consumer.Config{}, func(e *env) http.HandlerFunc {
					return func(w http.ResponseWriter, r *http.Request) {
						effect(e)(discardWriter{}, r)
						if r.Header.Get("Test-Fail") != "" {
							c.end(w)
						}
						w.WriteHeader(http.StatusNoContent)
					}
				})
				got, err := e.try(e.newRequest("k", "{}", with("Test-Fail", "yes")))
				switch {
				case c.answered && err != nil:
					t.Fatal(err)
				case c.answered:
					wantProblem(t, got, 500, "handler-panicked")
				case err == nil:
					t.Errorf("the client got %d", got.status)
				}
				if report := e.wantResult(consumer.ResultFailed); report.Err == nil {
					t.Error("the report has no error")
				}
				if log := e.logged.String(); !strings.Contains(log, c.log) {
					t.Errorf("logged %s", log)
				}
				e.wantRows("k", 0, 0)
				// Nothing of it lingers: no lock, no transaction, no connection lost.
				wantFirst(t, e.post("k", "{}"), 204, "")
				e.wantRows("k", 1, 1)
			})
		}
	})
}

func TestResponseWriterOffersNoWayAround(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, func(e *env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				c := http.NewResponseController(w)
				_, _, hijack := c.Hijack()
				for name, err := range map[string]error{
					"Flush": c.Flush(), "Hijack": hijack, "EnableFullDuplex": c.EnableFullDuplex(),
					"SetReadDeadline": c.SetReadDeadline(time.Time{}), "SetWriteDeadline": c.SetWriteDeadline(time.Time{}),
				} {
					if !errors.Is(err, http.ErrNotSupported) {
						t.Errorf("%s: %v, want ErrNotSupported", name, err)
					}
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
		wantFirst(t, e.post("k", "{}"), 204, "")
	})
}

func TestSavepointsWork(t *testing.T) {
	t.Parallel()
	e := newEnv(t, flavours[0], consumer.Config{}, func(e *env) http.HandlerFunc {
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
	wantFirst(t, e.post("k", "{}"), 200, "")
	e.wantRows("k", 1, 1)
}

// What a handler leaves behind must not reach the transaction of the connection's next user.
func TestTxIsClosedWhenTheHandlerReturns(t *testing.T) {
	t.Parallel()
	leaked := make(chan pgx.Tx, 2)
	e := newEnv(t, flavours[0], consumer.Config{}, func(e *env) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			tx := consumer.Tx(r.Context())
			nested, err := tx.Begin(r.Context())
			mustNot(e, err)
			leaked <- tx
			leaked <- nested
		}
	})
	wantFirst(t, e.post("k", "{}"), 200, "")
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
			if !errors.Is(err, pgx.ErrTxClosed) {
				t.Errorf("%s: %v, want ErrTxClosed", name, err)
			}
		}
	}
	e.wantRows("late", 0, 0)
}

// A result set that is left open blocks the connection: the commit cannot be sent.
func TestOpenRowsFailTheCommit(t *testing.T) {
	t.Parallel()
	e := newEnv(t, flavours[0], consumer.Config{}, func(e *env) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			effect(e)(w, r)
			if r.Header.Get("Test-Leave-Open") != "" {
				_, err := consumer.Tx(r.Context()).Query(r.Context(), "SELECT generate_series(1, 100000)")
				mustNot(e, err)
			}
		}
	})
	wantProblem(t, e.do(e.newRequest("k", "{}", with("Test-Leave-Open", "yes"))), 500, "commit-failed")
	e.await("SELECT NOT EXISTS (" + advisoryLocks + ")") // until the backend has noticed
	wantFirst(t, e.post("k", "{}"), 201, `{"done":"k"}`)
	e.wantRows("k", 1, 1)
}

func TestIsolationReachesTheDatabase(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		for level, want := range map[sql.IsolationLevel]string{
			sql.LevelDefault: "read committed", sql.LevelReadCommitted: "read committed",
			sql.LevelRepeatableRead: "repeatable read", sql.LevelSerializable: "serializable",
		} {
			e := newEnv(t, f, consumer.Config{Isolation: level}, func(e *env) http.HandlerFunc {
				return func(w http.ResponseWriter, r *http.Request) {
					mustNot(e, e.exec(r.Context(), "INSERT INTO effect SELECT current_setting('transaction_isolation')"))
				}
			})
			wantFirst(t, e.post("k", "{}"), 200, "")
			wantReplayed(t, e.post("k", "{}"), 200, "")
			e.wantRows(want, 1, 0)
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
	wantPanic("sqlconsumer: Tx needs the context of a request that came through Middleware", func() { sqlconsumer.Tx(context.Background()) })
	for i, want := range []string{"is consumer.Tx's", "is sqlconsumer.Tx's"} {
		e := newEnv(t, flavours[i], consumer.Config{}, func(*env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				wantPanic(want, func() {
					if i == 0 {
						sqlconsumer.Tx(r.Context())
					} else {
						consumer.Tx(r.Context())
					}
				})
			}
		})
		wantFirst(t, e.post("k", "{}"), 200, "")
	}
}
