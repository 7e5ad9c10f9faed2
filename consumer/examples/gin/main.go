// Command gin records a shipment for every invoice, behind the framework gin.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"github.com/gin-gonic/gin"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

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
	gin.SetMode(gin.ReleaseMode)
	g := gin.New()
	g.POST("/webhooks/finance", gin.WrapH(receive))
	return server.Run(ctx, g)
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
