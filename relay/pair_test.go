package relay

import (
	"net/http"
	"sync"
	"testing"

	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// Without faults, two relays and five thousand events are five thousand requests. The receiver answers none of them
// before more are in flight than one relay may have: until then, the quicker relay could deliver all before the other
// one has looked.
func TestTwoRelaysShareTheWork(t *testing.T) {
	t.Parallel()
	const events = 5000
	db := newDatabase(t)
	var inFlight sync.WaitGroup
	inFlight.Add(post.DefaultLaneInFlight + 1)
	arrived := make(chan struct{}, post.DefaultLaneInFlight+1)
	rc := newReceiver(t, func(w http.ResponseWriter, _ request) {
		select {
		case arrived <- struct{}{}:
			inFlight.Done()
		default:
		}
		inFlight.Wait()
		w.WriteHeader(http.StatusNoContent)
	})
	cfg := db.config(to(rc.URL))
	a, b := start(t, cfg), start(t, cfg)
	a.instance()
	b.instance()
	for i := range 10 {
		db.insert(events/10, "part-"+string(rune('a'+i)))
	}
	becomes(db, 0, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending'`)
	if n := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND attempts = 1 AND rescues = 0`); n != events {
		t.Errorf("%d of %d were claimed once and delivered at the first attempt", n, events)
	}
	if n := len(counted(rc.keys())); rc.total() != events || n != events {
		t.Errorf("%d requests for %d keys", rc.total(), n)
	}
	for _, r := range []*running{a, b} {
		if n := sees(r.observer, func(o *observer) int { return o.outcomes[policy.Delivered] }); n == 0 {
			t.Errorf("one relay did all the work")
		}
		if sees(r.observer, func(o *observer) int { return o.stale + len(o.rescued) + len(o.failures) }) != 0 {
			t.Errorf("stale %d, rescued %v, failed %v", r.stale, r.rescued, r.failures)
		}
	}
}
