package consumer_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http/httptest"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
)

// One endpoint, a function for each type. What a function returns decides what happens to the event.
func ExampleRouter() {
	pool, stop := exampleDatabase("CREATE TABLE shipment (invoice text)")
	defer stop()

	type Invoice struct {
		Number string `json:"number"`
		Total  string `json:"total"`
	}
	router := consumer.NewRouter()
	consumer.HandleJSON(router, "invoice.created", 0, func(ctx context.Context, tx pgx.Tx, _ consumer.Event, invoice Invoice) error {
		if invoice.Number == "" {
			return consumer.Permanent(errors.New("the invoice has no number")) // the relay fails it and alerts
		}
		_, err := tx.Exec(ctx, "INSERT INTO shipment (invoice) VALUES ($1)", invoice.Number)
		return err // rolls back, and the relay tries again; nil commits
	})
	router.Handle("invoice.*", 0, func(_ context.Context, _ pgx.Tx, event consumer.Event) error {
		return consumer.Ignore("no shipment depends on " + event.Type) // commits, for a person to review
	})

	receive, err := consumer.New(pool, consumer.Config{Receiver: "logistics", Secrets: []string{exampleSecret}}, router.Dispatch)
	if err != nil {
		fmt.Println(err)
		return
	}
	server := httptest.NewServer(receive)
	defer server.Close()
	fmt.Println(exampleDelivery(server.URL, "invoice-7/created", `{"number":"INV-7","total":"19.90"}`).Status)
	fmt.Println(exampleDelivery(server.URL, "invoice-8/created", `{"total":"19.90"}`).Status)
	fmt.Println(exampleDelivery(server.URL, "invoice-9/created", `{"number":9,"total":"19.90"}`).Status)

	// Output:
	// 204 No Content
	// 422 Unprocessable Entity
	// 422 Unprocessable Entity
}

// Foreign senders put the type into the payload, which their signature covers. A second router takes it from there.
func ExampleRouter_Fallback() {
	types := consumer.NewRouter()
	types.Handle("charge.succeeded", 0, func(_ context.Context, _ pgx.Tx, event consumer.Event) error {
		fmt.Println("book", event.Key)
		return nil
	})
	router := consumer.NewRouter()
	router.Fallback(func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		var envelope struct {
			Type string `json:"type"`
		}
		if err := json.Unmarshal(event.Payload, &envelope); err != nil {
			return consumer.Permanent(errors.New("the payload is not JSON"))
		}
		event.Type = envelope.Type
		return types.Dispatch(ctx, tx, event)
	})

	for _, payload := range []string{`{"type":"charge.succeeded"}`, `{"type":"charge.refunded"}`} {
		event := consumer.Event{Key: "msg_1", Version: 1, Foreign: true, Payload: []byte(payload)}
		fmt.Println(router.Dispatch(context.Background(), nil, event))
	}

	// Output:
	// book msg_1
	// <nil>
	// no handler for charge.refunded version 1
}
