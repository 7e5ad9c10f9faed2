// Command gorm records a shipment for every invoice, with GORM over database/sql.
package main

import (
	"context"
	"database/sql"
	"fmt"
	"net/http"
	"os"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/examples/internal/server"
	"github.com/outbox-relay/outbox-relay/consumer/sqlconsumer"
)

func main() { os.Exit(server.Main(run)) }

func run(ctx context.Context) error {
	pool, err := sql.Open("pgx", os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	db, err := gorm.Open(postgres.New(postgres.Config{Conn: pool}), &gorm.Config{})
	if err != nil {
		return err
	}
	router := sqlconsumer.NewRouter()
	s := &shipping{db: db}
	consumer.HandleJSON(router, "invoice.created", 1, s.ship)
	receive, err := sqlconsumer.New(pool, consumer.Config{
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

type shipping struct{ db *gorm.DB }

// Shipment is a row, and the payload of an event.
type Shipment struct {
	Invoice string `json:"invoice" gorm:"primaryKey"`
	Total   string `json:"total"`
}

// within is a session of GORM in a transaction. Its Transaction method makes savepoints, as it does
// within a transaction of GORM's own; Begin is refused.
func (s *shipping) within(ctx context.Context, tx *sql.Tx) *gorm.DB {
	session := s.db.Session(&gorm.Session{Context: ctx, SkipDefaultTransaction: true})
	session.Statement.ConnPool = tx
	return session
}

func (s *shipping) ship(ctx context.Context, tx *sql.Tx, _ consumer.Event, row Shipment) error {
	if err := s.within(ctx, tx).Create(&row).Error; err != nil {
		return fmt.Errorf("record shipment: %w", err) // rolls back; the relay tries again
	}
	return nil // commits; then 204 is sent
}
