package relay

import (
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/policy"
)

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
		if now := c.clock.now(); policy.Passes(w.whole, after.at, now) {
			l.lookBack(w.whole.Add(-policy.Overlap))
			w.whole = now
		}
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
		case w.isDue(now):
			scans = append(scans, w.scan(class, now, free[class], w.position, until))
		case w.more || w.barren: // its last claim may have failed
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
