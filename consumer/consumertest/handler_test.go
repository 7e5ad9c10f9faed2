package consumertest_test

import (
	"database/sql"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/consumertest"
	"github.com/outbox-relay/outbox-relay/consumer/sqlconsumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

var created = consumer.Event{IdempotencyKey: "invoice-7/created", Type: "invoice.created", RelatedReference: "INV-7", Source: "finance"}

// ship is a handler as an application has it.
func ship(w http.ResponseWriter, r *http.Request) {
	event := consumer.EventFrom(r.Context())
	if _, err := consumer.Tx(r.Context()).Exec(r.Context(), "INSERT INTO shipment VALUES ($1)", event.RelatedReference); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// What a handler writes goes into the test's transaction, which the handler cannot end.
func TestWithTx(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.New(t))
	pgtest.Exec(t, pool, "CREATE TABLE shipment (invoice text)")
	tx, err := pool.Begin(t.Context())
	pgtest.Must(t, err)
	ctx := consumertest.WithTx(t.Context(), created, tx)
	answer := httptest.NewRecorder()
	ship(answer, httptest.NewRequestWithContext(ctx, http.MethodPost, "/", strings.NewReader("{}")))
	var invoice string
	if err := tx.QueryRow(t.Context(), "SELECT invoice FROM shipment").Scan(&invoice); err != nil || invoice != "INV-7" || answer.Code != http.StatusNoContent {
		t.Errorf("answered %d %s, wrote %q, %v", answer.Code, answer.Body, invoice, err)
	}
	if got := consumer.EventFrom(ctx); !reflect.DeepEqual(got, created) {
		t.Errorf("event %+v", got)
	}
	for name, end := range map[string]error{
		"Commit":   consumer.Tx(ctx).Commit(ctx),
		"Rollback": consumer.Tx(ctx).Rollback(ctx),
	} {
		testkit.ErrorIs(t, name, end, consumer.ErrMiddlewareCommits)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Error(err)
	}
	wantPanic(t, "behind consumer.Middleware, whose transaction is consumer.Tx's", func() { sqlconsumer.Tx(ctx) })
}

func TestWithTxSQL(t *testing.T) {
	t.Parallel()
	db, err := sql.Open("pgx", pgtest.New(t))
	pgtest.Must(t, err)
	t.Cleanup(func() { _ = db.Close() })
	tx, err := db.BeginTx(t.Context(), nil)
	pgtest.Must(t, err)
	defer tx.Rollback()
	ctx := consumertest.WithTxSQL(t.Context(), created, tx)
	if got := sqlconsumer.Tx(ctx); got != tx || !reflect.DeepEqual(consumer.EventFrom(ctx), created) {
		t.Errorf("the handler finds %p, the test has %p", got, tx)
	}
	wantPanic(t, "behind sqlconsumer.Middleware, whose transaction is sqlconsumer.Tx's", func() { consumer.Tx(ctx) })
}

func wantPanic(t *testing.T, want string, call func()) {
	t.Helper()
	defer func() {
		if message, _ := recover().(string); !strings.Contains(message, want) {
			t.Errorf("panic %q, want one with %q", message, want)
		}
	}()
	call()
}
