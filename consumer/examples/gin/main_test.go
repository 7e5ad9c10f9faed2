package main

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/gin-gonic/gin"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/examples/internal/exampletest"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

func TestTakesEffectOnce(t *testing.T) {
	t.Parallel()
	exampletest.Start(t, exampletest.Invoices).TakesEffectOnce("/webhooks/finance")
}

// A gin.HandlerFunc writes to gin's own ResponseWriter, past the middleware: a handler behind Middleware must be one of net/http.
func TestHandlerBehindMiddleware(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.New(t, migrations.Inbox))
	if _, err := pool.Exec(t.Context(), exampletest.Invoices); err != nil {
		t.Fatal(err)
	}
	once := consumer.Must(consumer.Middleware(pool, consumer.Config{Receiver: "logistics", AllowUnsigned: true}))
	failure := errors.New("no stock")
	handle := func(w http.ResponseWriter, r *http.Request) {
		_, err := consumer.Tx(r.Context()).Exec(r.Context(), "INSERT INTO shipments (invoice, total) VALUES ('INV-1', 1)")
		if err == nil {
			err = failure
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	}
	g := gin.New()
	g.POST("/", gin.WrapH(once(http.HandlerFunc(handle))))
	for _, want := range []struct{ status, shipments int }{{http.StatusInternalServerError, 0}, {http.StatusNoContent, 1}, {http.StatusNoContent, 1}} {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", strings.NewReader("{}"))
		r.Header.Set("X-Idempotency-Key", "k")
		w := httptest.NewRecorder()
		g.ServeHTTP(w, r)
		var shipments int
		if err := pool.QueryRow(t.Context(), "SELECT count(*) FROM shipments").Scan(&shipments); err != nil {
			t.Fatal(err)
		}
		if w.Code != want.status || shipments != want.shipments {
			t.Errorf("answered %d %s, %d shipments; want %d and %d", w.Code, w.Body, shipments, want.status, want.shipments)
		}
		failure = nil
	}
}
