package main

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/stdlib"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/consumertest"
	"github.com/outbox-relay/outbox-relay/consumer/examples/internal/exampletest"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

func TestTakesEffectOnce(t *testing.T) {
	t.Parallel()
	exampletest.Start(t, exampletest.Invoices).TakesEffectOnce("/webhooks/finance")
}

func TestPassesDrill(t *testing.T) {
	t.Parallel()
	exampletest.Start(t, exampletest.Invoices).PassesDrill("/webhooks/finance")
}

func TestTheNewestAddressStays(t *testing.T) {
	t.Parallel()
	e := exampletest.Start(t, exampletest.Invoices)
	monday := time.Now().Add(-time.Hour)
	for _, c := range []struct {
		key, address string
		id           int64
		at           time.Time
	}{
		{"k2", "Elm Street", 2, monday.Add(time.Minute)},
		{"k1", "Oak Street", 1, monday}, // late
		{"k3", "Ash Street", 3, monday.Add(2 * time.Minute)},
	} {
		body := `{"customer":"c-1","address":"` + c.address + `"}`
		if answer := e.Deliver("/webhooks/finance", "customer.moved", c.key, body, func(e *consumer.Event) { e.CreatedAt, e.ID = c.at, c.id }); answer.Status != http.StatusNoContent {
			t.Errorf("%s: answered %d %q", c.key, answer.Status, answer.Body)
		}
		if c.key == "k1" {
			if n := e.Count("SELECT count(*) FROM addresses WHERE address = 'Elm Street'"); n != 1 {
				t.Error("a late event has overwritten a newer one")
			}
		}
	}
	if n := e.Count("SELECT count(*) FROM addresses WHERE address = 'Ash Street'"); n != 1 {
		t.Error("the newest address is not there")
	}
	if n := e.Count("SELECT count(*) FROM processed_events WHERE processing_state = 'succeeded'"); n != 3 {
		t.Errorf("%d events count as processed, want 3", n)
	}
}

func TestShip(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.New(t))
	if _, err := pool.Exec(t.Context(), exampletest.Invoices); err != nil {
		t.Fatal(err)
	}
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context()) // the next test finds nothing
	err = ship(t.Context(), tx, consumer.Event{IdempotencyKey: "invoice-7/created"}, invoice{Number: "INV-7", Total: "19.90"})
	var total string
	if found := tx.QueryRow(t.Context(), "SELECT total::text FROM shipments WHERE invoice = 'INV-7'").Scan(&total); err != nil || found != nil || total != "19.90" {
		t.Errorf("a total of %q: %v, %v", total, err, found)
	}
}

func TestReceive(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.New(t))
	if _, err := pool.Exec(t.Context(), exampletest.Invoices); err != nil {
		t.Fatal(err)
	}
	const secret = exampletest.Secret
	router := consumer.NewRouter()
	consumer.HandleJSON(router, "invoice.created", 1, ship)

	db := stdlib.OpenDBFromPool(pool)
	defer db.Close()
	if err := migrations.Up(t.Context(), db, migrations.Inbox); err != nil { // once for each test database
		t.Fatal(err)
	}
	receive, err := consumer.New(pool, consumer.Config{Receiver: "logistics", Secrets: []string{secret}}, router.Dispatch)
	if err != nil {
		t.Fatal(err)
	}
	event := consumer.Event{IdempotencyKey: "invoice-7/created", Type: "invoice.created", Payload: []byte(`{"invoice":"INV-7","total":"19.90"}`)}
	for range 2 { // the second request is a duplicate
		request, err := consumertest.NewRequest(t.Context(), "/webhooks/finance", event, secret)
		if err != nil {
			t.Fatal(err)
		}
		answer := httptest.NewRecorder()
		receive.ServeHTTP(answer, request)
		if answer.Code != http.StatusNoContent {
			t.Errorf("answered %d %s", answer.Code, answer.Body)
		}
	}

	var shipments int
	if err := pool.QueryRow(t.Context(), "SELECT count(*) FROM shipments").Scan(&shipments); err != nil || shipments != 1 {
		t.Errorf("%d shipments: %v", shipments, err)
	}
}
