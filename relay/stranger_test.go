package relay

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// A stranger who holds the lock of the front keeps no relay from delivering what lies behind what another one has in flight.
func TestStrangerHoldsTheFront(t *testing.T) {
	t.Parallel()
	const events, inFlight = 3000, 100
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	holdFront(db)
	db.Insert(events, "key")
	s, other := registered(db)
	result, err := s.claim(t.Context(), other, time.Hour, []claimRequest{{destination: "default", scans: []scan{{free: inFlight}}}})
	relaytest.Must(t, err)
	if len(result.deliveries) != inFlight {
		t.Fatalf("the other relay claimed %d", len(result.deliveries))
	}
	start(t, config(db, to(rc.URL)))
	relaytest.Becomes(db, true, `SELECT count(*) >= $1 FROM outbox_delivery WHERE status = 'delivered'`, events-inFlight)
}
