// Command kafka records a shipment for every invoice in a topic of Kafka. SIGTERM drains: the
// reader takes no new record, lets its handlers end and commits their offsets.
package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/kafkaconsumer"
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
	brokers := strings.Split(cmp.Or(os.Getenv("KAFKA_BROKERS"), "127.0.0.1:9092"), ",")
	cfg := kafkaconsumer.Config{
		Group:  "logistics",
		Topics: []string{"invoices"},
		Client: []kgo.Opt{kgo.SeedBrokers(brokers...)}, // and kgo.DialTLSConfig, kgo.SASL
	}
	events, err := kafkaconsumer.New(cfg, receive)
	if err != nil {
		return err
	}
	slog.Info("reading", "topics", cfg.Topics)
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
		return fmt.Errorf("record shipment for %s: %w", event.IdempotencyKey, err) // rolls back; the record is tried again
	}
	return nil // commits; then the offset may be committed
}
