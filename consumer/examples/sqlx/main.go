// Command sqlx records a shipment for every invoice, with sqlx over database/sql.
package main

import (
	"context"
	"database/sql"
	"fmt"
	"net/http"
	"os"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
	"github.com/jmoiron/sqlx"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/examples/internal/server"
	"github.com/outbox-relay/outbox-relay/consumer/sqlconsumer"
)

func main() { os.Exit(server.Main(run)) }

func run(ctx context.Context) error {
	db, err := sqlx.Open("pgx", os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer db.Close()
	router := sqlconsumer.NewRouter()
	s := &shipping{db: db}
	consumer.HandleJSON(router, "invoice.created", 1, s.ship)
	receive, err := sqlconsumer.New(db.DB, consumer.Config{
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

type shipping struct{ db *sqlx.DB }

// shipment is a row, and the payload of an event.
type shipment struct {
	Invoice string `db:"invoice" json:"invoice"`
	Total   string `db:"total" json:"total"`
}

// ship writes through the transaction as sqlx knows it. One that sqlx did not begin does not know
// its driver, so its Named methods would write placeholders that PostgreSQL does not have: the
// names are bound by the *sqlx.DB.
func (s *shipping) ship(ctx context.Context, inner *sql.Tx, _ consumer.Event, row shipment) error {
	tx := &sqlx.Tx{Tx: inner, Mapper: s.db.Mapper}
	query, args, err := s.db.BindNamed("INSERT INTO shipments (invoice, total) VALUES (:invoice, :total)", row)
	if err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, query, args...); err != nil {
		return fmt.Errorf("record shipment: %w", err) // rolls back; the relay tries again
	}
	var stored shipment
	if err := tx.GetContext(ctx, &stored, "SELECT invoice, total FROM shipments WHERE invoice = $1", row.Invoice); err != nil {
		return fmt.Errorf("read shipment: %w", err)
	}
	return nil // commits; then 204 is sent
}
