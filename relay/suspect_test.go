package relay

import (
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/claim"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// Relays die one after the other, of something else, while they hold the same deliveries. None of
// these is failed.
func TestDyingRelaysConvictNoDelivery(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(20, "key")
	for range 30 {
		s, relayID := registered(db)
		result, err := s.Claim(t.Context(), relayID, time.Minute, []claim.Request{{Destination: "default", Promise: policy.DefaultNotAfter, Scans: []lane.Scan{{Free: 20}}}})
		relaytest.Must(t, err)
		if len(result.Deliveries) != 20 {
			t.Fatalf("%d claimed", len(result.Deliveries))
		}
		db.Exec(session.RescueRelay, relayID)
	}
	rc := relaytest.NewReceiver(t, nil)
	r := start(t, config(db, to(rc.URL)))
	r.await(t, "suspects that wait", func(o *observer) bool { return o.reasons[policy.ReasonSuspect] >= 20 })
	testkit.Equal(t, "wait for their next claim", relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE attempts = 0 AND next_attempt_at > now()`), 20)
	relaytest.Eventually(t, "their delivery", func() bool {
		db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() WHERE status = 'pending' AND claimed_by IS NULL`)
		r.mailbox.post(agenda.CauseSweep)
		return relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND rescues = 0 AND attempts = 1`) == 20
	})
}

// A suspect is sent with nothing beside it, and what was sent so is known if the relay dies of it.
func TestSuspectIsSentAlone(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	g := relaytest.NewGate(t)
	counts := make(chan int, 1)
	var atOnce atomic.Int32
	rc := relaytest.NewReceiver(t, func(_ http.ResponseWriter, r relaytest.Request) {
		n := atOnce.Add(1)
		defer atOnce.Add(-1)
		if r.Key == "suspect-1" {
			testkit.Equal(t, "sent as one of", n, 1)
			counts <- relaytest.Row[int](db, `SELECT rescues FROM outbox_delivery WHERE rescues > 0`)
			return
		}
		g.Pass(r)
	})
	r := start(t, config(db, to(rc.URL)))
	db.Insert(5, "other")
	for range 5 {
		<-g.Arrived
	}
	db.Exec(`BEGIN; INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', 'suspect-1');
		UPDATE outbox_delivery SET rescues = 6 WHERE event_id = (SELECT id FROM outbox WHERE idempotency_key = 'suspect-1'); COMMIT`)
	relaytest.Becomes(db, 6, `SELECT count(*) FROM outbox_delivery WHERE claimed_by IS NOT NULL`)
	db.Insert(20, "later") // behind the suspect
	relaytest.Becomes(db, 26, `SELECT count(*) FROM outbox_delivery WHERE claimed_by IS NOT NULL`)
	g.Open()
	testkit.Equal(t, "deaths would be known", <-counts, 7)
	r.settles(t, policy.Delivered, 26)
}
