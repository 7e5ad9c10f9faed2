// Command echo records a shipment for every invoice, behind the framework echo.
//
// echo.WrapMiddleware does not fit: when the handler returns an error, it hands the error on after the middleware has
// seen an answer that looks like 200, and has committed and sent it. [within] tells the middleware in time.
package main

import (
	"context"
	"fmt"
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
		Receiver: "logistics",
		Source:   "finance",
		Secrets:  []string{os.Getenv("FINANCE_SECRET")},
	})
	e := echo.New()
	e.POST("/webhooks/finance", ship, within(once))
	return server.Run(ctx, e)
}

// within runs a handler of echo inside a middleware of net/http that must know what becomes of it. Errors mean what they
// mean to consumer.ErrorHandler: an echo.HTTPError is one like any other, after which the relay tries again.
func within(middleware func(http.Handler) http.Handler) echo.MiddlewareFunc {
	return func(next echo.HandlerFunc) echo.HandlerFunc {
		return func(c echo.Context) error {
			outer := c.Response()
			middleware(consumer.ErrorHandler(func(w http.ResponseWriter, r *http.Request) error {
				c.SetRequest(r)
				c.SetResponse(echo.NewResponse(w, c.Echo()))
				return next(c)
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
		return consumer.Permanent(err) // 422: the relay fails it and tells somebody
	}
	ctx := c.Request().Context()
	_, err := consumer.Tx(ctx).Exec(ctx,
		"INSERT INTO shipments (invoice, total) VALUES ($1, $2)", payload.Number, payload.Total)
	if err != nil {
		return fmt.Errorf("record shipment: %w", err) // 500: rolls back; the relay tries again
	}
	return c.NoContent(http.StatusNoContent) // sent after the commit
}
