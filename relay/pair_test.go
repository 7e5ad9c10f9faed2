package relay

import (
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// Without faults, two relays make one request an event. The quicker relay may deliver all of them
// before the other one has looked, so there are more events until both have had some.
func TestTwoRelaysShareTheWork(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	cfg := config(db, to(rc.URL))
	both := []*running{start(t, cfg), start(t, cfg)}
	both[0].relayID()
	both[1].relayID()
	events := 0
	insert := func() {
		events += 500
		db.Insert(500, "part-"+strconv.Itoa(events))
	}
	for range testsize.Of(10, 3) {
		insert()
	}
	const isPending = `SELECT count(*) FROM outbox_delivery WHERE status = 'pending'`
	relaytest.Becomes(db, 0, isPending)
	for until := time.Now().Add(relaytest.Patience); time.Now().Before(until) && slices.ContainsFunc(both, deliveredNone); {
		insert()
		relaytest.Becomes(db, 0, isPending)
	}
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND attempts = 1 AND rescues = 0`); n != events {
		t.Errorf("%d of %d were claimed once and delivered at the first attempt", n, events)
	}
	if n := len(counted(rc.Keys())); rc.Total() != events || n != events {
		t.Errorf("%d requests for %d keys", rc.Total(), n)
	}
	for _, r := range both {
		if deliveredNone(r) {
			t.Errorf("one relay did all the work")
		}
		if sees(r.observer, func(o *observer) int { return o.stale + len(o.rescued) + len(o.failures) }) != 0 {
			t.Errorf("stale %d, rescued %v, failed %v", r.stale, r.rescued, r.failures)
		}
	}
}

func deliveredNone(r *running) bool {
	return sees(r.observer, func(o *observer) int { return o.outcomes[policy.Delivered] }) == 0
}
