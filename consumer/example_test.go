package consumer_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"

	"github.com/outbox-relay/outbox-relay/consumer"
)

// A receiver records a shipment for every invoice. The relay delivers the same event twice, as it does whenever it cannot
// know whether the first attempt arrived; there is one shipment.
func Example() {
	pool, stop := exampleDatabase("CREATE TABLE shipment (invoice text)") // your *pgxpool.Pool
	defer stop()

	receive := consumer.Middleware(pool, consumer.Config{
		Receiver: "logistics",
		Secrets:  []string{exampleSecret}, // shared with the relay; from your environment
		Source:   "finance",
	})
	mux := http.NewServeMux()
	mux.Handle("POST /webhooks/finance", receive(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		event, tx := consumer.EventFrom(r.Context()), consumer.Tx(r.Context())
		fmt.Println("handling", event.Type, event.Key)
		_, err := tx.Exec(r.Context(), "INSERT INTO shipment (invoice) VALUES ($1)", event.RelatedReference)
		if err != nil {
			http.Error(w, "cannot record the shipment", http.StatusInternalServerError) // rolls back; the relay retries
			return
		}
		w.WriteHeader(http.StatusNoContent) // commits
	})))
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
