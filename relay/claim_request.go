package relay

import (
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// A laneClaim is the part of a claim that one lane asks for.
type laneClaim struct {
	lane    *lane
	request claimRequest
}

// laneClaims returns what to claim in this turn. A lane takes part if its last claim left something, if one of its ordering keys
// is ready or, when it is time to scan, if it has room.
func (c *rows) laneClaims(now time.Time, scan bool) []laneClaim {
	lanes := c.lanes.visited()
	parts := c.lanes.divide(c.maxInFlight(), nil)
	claims := make([]laneClaim, 0, len(lanes))
	for _, l := range lanes {
		l.reportState(now, c.laneChanged)
		l.setShare(parts, l.isActive())
		if request := c.newRequest(l, now, scan); len(request.scans)+len(request.keys) > 0 {
			claims = append(claims, laneClaim{l, request})
			l.recordClaim(now)
		}
	}
	return claims
}

// newRequest returns what to claim for one lane: without scans and keys, nothing.
func (c *rows) newRequest(l *lane, now time.Time, scan bool) (request claimRequest) {
	since, due := l.takeDue()
	if due {
		l.rescanSince(since.Add(-time.Millisecond))
	}
	scan = scan || due || l.scanOverdue
	if at := l.earliestClaim(now, c.lease); !at.IsZero() {
		l.scanOverdue = scan
		c.agenda.At(agenda.CauseRate, at)
		return claimRequest{}
	}
	free, worthwhile := l.room(now, c.lease)
	if !worthwhile && max(free[live], free[backlog], free[replays]) > 0 { // what is in flight may hang
		c.agenda.At(agenda.CauseLittleRoom, now.Add(minPace))
	}
	keys, crowded := l.takeReady(free)
	for class := range free {
		if crowded[class] {
			free[class] = 0
		}
	}
	l.scanOverdue = scan && free[live] <= 0
	to := l.current().Destination
	request = claimRequest{
		destination: l.name, keys: keys, skipFailed: to.OnFailure == policy.SkipFailed, promise: to.Retry.NotAfter, reordered: l.reordered,
	}
	longest, followers := l.runBounds(c.lease)
	request.run = min(longest, 1+followers/max(1, len(keys)))
	for i := range keys {
		keys[i].floor = c.floors.LookUp(ordering.Key{Destination: l.name, Key: keys[i].key}, l.reordered, request.skipFailed).Event
	}
	request.scans = c.newScans(l, now, free, scan, worthwhile)
	return request
}

// newScans returns which parts of a lane's due deliveries to read. Live ones are read from the position of the last claim, or
// from the overlap before it; the backlog ends where they begin.
func (c *rows) newScans(l *lane, now time.Time, free [classes]int, scanLive, worthwhile bool) (scans []scan) {
	window := keyset{at: c.clock.Now().Add(-liveWindow)}
	w := &l.cursors[live]
	after := w.position
	if !w.more && after != (keyset{}) {
		after = keyset{at: after.at.Add(-overlap)}
	}
	if after.compare(window) < 0 {
		if after != (keyset{}) && w.more { // live deliveries that were not reached in time have become backlog
			l.cursors[backlog].due = time.Time{}
		}
		after = window
	}
	// Deliveries that are claimed by their key take no room from these: keys that always go on would leave none.
	if free[live] > 0 && (scanLive || w.more && worthwhile) {
		scans = append(scans, w.scan(live, now, free[live], after, keyset{}))
	}
	if l.rescanFrom != (keyset{}) && free[backlog] > 0 {
		scans = append(scans, scan{class: backlog, free: free[backlog], after: l.rescanFrom, until: after, rescan: true})
		free[backlog] = 0 // the cursor continues with the next claim
	}
	for _, class := range []class{backlog, replays} {
		w := &l.cursors[class]
		until := keyset{}
		if class == backlog {
			until = after
		}
		switch {
		case free[class] <= 0 || !worthwhile:
		case w.isDue(now):
			scans = append(scans, w.scan(class, now, free[class], w.position, until))
		case w.more || w.foundNothing: // its last claim may have failed
			c.agenda.At(agenda.CauseCursor, w.due)
		}
	}
	return c.deferShared(now, scans)
}

// deferShared leaves out shared scans until it is time to try again. A relay that claims without the lock keeps them.
// See docs/decisions/0065-one-claim-at-the-front.md.
func (c *rows) deferShared(now time.Time, scans []scan) []scan {
	if c.contention.Alone(now) {
		for i := range scans {
			scans[i].alone = true
		}
		return scans
	}
	return slices.DeleteFunc(scans, func(s scan) bool {
		early := s.shared && now.Before(c.contention.Next)
		if early {
			c.agenda.At(agenda.CauseContention, c.contention.Next)
		}
		return early
	})
}
