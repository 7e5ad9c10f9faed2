package sqlconsumer_test

import (
	"context"
	"database/sql"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/sqlconsumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

// Everything that a handler writes through this package commits with its event, and is gone when
// the handler fails.
func TestHandlersWritesAreOneWithTheirEvent(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Inbox)
	router := sqlconsumer.NewRouter()
	router.Handle("invoice.*", 0, func(ctx context.Context, tx *sql.Tx, event consumer.Event) error {
		first, err := sqlconsumer.Once(ctx, tx, consumer.Event{Receiver: "test", Source: "inside", IdempotencyKey: event.IdempotencyKey})
		newer, failed := sqlconsumer.ApplyIfNewer(ctx, tx, "invoices", "1", consumer.BySequence(event.Sequence))
		if err = errors.Join(err, failed); err == nil && first && newer {
			_, err = tx.ExecContext(ctx, "INSERT INTO effect VALUES ($1)", event.IdempotencyKey)
		}
		if err == nil && event.Attempt == 1 {
			err = receivertest.ErrHandler
		}
		return err
	})
	e := receivertest.StartEnv(t, receivertest.SQL(), dsn, consumer.Config{}, func(_ *receivertest.Env, cfg consumer.Config) http.Handler {
		return receivertest.Must(sqlconsumer.New(receivertest.OpenSQL(t, dsn), cfg, router.Dispatch))
	})
	e.MustExec(receivertest.Schema)
	post := func(key, sequence, attempt string) receivertest.Response {
		return e.Do(e.NewRequest(key, "{}", receivertest.With(webhook.Sequence, sequence), receivertest.With(webhook.Attempt, attempt)))
	}
	receivertest.WantProblem(t, post("newer", "2", "1"), 500, "handler-failed")
	e.WantRows("newer", 0, 0)
	receivertest.WantFirst(t, post("newer", "2", "2"), 204, "")
	receivertest.WantReplayed(t, post("newer", "2", "3"), 204, "")
	e.WantRows("newer", 1, 2) // and the event inside of it
	receivertest.WantFirst(t, post("older", "1", "2"), 204, "")
	e.WantRows("older", 0, 2)
}

// A *sql.Tx cannot refuse Commit and Rollback: a handler that calls one is found out afterwards.
func TestHandlerThatEndsItsTransaction(t *testing.T) {
	t.Parallel()
	for key, end := range map[string]func(*sql.Tx) error{"commit": (*sql.Tx).Commit, "rollback": (*sql.Tx).Rollback} {
		e := receivertest.NewEnv(t, receivertest.SQL(), consumer.Config{}, func(e *receivertest.Env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				receivertest.Effect(e)(w, r)
				if err := end(sqlconsumer.Tx(r.Context())); err != nil {
					t.Error(err)
				}
			}
		})
		receivertest.WantProblem(t, e.Post(key, "{}"), 500, "handler-ended-transaction")
		committed := 0
		if key == "commit" { // which the row says
			receivertest.WantReplayed(t, e.Post(key, "{}"), 422, "")
			committed = 1
		}
		e.WantRows(key, committed, committed)
	}
}

func TestTxOutsideTheMiddlewarePanics(t *testing.T) {
	t.Parallel()
	wantPanic := func(want string, ctx context.Context) {
		t.Helper()
		defer func() {
			if message, _ := recover().(string); !strings.Contains(message, want) {
				t.Errorf("panic %q, want one with %q", message, want)
			}
		}()
		sqlconsumer.Tx(ctx)
	}
	wantPanic("sqlconsumer: Tx needs the context of a request that came through Middleware", t.Context())
	e := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{}, func(*receivertest.Env) http.HandlerFunc {
		return func(_ http.ResponseWriter, r *http.Request) { wantPanic("is consumer.Tx's", r.Context()) }
	})
	receivertest.WantFirst(t, e.Post("k", "{}"), 200, "")
}

func TestMistakesOfConstructors(t *testing.T) {
	t.Parallel()
	good := consumer.Config{Receiver: "test", Secrets: []string{receivertest.SecretText}}
	db := receivertest.OpenSQL(t, "postgres://stranger@127.0.0.1:1/none")
	handle := func(context.Context, *sql.Tx, consumer.Event) error { return nil }
	for want, call := range map[string]func() (any, error){
		"sqlconsumer: New needs a database":        func() (any, error) { return sqlconsumer.New(nil, good, handle) },
		"sqlconsumer: New needs a handler":         func() (any, error) { return sqlconsumer.New(db, good, nil) },
		"sqlconsumer: Middleware needs a database": func() (any, error) { return sqlconsumer.Middleware(nil, good) },
		"consumer: Config.Secrets is empty":        func() (any, error) { return sqlconsumer.New(db, consumer.Config{}, handle) },
	} {
		if _, err := call(); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: failed with %v", want, err)
		}
	}
}
