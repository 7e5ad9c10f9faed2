package relay

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// When many lanes find work at once, they share max_in_flight from the first claim on. If each counted itself as the only busy
// one, 50 lanes would start 50 times as many requests, connections and goroutines.
func TestLanesShareTheRelaysCapacityFromTheFirstClaim(t *testing.T) {
	t.Parallel()
	const count, capacity, each = 20, 40, 30
	g := newGate(t)
	rc := newReceiver(t, func(_ http.ResponseWriter, r request) { g.pass(r) })
	names := make([]string, count)
	destinations := make([]post.Destination, count)
	for i := range count {
		names[i] = fmt.Sprint("d", i)
		destinations[i] = named(names[i], to(rc.URL))
	}
	db := newDatabase(t, names...)
	db.insert(each, "key")
	cfg := db.config(destinations...)
	cfg.MaxInFlight = capacity
	r := start(t, cfg)
	eventually(t, "deliveries in every lane", func() bool {
		for _, l := range r.laneList() {
			if l.inFlight() == 0 {
				return false
			}
		}
		return true
	})
	senders := 0
	for _, l := range r.laneList() {
		l.mu.Lock()
		senders += l.senders
		l.mu.Unlock()
	}
	if senders > capacity {
		t.Errorf("%d senders at once, with max_in_flight %d", senders, capacity)
	}
	g.open()
	r.settles(t, policy.Delivered, count*each)
}
