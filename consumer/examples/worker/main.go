// Command worker answers as soon as an event is recorded, and records the shipment later: what
// comes in is kept however long the work takes or fails. Any number of processes may run it at one
// database.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/examples/internal/server"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
)

func main() { os.Exit(server.Main(run)) }

func run(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	router := consumer.NewRouter()
	consumer.HandleJSON(router, "invoice.created", 1, ship)
	invoices, err := inbox.New(pool, inbox.Config{
		Config: consumer.Config{
			Receiver: "logistics",
			Source:   "finance",
			Secrets:  []string{os.Getenv("FINANCE_SECRET")},
		},
		Handle:  traced(router.Dispatch), // or router.Dispatch alone
		Workers: 2,
	})
	if err != nil {
		return err
	}

	// The workers continue until the last request has been answered, and then finish what they have
	// begun. Should they end before, there is no point in taking more.
	working, finish := context.WithCancel(context.WithoutCancel(ctx))
	serving, stop := context.WithCancel(ctx)
	var worked error
	var workers sync.WaitGroup
	workers.Go(func() {
		defer stop()
		worked = invoices.Run(working)
	})
	workers.Go(func() { forget(ctx, pool) })

	mux := http.NewServeMux()
	mux.Handle("POST /webhooks/finance", invoices.Handler())
	served := server.Run(serving, mux)
	finish()
	workers.Wait()
	return errors.Join(served, worked)
}

// forget removes, once a day, what has been remembered for long enough. It may run in every
// process.
func forget(ctx context.Context, pool *pgxpool.Pool) {
	daily := time.NewTicker(24 * time.Hour)
	defer daily.Stop()
	for {
		forgotten, err := consumer.Prune(ctx, pool, consumer.PruneConfig{Receiver: "logistics", Retention: 90 * 24 * time.Hour})
		if err != nil {
			slog.Warn("cannot prune processed events", "error", err) // the next run continues
		}
		slog.Info("pruned processed events", "removed", forgotten.Removed, "remembers_since", forgotten.RemembersSince)
		select {
		case <-daily.C:
		case <-ctx.Done():
			return
		}
	}
}

// traced continues the trace of the transaction that wrote the event.
func traced(handle consumer.Handler[pgx.Tx]) consumer.Handler[pgx.Tx] {
	return func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		carrier := propagation.MapCarrier{"traceparent": event.TraceParent, "tracestate": event.TraceState}
		ctx = propagation.TraceContext{}.Extract(ctx, carrier)
		ctx, span := otel.Tracer("shipping").Start(ctx, event.Type, trace.WithSpanKind(trace.SpanKindConsumer))
		defer span.End()
		return handle(ctx, tx, event)
	}
}

// invoice is the payload of invoice.created, version 1.
type invoice struct {
	Number string `json:"invoice"`
	Total  string `json:"total"`
}

func ship(ctx context.Context, tx pgx.Tx, _ consumer.Event, payload invoice) error {
	_, err := tx.Exec(ctx,
		"INSERT INTO shipments (invoice, total) VALUES ($1, $2)", payload.Number, payload.Total)
	if err != nil {
		return fmt.Errorf("record shipment: %w", err) // rolled back, and tried again after 5 s, 30 s, 5 min, …
	}
	return nil // committed, with the event's state
}
