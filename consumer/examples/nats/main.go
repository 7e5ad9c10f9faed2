// Command nats records a shipment for every invoice in a stream of NATS JetStream. SIGTERM drains:
// the reader takes no new message, and acknowledges those that its handlers finish.
package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/natsconsumer"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		slog.Error("the reader has ended", "error", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	conn, err := nats.Connect(cmp.Or(os.Getenv("NATS_URL"), nats.DefaultURL), nats.MaxReconnects(-1))
	if err != nil {
		return err
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		return err
	}
	router := consumer.NewRouter()
	consumer.HandleJSON(router, "invoice.created", 1, ship)
	receive, err := consumer.New(pool, consumer.Config{
		Receiver: "logistics",
		Source:   "finance",
		Secrets:  []string{os.Getenv("FINANCE_SECRET")}, // the destination's signing_secrets
	}, router.Dispatch)
	if err != nil {
		return err
	}
	cfg := natsconsumer.Config{Stream: "EVENTS", Durable: "logistics"}
	events, err := natsconsumer.New(js, cfg, receive)
	if err != nil {
		return err
	}
	slog.Info("reading", "stream", cfg.Stream)
	return events.Run(ctx) // nil after SIGTERM
}

// invoice is the payload of invoice.created, version 1.
type invoice struct {
	Number string `json:"invoice"`
	Total  string `json:"total"`
}

func ship(ctx context.Context, tx pgx.Tx, event consumer.Event, payload invoice) error {
	_, err := tx.Exec(ctx,
		"INSERT INTO shipments (invoice, total) VALUES ($1, $2)", payload.Number, payload.Total)
	if err != nil {
		return fmt.Errorf("record shipment for %s: %w", event.IdempotencyKey, err) // rolls back; the message comes again
	}
	return nil // commits; then the message is acknowledged
}
