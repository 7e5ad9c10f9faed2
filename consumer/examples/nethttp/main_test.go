package main

import (
	"testing"

	"github.com/outbox-relay/outbox-relay/consumer/examples/internal/exampletest"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

func TestTakesEffectOnce(t *testing.T) {
	t.Parallel()
	exampletest.Start(t, exampletest.Invoices).TakesEffectOnce("/webhooks/finance")
}

func TestOtherEvents(t *testing.T) {
	t.Parallel()
	e := exampletest.Start(t, exampletest.Invoices)
	for _, c := range []struct {
		eventType, key string
		status         int
		state          string // of what is remembered; empty: nothing
	}{
		{"invoice.paid", "k1", 204, "ignored"},
		{"order.created", "k2", 422, ""},
	} {
		if answer := e.Deliver("/webhooks/finance", c.eventType, c.key, exampletest.Invoice("INV-1", "1")); answer.Status != c.status {
			t.Errorf("%s: answered %d %q, want %d", c.eventType, answer.Status, answer.Body, c.status)
		}
		n := e.Count("SELECT count(*) FROM processed_events WHERE idempotency_key = $1 AND processing_state = $2", c.key, c.state)
		if all := e.Count("SELECT count(*) FROM processed_events WHERE idempotency_key = $1", c.key); all != n || (n == 1) != (c.state != "") {
			t.Errorf("%s: remembered %d times, %d of them as %q", c.eventType, all, n, c.state)
		}
	}
	if n := e.Count("SELECT count(*) FROM shipments"); n != 0 {
		t.Errorf("%d shipments of other events", n)
	}
}
