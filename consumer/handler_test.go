package consumer_test

import (
	"context"
	"database/sql"
	"errors"
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/breaker"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
)

func TestResponseWriterOffersNoWayAround(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, func(e *receivertest.Env) http.HandlerFunc {
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
		receivertest.WantFirst(t, e.Post("k", "{}"), 204, "")
	})
}

func TestSavepointsWork(t *testing.T) {
	t.Parallel()
	e := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{}, func(e *receivertest.Env) http.HandlerFunc {
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
	receivertest.WantFirst(t, e.Post("k", "{}"), 200, "")
	e.WantRows("k", 1, 1)
}

// What a handler leaves behind must not reach the transaction of the connection's next user.
func TestTxIsClosedWhenTheHandlerReturns(t *testing.T) {
	t.Parallel()
	leaked := make(chan pgx.Tx, 2)
	e := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{}, func(e *receivertest.Env) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			tx := consumer.Tx(r.Context())
			nested, err := tx.Begin(r.Context())
			mustNot(e, err)
			leaked <- tx
			leaked <- nested
		}
	})
	receivertest.WantFirst(t, e.Post("k", "{}"), 200, "")
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
	e.WantRows("late", 0, 0)
}

// A result set that is left open blocks the connection: the commit cannot be sent. That is the
// handler's own mistake, and keeps no other request away.
func TestOpenRowsFailTheCommit(t *testing.T) {
	t.Parallel()
	b := receivertest.Must(breaker.New(breaker.Config{Failures: 1}))
	e := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{Breaker: b}, func(e *receivertest.Env) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			receivertest.Effect(e)(w, r)
			if r.Header.Get("Test-Leave-Open") != "" {
				rows, err := consumer.Tx(r.Context()).Query(r.Context(), "SELECT generate_series(1, 100000)")
				if err != nil || !rows.Next() {
					t.Errorf("no rows: %v", err)
				}
			}
		}
	})
	receivertest.WantProblem(t, e.Do(e.NewRequest("k", "{}", receivertest.With("Test-Leave-Open", "yes"))), 500, "commit-failed")
	if report := e.WantResult(consumer.ResultCommitFailed); report.Err == nil || !strings.Contains(report.Err.Error(), "left rows of a query open") {
		t.Errorf("reported %v", report.Err)
	}
	if state := b.State(); state != breaker.Closed {
		t.Errorf("the breaker is %s", state)
	}
	e.Await("SELECT NOT EXISTS (" + receivertest.AdvisoryLocks + ")") // until the backend has noticed
	receivertest.WantFirst(t, e.Post("k", "{}"), 201, `{"done":"k"}`)
	e.WantRows("k", 1, 1)
}

func TestIsolationReachesTheDatabase(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		for level, want := range map[sql.IsolationLevel]string{
			sql.LevelDefault: "read committed", sql.LevelReadCommitted: "read committed",
			sql.LevelRepeatableRead: "repeatable read", sql.LevelSerializable: "serializable",
		} {
			e := receivertest.NewEnv(t, f, consumer.Config{Isolation: level}, func(e *receivertest.Env) http.HandlerFunc {
				return func(w http.ResponseWriter, r *http.Request) {
					mustNot(e, e.Exec(r.Context(), "INSERT INTO effect SELECT current_setting('transaction_isolation')"))
				}
			})
			receivertest.WantFirst(t, e.Post("k", "{}"), 200, "")
			receivertest.WantReplayed(t, e.Post("k", "{}"), 200, "")
			e.WantRows(want, 1, 0)
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
	e := receivertest.NewEnv(t, receivertest.SQL(), consumer.Config{}, func(*receivertest.Env) http.HandlerFunc {
		return func(_ http.ResponseWriter, r *http.Request) {
			wantPanic("is sqlconsumer.Tx's", func() { consumer.Tx(r.Context()) })
		}
	})
	receivertest.WantFirst(t, e.Post("k", "{}"), 200, "")
}
