package relay

import (
	"time"

	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// A claimResult is what a claim found.
type claimResult struct {
	at         time.Time // the database's
	deliveries []delivery
	scans      []scanResult  // of all scans of all requests, in their order
	heads      []keyHead     // of keys that were asked for and brought nothing
	reordered  map[int]int64 // by the index of a request, where it differs
	frontTaken bool          // another session held the front's lock, so that shared scans have read nothing
}

// A scanResult says how far a scan came.
type scanResult struct {
	last keyset // the last delivery it looked at; zero: there was none
	more bool   // there may be due deliveries behind last
	keys []foundKey

	looked  int  // free deliveries within its room that it looked at
	passed  int  // deliveries in flight that it passed
	unkeyed int  // how many of looked have no ordering key
	unread  bool // nothing was read: the scan was put off, or another session held the front's lock
}

// A foundKey is an ordering key of which a scan saw a delivery that waits, the earliest one it saw.
type foundKey struct {
	key     string
	eventID int64
}

// A keyHead is where the unsettled deliveries of an ordering key begin.
type keyHead struct {
	request int
	key     string
	eventID int64
}

// countWork counts the claimed deliveries that are no probes. A probe does not end idleness.
func (c *claimer) countWork(claimed []delivery) (n int) {
	var l *lane
	probe := false
	for i := range claimed {
		if d := &claimed[i]; l == nil || l.name != d.destination {
			l = c.lanes.get(d.destination)
			probe = l.state().Breaker != policy.BreakerClosed.String()
		}
		if !probe {
			n++
		}
	}
	return n
}

// applyResult moves the lanes past what a claim has read. It reports whether any ordering key can be claimed at once.
func (c *claimer) applyResult(claims []laneClaim, result claimResult, took time.Duration) (ready bool) {
	if result.frontTaken {
		c.front.Record(time.Now(), true)
		c.plan(c.front.Next)
	}
	for i, claim := range claims {
		if reordered, changed := result.reordered[i]; changed {
			claim.lane.reordered = reordered
		}
	}
	c.rememberFloors(claims, result) // before noteKeys: a key of which a scan saw an earlier event loses its floor again
	brought := result.broughtByScan()
	n := 0
	for _, claim := range claims {
		for _, s := range claim.request.scans {
			read := result.scans[n]
			unblocked := c.noteKeys(claim, s.class, read.keys)
			c.advanceWalk(claim.lane, s, read, brought[n], unblocked, result.at, took)
			n++
		}
		ready = ready || claim.lane.hasReady()
	}
	return ready
}

// broughtByScan returns how many deliveries each scan brought.
func (r *claimResult) broughtByScan() []int {
	brought := make([]int, len(r.scans))
	for i := range r.deliveries {
		if d := &r.deliveries[i]; d.scan > 0 {
			brought[d.scan-1]++
		}
	}
	return brought
}

// noteKeys makes the ordering keys ready that a scan has seen, and counts those that are not known to be blocked.
func (c *claimer) noteKeys(claim laneClaim, class class, keys []foundKey) (unblocked int) {
	l := claim.lane
	for _, found := range keys {
		key := policy.OrderingKey{Destination: l.name, Key: found.key}
		if !c.floors.LookUp(key, l.reordered, claim.request.skipFailed).Blocked {
			unblocked++
		}
		c.floors.Forget(key, found.eventID)
		l.makeReady(found.key, class)
	}
	return unblocked
}

// advanceWalk moves the walk of a lane past what its scan s has read, which brought so many deliveries. Blocked keys do not count as
// found, or a walk through them would never rest.
func (c *claimer) advanceWalk(l *lane, s scan, read scanResult, brought, unblocked int, at time.Time, took time.Duration) {
	if s.shared && !read.unread {
		c.front.Record(time.Now(), false)
	}
	w := &l.walks[s.class]
	if s.back {
		l.lookedBack(read)
	} else if !read.unread {
		// A little less than the poll interval, so that a walk that comes with each safety tick does not miss every other one.
		rest := policy.Rest{Least: c.config().PollInterval * 9 / 10, Times: c.restTimes}
		w.advance(s.class, read, brought+unblocked, at, took, rest)
		w.clear = brought > 0 && brought == read.looked
		if read.more && (read.passed > 0 || read.unkeyed > brought) { // other relays claim here
			w.shared = time.Now().Add(policy.SharedFor)
		}
	}
	// No settlement wakes the claimer for these: the requests may hang, or the deliveries are another relay's.
	if read.more || w.pause > 0 {
		c.plan(time.Now().Add(max(took, w.pause)))
	}
}

// rememberFloors remembers where the unsettled deliveries of each ordering key begin: at the head that the claim brought,
// or at the one that it found and could not claim.
func (c *claimer) rememberFloors(claims []laneClaim, result claimResult) {
	index := map[string]int{}
	for i := range claims {
		index[claims[i].lane.name] = i
	}
	remember := func(request int, key string, head int64, blocked bool) {
		claim := claims[request]
		c.floors.Set(policy.OrderingKey{Destination: claim.lane.name, Key: key},
			policy.Floor{Event: min(head-1, c.writers.Closed), Reordered: claim.lane.reordered, SkipFailed: claim.request.skipFailed, Blocked: blocked})
	}
	for _, head := range result.heads {
		remember(head.request, head.key, head.eventID, true)
	}
	for i := range result.deliveries {
		if d := &result.deliveries[i]; d.scan == 0 && d.after == 0 && d.event.OrderingKey != nil {
			remember(index[d.destination], *d.event.OrderingKey, d.eventID, false)
		}
	}
}

// handOut gives each lane what was claimed for it, and starts senders for it.
func (c *claimer) handOut(claims []laneClaim, result claimResult) {
	byLane := byDestination(result.deliveries)
	window := result.at.Add(-liveWindow)
	parts := c.lanes.divide(c.config().MaxInFlight, byLane)
	for _, claim := range claims {
		deliveries, brought := byLane[claim.lane.name]
		if !brought {
			if claim.lane.endTrial(time.Now()) {
				signal(c.wake.room)
			}
			continue
		}
		if c.config().Hooks.Claimed != nil {
			c.config().Hooks.Claimed(claim.lane.name, len(deliveries))
		}
		claim.lane.setShare(parts, true) // before it starts senders: all lanes together may have MaxInFlight
		c.push(claim, deliveries, window)
	}
}

// push queues the claimed deliveries of a lane, each run in the class of its most urgent delivery: a live delivery would otherwise
// wait among the replays for those that precede it in its key.
func (c *claimer) push(claim laneClaim, deliveries []delivery, window time.Time) {
	l := claim.lane
	keyClass := make(map[string]class, len(claim.request.keys))
	for _, key := range claim.request.keys {
		keyClass[key.key] = key.class
	}
	all, broken := runs(deliveries)
	for _, d := range broken { // before anything is sent: the end of a run makes its key ready, and these must be free then
		l.countTaken(d.class, 1)
		l.countClaimed(*d.event.OrderingKey, 1)
		c.settler.settle(held(d, policy.ReasonOrder))
	}
	var byClass [classes][][]delivery
	for _, run := range all {
		class := replays
		for i := range run {
			class = min(class, run[i].classAt(window))
		}
		if key := run[0].event.OrderingKey; key != nil {
			l.countClaimed(*key, len(run))
			if class == replays {
				class = keyClass[*key]
			}
		}
		for i := range run {
			run[i].class = class
		}
		byClass[class] = append(byClass[class], run)
	}
	for i, runs := range byClass {
		for range l.push(time.Now(), class(i), runs) {
			c.senders.start(l)
		}
	}
}
