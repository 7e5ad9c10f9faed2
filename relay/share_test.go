package relay

import (
	"fmt"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// When many lanes find work at once, they share max_in_flight from the first claim on. If each counted itself as the only busy
// one, 50 lanes would start 50 times as many requests, connections and goroutines.
func TestLanesShareTheRelaysCapacityFromTheFirstClaim(t *testing.T) {
	t.Parallel()
	const count, capacity, each = 20, 40, 30
	g, rc := relaytest.NewGated(t)
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
	g.Open()
	r.settles(t, policy.Delivered, count*each)
}

// A claim for many lanes brings a few deliveries of each. While a lane's scan takes all that it looks at, it does not read a
// hundred others beyond its room.
func TestScanThatTakesAllLooksAtLittleMore(t *testing.T) {
	t.Parallel()
	r := prepared(t, config(relaytest.Covered(t), to("http://receiver.test/")))
	c, l := r.newClaimer(), r.lane("default")
	c.clock.set(time.Now())
	now := c.clock.now()
	free := [classes]int{live: 4, backlog: 4}
	l.cursors[backlog].due = now.Add(-time.Second)
	for _, step := range []struct {
		found int // of a scan that looked at 5
		want  int32
	}{
		{5, 4 + scanExtra}, // the first scan looks for whatever there is
		{4, 4 + 1},         // the one before took all
		{5, 4 + scanExtra}, // the one before met what it could not take
	} {
		scans := c.rows.newScans(l, now, free, true, true)
		if len(scans) != 2 || scans[0].maxCandidates() != step.want || scans[1].maxCandidates() != step.want {
			t.Fatalf("after %d of 5: scans %+v", step.found, scans)
		}
		result := claimResult{at: now}
		for i := range scans {
			result.scans = append(result.scans, scanResult{last: keyset{at: now, id: 1}, more: true, candidates: 5})
			result.deliveries = append(result.deliveries, make([]delivery, step.found)...)
			for j := range step.found {
				result.deliveries[len(result.deliveries)-1-j].scan = i + 1
			}
		}
		c.rows.applyResult([]laneClaim{{l, claimRequest{destination: l.name, scans: scans}}}, result, time.Millisecond)
	}
}
