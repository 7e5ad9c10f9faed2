package consumer_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
)

// A receiver records a shipment for every invoice. The relay delivers the same event twice, as it does whenever it cannot
// know whether the first attempt arrived; there is one shipment.
func Example() {
	pool, stop := exampleDatabase("CREATE TABLE shipment (invoice text)") // your *pgxpool.Pool
	defer stop()

	cfg := consumer.Config{
		Receiver: "logistics",
		Secrets:  []string{exampleSecret}, // shared with the relay; from your environment
		Source:   "finance",
	}
	receive, err := consumer.New(pool, cfg, func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		fmt.Println("handling", event.Type, event.Key)
		_, err := tx.Exec(ctx, "INSERT INTO shipment (invoice) VALUES ($1)", event.RelatedReference)
		return err // an error rolls back, and the relay retries; nil commits
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	mux := http.NewServeMux()
	mux.Handle("POST /webhooks/finance", receive)
	server := httptest.NewServer(mux)
	defer server.Close()

	for range 2 {
		answer := exampleDelivery(server.URL+"/webhooks/finance", "invoice-7/created", `{"total":"19.90"}`)
		fmt.Println(answer.StatusCode, "replayed:", answer.Header.Get("Idempotency-Replayed") == "true")
	}
	answer := exampleDelivery(server.URL+"/webhooks/finance", "invoice-7/created", `{"total":"99.90"}`)
	fmt.Println(answer.StatusCode, answer.Header.Get("Content-Type"))

	// Output:
	// handling invoice.created invoice-7/created
	// 204 replayed: false
	// 204 replayed: true
	// 422 application/problem+json
}
