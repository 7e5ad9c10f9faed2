package relay

import (
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// A claimRequest is what a claim wants for one destination.
type claimRequest struct {
	destination string
	scans       []scan
	keys        []readyKey
	run         int           // how many deliveries of one ordering key may come together; 0: one
	skipFailed  bool          // a failed delivery does not block its ordering key
	promise     time.Duration // from now until when a delivery that is claimed for the first time may be sent
	reordered   int64         // of the destination, when the floors of the keys were learnt
}

// A scan is the part of the due deliveries of one class that a claim reads.
type scan struct {
	class class
	free  int    // how many deliveries without an ordering key it may bring
	after keyset // zero: from the very front
	until keyset // zero: to the end
	back  bool   // it looks once at what the walk of its class has passed
	clear bool   // the scan before it could take all that it looked at

	// shared: other relays claim here, too. The scan passes what they have in flight. Unless alone is set, it reads nothing while
	// another relay makes such a claim.
	shared, alone bool
}

// A readyKey is an ordering key whose next delivery may be claimed.
type readyKey struct {
	key   string
	class class // of what was found waiting
	floor int64 // every delivery of the key up to this event is settled; see floors
}

const (
	scanExtra  = 100          // deliveries that a scan may look at beyond its room, since some have an ordering key or are in flight
	scanPasses = 3 * maxTaken // deliveries in flight that a shared scan may pass: what three other relays hold at most
)

// looks returns how many free deliveries a scan may look at. The one beyond its room shows whether there are more. A clear scan reads
// no further: with 50 destinations a scan brings some ten, and a hundred more would cost the server several times as much.
func (s *scan) looks() int32 {
	if s.clear {
		return int32(s.free + 1)
	}
	return int32(s.free + scanExtra)
}

// reads returns how many deliveries a scan may read, those in flight included.
func (s *scan) reads() int32 {
	if s.shared {
		return s.looks() + scanPasses
	}
	return s.looks()
}

// A laneClaim is the part of a claim that one lane asks for.
type laneClaim struct {
	lane    *lane
	request claimRequest
}

// laneClaims returns what to claim in this turn. A lane takes part if its last claim left something, if one of its ordering keys
// is ready or, when it is time to look for new work, if it has room.
func (c *claimer) laneClaims(now time.Time) []laneClaim {
	lanes := c.lanes.list()
	parts := c.lanes.divide(c.config().MaxInFlight, nil)
	claims := make([]laneClaim, 0, len(lanes))
	for _, l := range lanes {
		if c.config().Hooks.LaneChanged != nil {
			l.reportState(now, c.config().Hooks.LaneChanged)
		}
		l.setShare(parts, l.isActive())
		if request := c.newRequest(l, now, c.pace.Looking(now)); len(request.scans)+len(request.keys) > 0 {
			claims = append(claims, laneClaim{l, request})
			l.recordClaim(now)
		}
	}
	return claims
}

// newRequest returns what to claim for one lane: without scans and keys, nothing.
func (c *claimer) newRequest(l *lane, now time.Time, looking bool) (request claimRequest) {
	looking = looking || l.lookOwed
	if at := l.earliestClaim(now, c.config().Lease); !at.IsZero() {
		l.lookOwed = looking
		c.plan(at)
		return claimRequest{}
	}
	free, worthwhile := l.room(now, c.config().Lease)
	if !worthwhile && max(free[live], free[backlog], free[replays]) > 0 { // what is in flight may hang
		c.plan(now.Add(minPace))
	}
	keys, crowded := l.takeReady(free)
	for class := range free {
		if crowded[class] {
			free[class] = 0
		}
	}
	l.lookOwed = looking && free[live] <= 0
	to := l.current().Destination
	request = claimRequest{
		destination: l.name, keys: keys, skipFailed: to.OnFailure == policy.SkipFailed, promise: to.Retry.NotAfter, reordered: l.reordered,
	}
	longest, followers := l.runBounds(c.config().Lease)
	request.run = min(longest, 1+followers/max(1, len(keys)))
	for i := range keys {
		keys[i].floor = c.floors.LookUp(policy.OrderingKey{Destination: l.name, Key: keys[i].key}, l.reordered, request.skipFailed).Event
	}
	request.scans = c.newScans(l, now, free, looking, worthwhile)
	return request
}

// newScans returns which parts of a lane's due deliveries to read. Live ones are read from the position of the last claim, or
// from the overlap before it; the backlog ends where they begin.
func (c *claimer) newScans(l *lane, now time.Time, free [classes]int, looking, worthwhile bool) (scans []scan) {
	window := keyset{at: c.clock.now().Add(-liveWindow)}
	w := &l.walks[live]
	after := w.position
	if !w.more && after != (keyset{}) {
		after = keyset{at: after.at.Add(-policy.Overlap)}
	}
	if after.compare(window) < 0 {
		if after != (keyset{}) && w.more { // live deliveries that were not reached in time have become backlog
			l.walks[backlog].due = time.Time{}
		}
		after = window
	}
	// Deliveries that are claimed by their key take no room from these: keys that always go on would leave none.
	if free[live] > 0 && (looking || w.more && worthwhile) {
		scans = append(scans, w.scan(live, now, free[live], after, keyset{}))
	}
	if l.back != (keyset{}) && free[backlog] > 0 {
		scans = append(scans, scan{class: backlog, free: free[backlog], after: l.back, until: after, back: true})
		free[backlog] = 0 // the walk goes on with the next claim
	}
	for _, class := range []class{backlog, replays} {
		w := &l.walks[class]
		until := keyset{}
		if class == backlog {
			until = after
		}
		switch {
		case free[class] <= 0 || !worthwhile:
		case w.wanted(now):
			scans = append(scans, w.scan(class, now, free[class], w.position, until))
		case w.more:
			c.plan(w.due)
		}
	}
	return c.shareFront(now, scans)
}

// shareFront leaves out shared scans until it is time to try again. A relay that claims without the lock keeps them.
// See docs/decisions/0065-one-claim-at-the-front.md.
func (c *claimer) shareFront(now time.Time, scans []scan) []scan {
	if c.front.Alone(now) {
		for i := range scans {
			scans[i].alone = true
		}
		return scans
	}
	return slices.DeleteFunc(scans, func(s scan) bool {
		early := s.shared && now.Before(c.front.Next)
		if early {
			c.plan(c.front.Next)
		}
		return early
	})
}
