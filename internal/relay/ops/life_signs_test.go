package ops_test

import (
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// The health check touches no delivery, so that it costs the same whatever is pending or locked.
func TestLifeSignsTouchNoDelivery(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox_relay (name, version) VALUES ('alive', '')`)
	_, err := db.Begin().Exec(t.Context(), `LOCK TABLE outbox_delivery`)
	relaytest.Must(t, err)
	if relays, err := ops.New(db.Pool).LifeSigns(t.Context()); err != nil || len(relays) != 1 {
		t.Errorf("%+v, %v", relays, err)
	}
}
