// Command sqlx records a shipment for every invoice, with sqlx over database/sql.
package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"syscall"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
	"github.com/jmoiron/sqlx"

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
	db, err := sqlx.Open("pgx", os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer db.Close()
	once := consumer.MiddlewareSQL(db.DB, consumer.Config{
		Source:  "finance",
		Secrets: []string{os.Getenv("FINANCE_SECRET")},
	})
	mux := http.NewServeMux()
	mux.Handle("POST /webhooks/finance", once(&shipping{db: db}))
	return server.Run(ctx, mux)
}

type shipping struct{ db *sqlx.DB }

// shipment is a row, and the payload of an event.
type shipment struct {
	Invoice string `db:"invoice" json:"invoice"`
	Total   string `db:"total" json:"total"`
}

// tx is the middleware's transaction as sqlx knows it. One that sqlx did not begin does not know its driver, so its Named
// methods would write placeholders that PostgreSQL does not have: see [shipping.insert].
func (s *shipping) tx(ctx context.Context) *sqlx.Tx {
	return &sqlx.Tx{Tx: consumer.TxSQL(ctx), Mapper: s.db.Mapper}
}

func (s *shipping) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var row shipment
	if err := json.NewDecoder(r.Body).Decode(&row); err != nil {
		http.Error(w, "the payload is no invoice", http.StatusUnprocessableEntity) // the relay fails it and tells somebody
		return
	}
	if err := s.insert(r.Context(), row); err != nil {
		slog.ErrorContext(r.Context(), "cannot record the shipment", "error", err)
		http.Error(w, "cannot record the shipment", http.StatusInternalServerError) // rolls back; the relay tries again
		return
	}
	w.WriteHeader(http.StatusNoContent) // sent after the commit
}

func (s *shipping) insert(ctx context.Context, row shipment) error {
	query, args, err := s.db.BindNamed("INSERT INTO shipments (invoice, total) VALUES (:invoice, :total)", row)
	if err != nil {
		return err
	}
	tx := s.tx(ctx)
	if _, err := tx.ExecContext(ctx, query, args...); err != nil {
		return err
	}
	var stored shipment
	return tx.GetContext(ctx, &stored, "SELECT invoice, total FROM shipments WHERE invoice = $1", row.Invoice)
}
