package relay

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/claim"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// A stranger who holds the lock of the front keeps no relay from delivering what lies behind what
// another one has in flight.
func TestStrangerHoldsTheFront(t *testing.T) {
	t.Parallel()
	const events, inFlight = 3000, 100
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	db.Locker(`SELECT pg_advisory_xact_lock(427020085613 # 'outbox_delivery'::regclass::oid::bigint)`)
	db.Insert(events, "key")
	s, other := registered(db)
	result, err := s.Claim(t.Context(), other, time.Hour, []claim.Request{{Destination: "default", Scans: []lane.Scan{{Free: inFlight}}}})
	relaytest.Must(t, err)
	if len(result.Deliveries) != inFlight {
		t.Fatalf("the other relay claimed %d", len(result.Deliveries))
	}
	start(t, config(db, to(rc.URL)))
	relaytest.Becomes(db, true, `SELECT count(*) >= $1 FROM outbox_delivery WHERE status = 'delivered'`, events-inFlight)
}
