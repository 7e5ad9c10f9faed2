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

var routers = []string{"chi", "echo", "gin"}

func TestTakesEffectOnce(t *testing.T) {
	t.Parallel()
	for _, router := range routers {
		t.Run(router, func(t *testing.T) {
			t.Parallel()
			exampletest.Start(t, exampletest.Invoices).TakesEffectOnce("/" + router + "/webhooks/finance")
		})
	}
}

func TestPassesDrill(t *testing.T) {
	t.Parallel()
	for _, router := range routers {
		t.Run(router, func(t *testing.T) {
			t.Parallel()
			exampletest.Start(t, exampletest.Invoices).PassesDrill("/" + router + "/webhooks/finance")
		})
	}
}

// Behind echo.WrapMiddleware echo answers a handler's error only when the middleware has returned:
// it is rolled back all the same, but the status of the error is lost. With answerErrors the sender
// gets it.
func TestErrorBehindWrapMiddleware(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.New(t, migrations.Inbox))
	if _, err := pool.Exec(t.Context(), exampletest.Invoices); err != nil {
		t.Fatal(err)
	}
	var failure error
	once, err := consumer.Middleware(pool, consumer.Config{Receiver: "logistics", Verify: consumer.Verify{AllowUnsigned: true}})
	pgtest.Must(t, err)
	e := echo.New()
	handle := func(c echo.Context) error {
		ctx := c.Request().Context()
		if _, err := consumer.Tx(ctx).Exec(ctx, "INSERT INTO shipments (invoice, total) VALUES ('INV-1', 1)"); err != nil {
			return err
		}
		if failure != nil {
			return failure
		}
		return c.NoContent(http.StatusNoContent)
	}
	e.POST("/", handle, echo.WrapMiddleware(once))
	e.POST("/answered", handle, echo.WrapMiddleware(once), answerErrors)
	post := func(path string) *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, path, strings.NewReader("{}"))
		r.Header.Set("X-Idempotency-Key", "k")
		w := httptest.NewRecorder()
		e.ServeHTTP(w, r)
		return w
	}
	shipments := func() (n int) {
		pgtest.Must(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM shipments").Scan(&n))
		return n
	}
	for _, failure = range []error{errors.New("no stock"), echo.NewHTTPError(http.StatusBadRequest, "no invoice")} {
		if w := post("/"); w.Code != http.StatusInternalServerError || !strings.Contains(w.Body.String(), "no-answer") || shipments() != 0 {
			t.Errorf("%v: answered %d %s, %d shipments", failure, w.Code, w.Body, shipments())
		}
	}
	failure = echo.NewHTTPError(http.StatusUnprocessableEntity, "no invoice")
	if w := post("/answered"); w.Code != http.StatusUnprocessableEntity || !strings.Contains(w.Body.String(), "no invoice") || shipments() != 0 {
		t.Errorf("behind answerErrors: answered %d %s, %d shipments", w.Code, w.Body, shipments())
	}
	failure = nil
	if w := post("/answered"); w.Code != http.StatusNoContent || shipments() != 1 {
		t.Errorf("answered %d %s, %d shipments", w.Code, w.Body, shipments())
	}
}

// answerErrors writes a handler's error as echo would, before the consumer's middleware decides:
// after echo.WrapMiddleware.
func answerErrors(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		if err := next(c); err != nil {
			c.Error(err)
		}
		return nil
	}
}
