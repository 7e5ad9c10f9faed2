package memory_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
)

func TestSecurityReceiverIsNotHijacked(t *testing.T) {
	receivertest.EachFlavourAlways(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		start := time.Now()
		calls := pgtest.Hijack(t, e.DSN, "..", "../../../migrations/inbox")
		t.Log(time.Since(start))
		receivertest.WantFirst(t, e.Post("first", "{}"), http.StatusCreated, `{"done":"first"}`)
		calls("x")
	})
}
