// Command echo records a shipment for every invoice, behind the framework echo.
//
// echo.WrapMiddleware does not fit: when the handler returns an error, it hands the error on after the middleware has
// seen an answer that looks like 200, and has committed and sent it. [within] lets the error be answered in time.
package main

import (
	"context"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"syscall"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/labstack/echo/v4"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/examples/internal/server"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		slog.Error("the receiver has ended", "error", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	once := consumer.Middleware(pool, consumer.Config{
		Source:  "finance",
		Secrets: []string{os.Getenv("FINANCE_SECRET")},
	})
	e := echo.New()
	e.POST("/webhooks/finance", ship, within(once))
	return server.Run(ctx, e)
}

// within runs a handler of echo inside a middleware of net/http that must know what the handler answers.
func within(middleware func(http.Handler) http.Handler) echo.MiddlewareFunc {
	return func(next echo.HandlerFunc) echo.HandlerFunc {
		return func(c echo.Context) error {
			outer := c.Response()
			middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				c.SetRequest(r)
				c.SetResponse(echo.NewResponse(w, c.Echo()))
				err := next(c)
				switch {
				case err == nil:
				case c.Response().Committed: // too late for another answer, not for a rollback
					panic(err)
				default:
					c.Error(err)
				}
			})).ServeHTTP(outer, c.Request())
			c.SetResponse(outer)
			return nil // it has been answered
		}
	}
}

// invoice is the payload of finance's events.
type invoice struct {
	Number string `json:"invoice"`
	Total  string `json:"total"`
}

func ship(c echo.Context) error {
	var payload invoice
	if err := c.Bind(&payload); err != nil {
		return echo.NewHTTPError(http.StatusUnprocessableEntity, "the payload is no invoice") // the relay fails it
	}
	ctx := c.Request().Context()
	_, err := consumer.Tx(ctx).Exec(ctx,
		"INSERT INTO shipments (invoice, total) VALUES ($1, $2)", payload.Number, payload.Total)
	if err != nil {
		slog.ErrorContext(ctx, "cannot record the shipment", "error", err)
		return err // 500: rolls back; the relay tries again
	}
	return c.NoContent(http.StatusNoContent) // sent after the commit
}
