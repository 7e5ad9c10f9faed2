package main

import (
	"context"
	"database/sql"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"gorm.io/driver/postgres"
	"gorm.io/gorm"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/examples/internal/exampletest"
	"github.com/outbox-relay/outbox-relay/consumer/sqlconsumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

func TestTakesEffectOnce(t *testing.T) {
	t.Parallel()
	exampletest.Start(t, exampletest.Invoices).TakesEffectOnce("/webhooks/finance")
}

func TestTransactionsWithinAreSavepoints(t *testing.T) {
	t.Parallel()
	pool, err := sql.Open("pgx", pgtest.New(t, migrations.Inbox))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pool.Close() })
	if _, err := pool.ExecContext(t.Context(), exampletest.Invoices); err != nil {
		t.Fatal(err)
	}
	db, err := gorm.Open(postgres.New(postgres.Config{Conn: pool}), &gorm.Config{})
	if err != nil {
		t.Fatal(err)
	}
	s := &shipping{db: db}
	undone := errors.New("undone")
	handler, err := sqlconsumer.New(pool, consumer.Config{Receiver: "logistics", Verify: consumer.Verify{AllowUnsigned: true}}, func(ctx context.Context, inner *sql.Tx, _ consumer.Event) error {
		tx := s.within(ctx, inner)
		err := tx.Transaction(func(tx *gorm.DB) error {
			if err := tx.Create(&Shipment{Invoice: "INV-1", Total: "1"}).Error; err != nil {
				t.Error(err)
			}
			return undone
		})
		if !errors.Is(err, undone) {
			t.Errorf("the transaction within returned %v", err)
		}
		if err := tx.Begin().Error; !errors.Is(err, gorm.ErrInvalidTransaction) {
			t.Errorf("Begin returned %v", err)
		}
		if err := tx.Create(&Shipment{Invoice: "INV-2", Total: "1"}).Error; err != nil {
			t.Error(err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", strings.NewReader("{}"))
	r.Header.Set("X-Idempotency-Key", "k")
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, r)
	if w.Code != http.StatusNoContent {
		t.Errorf("status %d: %s", w.Code, w.Body)
	}
	var invoices []string
	if err := db.Model(&Shipment{}).Pluck("invoice", &invoices).Error; err != nil || strings.Join(invoices, " ") != "INV-2" {
		t.Errorf("shipments of %q (%v), want INV-2's alone", invoices, err)
	}
	var processed int64
	if err := db.Table("processed_events").Count(&processed).Error; err != nil || processed != 1 {
		t.Errorf("%d events processed (%v)", processed, err)
	}
}
