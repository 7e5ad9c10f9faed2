// Command svix records a shipment for every invoice of a sender other than outbox-relay: one whose
// webhooks go out through Svix. These are Standard Webhooks under older names.
package main

import (
	"context"
	"encoding/json"
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
	receive, err := consumer.New(pool, consumer.Config{
		Receiver: "logistics",
		Source:   "billing",
		Secrets:  []string{os.Getenv("BILLING_SECRET")},
		Verify:   consumer.Verify{AcceptForeign: true}, // the key is then webhook-id, and the payload the only thing to believe
	}, ship)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("POST /webhooks/billing", standardNames(receive))
	return server.Run(ctx, mux)
}

// standardNames gives Svix's headers the names of Standard Webhooks. A request that has these
// already keeps them.
func standardNames(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		renamed := r.Clone(r.Context())
		for _, name := range []string{"Id", "Timestamp", "Signature"} {
			if values := r.Header.Values("Svix-" + name); len(values) > 0 && renamed.Header.Get("Webhook-"+name) == "" {
				renamed.Header["Webhook-"+name] = values
			}
		}
		next.ServeHTTP(w, renamed)
	})
}

func ship(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
	var payload struct {
		Type string `json:"type"`
		Data struct {
			Invoice string `json:"invoice"`
			Total   string `json:"total"`
		} `json:"data"`
	}
	if err := json.Unmarshal(event.Payload, &payload); err != nil {
		return consumer.Permanent(fmt.Errorf("decode payload: %w", err))
	}
	if payload.Type != "invoice.created" {
		return consumer.Ignore("not about a new invoice") // 204, so that Svix does not repeat it
	}
	_, err := tx.Exec(ctx,
		"INSERT INTO shipments (invoice, total) VALUES ($1, $2)", payload.Data.Invoice, payload.Data.Total)
	if err != nil {
		return fmt.Errorf("record shipment: %w", err) // 500: rolls back; Svix tries again
	}
	return nil // commits; then 204 is sent
}
