// Command routers records a shipment for every invoice, behind the router chi and the frameworks
// echo and gin, each below its own path.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"

	"github.com/gin-gonic/gin"
	"github.com/go-chi/chi/v5"
	"github.com/go-chi/chi/v5/middleware"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/labstack/echo/v4"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/examples/internal/server"
)

func main() { os.Exit(server.Main(run)) }

func run(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	receive, err := consumer.New(pool, consumer.Config{
		Receiver: "logistics",
		Source:   "finance",
		Secrets:  []string{os.Getenv("FINANCE_SECRET")},
	}, ship)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("/chi/", behindChi(receive))
	mux.Handle("/echo/", behindEcho(receive))
	mux.Handle("/gin/", behindGin(receive))
	return server.Run(ctx, mux)
}

func behindChi(receive http.Handler) http.Handler {
	router := chi.NewRouter()
	router.Use(middleware.RequestID)
	router.Method(http.MethodPost, "/chi/webhooks/finance", receive)
	return router
}

func behindEcho(receive http.Handler) http.Handler {
	e := echo.New()
	e.POST("/echo/webhooks/finance", echo.WrapHandler(receive))
	return e
}

func behindGin(receive http.Handler) http.Handler {
	gin.SetMode(gin.ReleaseMode)
	g := gin.New()
	g.POST("/gin/webhooks/finance", gin.WrapH(receive))
	return g
}

// invoice is the payload of finance's events.
type invoice struct {
	Number string `json:"invoice"`
	Total  string `json:"total"`
}

func ship(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
	var payload invoice
	if err := json.Unmarshal(event.Payload, &payload); err != nil {
		return consumer.Permanent(fmt.Errorf("decode payload: %w", err)) // 422: the relay fails it and alerts
	}
	_, err := tx.Exec(ctx, "INSERT INTO shipments (invoice, total) VALUES ($1, $2)", payload.Number, payload.Total)
	if err != nil {
		return fmt.Errorf("record shipment: %w", err) // 500: rolls back; the relay tries again
	}
	return nil // commits; then 204 is sent
}
