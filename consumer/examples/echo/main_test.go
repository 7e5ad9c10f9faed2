package main

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/labstack/echo/v4"

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

// Behind echo.WrapMiddleware echo answers a handler's error only when the middleware has returned: it is rolled back all the same.
func TestErrorBehindWrapMiddleware(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.New(t, migrations.Inbox))
	if _, err := pool.Exec(t.Context(), exampletest.Invoices); err != nil {
		t.Fatal(err)
	}
	var failure error
	e := echo.New()
	e.POST("/", func(c echo.Context) error {
		ctx := c.Request().Context()
		if _, err := consumer.Tx(ctx).Exec(ctx, "INSERT INTO shipments (invoice, total) VALUES ('INV-1', 1)"); err != nil {
			return err
		}
		if failure != nil {
			return failure
		}
		return c.NoContent(http.StatusNoContent)
	}, echo.WrapMiddleware(consumer.Must(consumer.Middleware(pool, consumer.Config{Receiver: "logistics", AllowUnsigned: true}))))
	post := func() *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", strings.NewReader("{}"))
		r.Header.Set("X-Idempotency-Key", "k")
		w := httptest.NewRecorder()
		e.ServeHTTP(w, r)
		return w
	}
	shipments := func() (n int) {
		if err := pool.QueryRow(t.Context(), "SELECT count(*) FROM shipments").Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	for _, failure = range []error{errors.New("no stock"), echo.NewHTTPError(http.StatusBadRequest, "no invoice")} {
		if w := post(); w.Code != http.StatusInternalServerError || !strings.Contains(w.Body.String(), "no-answer") || shipments() != 0 {
			t.Errorf("%v: answered %d %s, %d shipments", failure, w.Code, w.Body, shipments())
		}
	}
	failure = nil
	if w := post(); w.Code != http.StatusNoContent || shipments() != 1 {
		t.Errorf("answered %d %s, %d shipments", w.Code, w.Body, shipments())
	}
}
