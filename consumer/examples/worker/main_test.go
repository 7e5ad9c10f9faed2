package main

import (
	"context"
	"net/http"
	"strconv"
	"testing"

	"go.opentelemetry.io/otel/trace"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/examples/internal/exampletest"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

const path = "/webhooks/finance"

func TestWorksWhatItHasRecorded(t *testing.T) {
	t.Parallel()
	e := exampletest.Start(t, exampletest.Invoices)
	deliver := func(eventType, key, body string, want int) {
		t.Helper()
		if answer := e.Deliver(path, eventType, key, body); answer.Status != want {
			t.Errorf("%s: answered %d %q, want %d", key, answer.Status, answer.Body, want)
		}
	}
	state := func(key, state string) {
		t.Helper()
		e.Await("SELECT EXISTS (SELECT FROM inbox_events WHERE idempotency_key = $1 AND processing_state = $2)", key, state)
	}

	deliver("invoice.created", "k1", exampletest.Invoice("INV-1", "19.90"), http.StatusAccepted)
	state("k1", "succeeded")
	deliver("invoice.created", "k1", exampletest.Invoice("INV-1", "19.90"), http.StatusOK)
	deliver("invoice.created", "k1", exampletest.Invoice("INV-2", "19.90"), http.StatusUnprocessableEntity)

	deliver("order.created", "k2", `{}`, http.StatusAccepted) // of a type without a handler: for a person to look at
	state("k2", "ignored")
	deliver("invoice.created", "k3", `[]`, http.StatusAccepted) // never well formed
	state("k3", "failed")

	// What fails is tried again once it is due; this test does not wait for that.
	deliver("invoice.created", "k4", exampletest.Invoice("INV-4", "-1"), http.StatusAccepted)
	e.Await("SELECT attempts = 1 AND processing_state = 'pending' AND next_attempt_at > now() FROM inbox_events WHERE idempotency_key = 'k4'")
	if _, err := e.Pool.Exec(t.Context(), "ALTER TABLE shipments DROP CONSTRAINT shipments_total_check"); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Pool.Exec(t.Context(), "UPDATE inbox_events SET next_attempt_at = now() WHERE idempotency_key = 'k4'"); err != nil {
		t.Fatal(err)
	}
	state("k4", "succeeded")

	if n := e.Count("SELECT count(*) FROM shipments"); n != 2 {
		t.Errorf("%d shipments, want those of INV-1 and INV-4", n)
	}
}

func TestAnnouncesWhatItWillForget(t *testing.T) {
	t.Parallel()
	e := exampletest.Start(t, exampletest.Invoices+`;
		INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, received_at, processed_at)
		VALUES ('logistics', 'finance', 'old', 'succeeded', now() - interval '100 days', now() - interval '100 days')`)
	e.Await("SELECT EXISTS (SELECT FROM inbox_forgotten WHERE source = 'finance' AND received_before > now() - interval '91 days')")
}

// A stop in the middle of the work leaves nothing half done, and the next process continues.
func TestStopsInGoodOrder(t *testing.T) {
	t.Parallel()
	e := exampletest.Start(t, exampletest.Invoices)
	const events = 50
	for i := range events {
		number := strconv.Itoa(i)
		if answer := e.Deliver(path, "invoice.created", "k"+number, exampletest.Invoice("INV-"+number, "1")); answer.Status != http.StatusAccepted {
			t.Fatalf("answered %d %q", answer.Status, answer.Body)
		}
	}
	e.Stop()
	if n := e.Count("SELECT count(*) FROM inbox_events WHERE processing_state = 'processing'"); n != 0 {
		t.Errorf("%d events are left in the hands of a worker that is gone", n)
	}
	e.Again()
	e.Await("SELECT count(*) = $1 FROM inbox_events WHERE processing_state = 'succeeded'", events)
	if n := e.Count("SELECT count(*) FROM shipments"); n != events {
		t.Errorf("%d shipments, want %d", n, events)
	}
}

func TestGoesOnWithTheTrace(t *testing.T) {
	t.Parallel()
	const id = "4bf92f3577b34da6a3ce929d0e0e4736"
	for _, c := range []struct{ parent, want string }{
		{"00-" + id + "-00f067aa0ba902b7-01", id},
		{"", "00000000000000000000000000000000"},
		{"what is this", "00000000000000000000000000000000"}, // without a signature
	} {
		var got string
		handle := traced(func(ctx context.Context, _ pgx.Tx, _ consumer.Event) error {
			got = trace.SpanContextFromContext(ctx).TraceID().String()
			return nil
		})
		if err := handle(t.Context(), nil, consumer.Event{Type: "invoice.created", TraceParent: c.parent}); err != nil {
			t.Fatal(err)
		}
		if got != c.want {
			t.Errorf("%q: the handler works in trace %s, want %s", c.parent, got, c.want)
		}
	}
}
