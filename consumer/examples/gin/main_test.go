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

func TestPassesDrill(t *testing.T) {
	t.Parallel()
	exampletest.Start(t, exampletest.Invoices).PassesDrill("/webhooks/finance")
}
