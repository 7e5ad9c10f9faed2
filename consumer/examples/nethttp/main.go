// Command nethttp records a shipment for every invoice, with net/http and pgx alone. A router
// decodes payloads and picks the function for each type and version of events; what the function
// returns decides what becomes of the event.
package main

import (
	"context"
	"fmt"
	"net/http"
	"os"

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
	router := consumer.NewRouter()
	consumer.HandleJSON(router, "invoice.created", 1, ship)
	consumer.HandleJSON(router, "customer.moved", 1, move)
	router.Handle("invoice.*", 0, leave)
	receive, err := consumer.New(pool, consumer.Config{
		Receiver: "logistics",
		Source:   "finance",
		Secrets:  []string{os.Getenv("FINANCE_SECRET")},
	}, router.Dispatch)
	if err != nil {
		return err
	}

	mux := http.NewServeMux()
	mux.Handle("POST /webhooks/finance", receive)
	return server.Run(ctx, mux)
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
		return fmt.Errorf("record shipment for %s: %w", event.IdempotencyKey, err) // rolls back; the relay tries again
	}
	return nil // commits; then 204 is sent
}

// address is the payload of customer.moved, version 1.
type address struct {
	Customer string `json:"customer"`
	Address  string `json:"address"`
}

// move keeps a customer's newest address, in whatever order the events arrive.
func move(ctx context.Context, tx pgx.Tx, event consumer.Event, payload address) error {
	newer, err := consumer.ApplyIfNewer(ctx, tx, "finance/customer", payload.Customer, consumer.ByTime(event.CreatedAt, event.ID))
	if err != nil || !newer {
		return err // nil for an event that is older than the address
	}
	_, err = tx.Exec(ctx, `INSERT INTO addresses (customer, address) VALUES ($1, $2)
		ON CONFLICT (customer) DO UPDATE SET address = excluded.address`, payload.Customer, payload.Address)
	return err
}

// leave is for the events about invoices that do not concern shipping. Those of other types, for
// which there is no handler, are refused with 422: the relay marks them failed and alerts.
func leave(context.Context, pgx.Tx, consumer.Event) error {
	return consumer.Ignore("shipping needs to know of new invoices only")
}
