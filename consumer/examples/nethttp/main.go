// Command nethttp records a shipment for every invoice, with net/http and pgx alone.
package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"syscall"

	"github.com/jackc/pgx/v5/pgxpool"

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
	mux := http.NewServeMux()
	mux.Handle("POST /webhooks/finance", once(http.HandlerFunc(ship)))
	return server.Run(ctx, mux)
}

// invoice is the payload of finance's events.
type invoice struct {
	Number string `json:"invoice"`
	Total  string `json:"total"`
}

func ship(w http.ResponseWriter, r *http.Request) {
	var payload invoice
	if err := json.NewDecoder(r.Body).Decode(&payload); err != nil {
		http.Error(w, "the payload is no invoice", http.StatusUnprocessableEntity) // the relay fails it and tells somebody
		return
	}
	_, err := consumer.Tx(r.Context()).Exec(r.Context(),
		"INSERT INTO shipments (invoice, total) VALUES ($1, $2)", payload.Number, payload.Total)
	if err != nil {
		slog.ErrorContext(r.Context(), "cannot record the shipment", "error", err)
		http.Error(w, "cannot record the shipment", http.StatusInternalServerError) // rolls back; the relay tries again
		return
	}
	w.WriteHeader(http.StatusNoContent) // sent after the commit
}
