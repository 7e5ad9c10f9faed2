package relay

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// When many lanes find work at once, they share max_in_flight from the first claim on. If each
// counted itself as the only busy one, 50 lanes would start 50 times as many requests, connections
// and goroutines.
func TestLanesShareTheRelaysCapacityFromTheFirstClaim(t *testing.T) {
	t.Parallel()
	const count, capacity, each = 20, 40, 30
	g := relaytest.NewGate(t)
	rc := relaytest.NewReceiver(t, func(_ http.ResponseWriter, r relaytest.Request) { g.Pass(r) })
	names := make([]string, count)
	destinations := make([]post.Destination, count)
	for i := range count {
		names[i] = fmt.Sprint("d", i)
		destinations[i] = named(names[i], to(rc.URL))
	}
	db := relaytest.Covered(t, names...)
	db.Insert(each, "key")
	cfg := config(db, destinations...)
	cfg.MaxInFlight = capacity
	r := start(t, cfg)
	relaytest.Eventually(t, "deliveries in every lane", func() bool {
		for _, l := range r.laneList() {
			if l.InFlight() == 0 {
				return false
			}
		}
		return true
	})
	if n := rc.Total(); n > capacity {
		t.Errorf("%d requests at once, with max_in_flight %d", n, capacity)
	}
	g.Open()
	r.settles(t, policy.Delivered, count*each)
}
