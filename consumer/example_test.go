package consumer_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/consumertest"
	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// A receiver records a shipment for every invoice. The relay delivers the same event twice, as it
// does whenever it cannot know whether the first attempt arrived; there is one shipment.
func Example() {
	pool, stop := exampleDatabase("CREATE TABLE shipment (invoice text)") // your *pgxpool.Pool
	defer stop()

	cfg := consumer.Config{
		Receiver: "logistics",
		Secrets:  []string{exampleSecret}, // shared with the relay; from your environment
		Source:   "finance",
	}
	receive, err := consumer.New(pool, cfg, func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		fmt.Println("handling", event.Type, event.IdempotencyKey)
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

// One endpoint, a function for each type. What a function returns decides what happens to the
// event.
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

// Foreign senders put the type into the payload, which their signature covers. A second router
// takes it from there.
func ExampleRouter_Fallback() {
	types := consumer.NewRouter()
	types.Handle("charge.succeeded", 0, func(_ context.Context, _ pgx.Tx, event consumer.Event) error {
		fmt.Println("book", event.IdempotencyKey)
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
		event := consumer.Event{IdempotencyKey: "msg_1", Version: 1, Foreign: true, Payload: []byte(payload)}
		fmt.Println(router.Dispatch(context.Background(), nil, event))
	}

	// Output:
	// book msg_1
	// <nil>
	// no handler for charge.refunded version 1
}

// The sender's operator asks at a path beside the receiver's.
func ExampleReconcile() {
	pool, stop := exampleDatabase("CREATE TABLE shipment (invoice text, event_key text)") // your *pgxpool.Pool
	defer stop()

	cfg := consumer.Config{Receiver: "logistics", Source: "finance", Secrets: []string{exampleSecret}}
	compare, err := consumer.Reconcile(pool, consumer.ReconcileConfig{Config: cfg, Effects: "SELECT event_key FROM shipment"})
	if err != nil {
		fmt.Println(err)
		return
	}
	mux := http.NewServeMux()
	mux.Handle("POST /webhooks/finance/reconcile", compare)
	server := httptest.NewServer(mux)
	defer server.Close()

	// outbox-relay reconcile signs its questions. A delivery is none.
	answer := exampleDelivery(server.URL+"/webhooks/finance/reconcile", "invoice-7/created", `{"ask":"describe"}`)
	fmt.Println(answer.StatusCode)

	// Output:
	// 401
}

// Every process of a receiver may do this beside its server, until ctx ends.
func ExamplePrune() {
	forget := func(ctx context.Context, pool *pgxpool.Pool) {
		daily := time.NewTicker(24 * time.Hour)
		defer daily.Stop()
		for {
			pruned, err := consumer.Prune(ctx, pool, consumer.PruneConfig{
				Receiver:  "logistics",
				Retention: 90 * 24 * time.Hour, // a relay may send an event again for 30 days
			})
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				slog.Error("prune processed events", "error", err) // the next run tries again
			default:
				slog.Info("pruned processed events", "removed", pruned.Removed, "remembers_since", pruned.RemembersSince)
			}
			select {
			case <-daily.C:
			case <-ctx.Done():
				return
			}
		}
	}
	_ = forget // go forget(ctx, pool)
}

const exampleSecret = receivertest.SecretText

// exampleDatabase starts a migrated database with a table of the application's own. An example has
// no testing.T to report to: it panics.
func exampleDatabase(table string) (pool *pgxpool.Pool, stop func()) {
	ctx := context.Background()
	server, err := localpg.Start(ctx, localpg.Options{})
	must(err)
	db, err := sql.Open("pgx", server.DSN("postgres"))
	must(err)
	must(migrations.Up(ctx, db, migrations.Inbox))
	_, err = db.ExecContext(ctx, table)
	must(err)
	must(db.Close())
	pool, err = pgxpool.New(ctx, server.DSN("postgres"))
	must(err)
	return pool, func() {
		pool.Close()
		must(server.Stop())
	}
}

// exampleDelivery is what a relay does.
func exampleDelivery(url, key, payload string) *http.Response {
	event := consumer.Event{IdempotencyKey: key, Type: "invoice.created", RelatedReference: "INV-7", Payload: []byte(payload)}
	r, err := consumertest.NewRequest(context.Background(), url, event, exampleSecret)
	must(err)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(r)
	must(err)
	must(response.Body.Close())
	return response
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
