package claim

import (
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// A laneClaim is the part of a claim that one lane asks for.
type laneClaim struct {
	lane    *lane.Lane
	request Request
}

// laneClaims returns what to claim in this turn. A lane takes part if its last claim left
// something, if one of its ordering keys is ready or, when it is time to scan, if it has room.
func (c *Rows) laneClaims(now time.Time, scan bool) []laneClaim {
	lanes := c.Lanes.Visited()
	parts := c.Lanes.Divide(c.MaxInFlight(), nil)
	claims := make([]laneClaim, 0, len(lanes))
	for _, l := range lanes {
		l.ReportState(now, c.LaneChanged)
		l.SetShare(parts, l.IsActive())
		if request := c.newRequest(l, now, scan); len(request.Scans)+len(request.Keys) > 0 {
			claims = append(claims, laneClaim{l, request})
			l.RecordClaim(now)
		}
	}
	return claims
}

// newRequest returns what to claim for one lane: without scans and keys, nothing.
func (c *Rows) newRequest(l *lane.Lane, now time.Time, scan bool) (request Request) {
	since, due := l.TakeDue(now)
	if due {
		l.RescanSince(since.Add(-time.Millisecond))
	}
	scan = scan || due || l.ScanOverdue
	if at := l.EarliestClaim(now, c.Lease); !at.IsZero() {
		l.ScanOverdue = scan
		c.Agenda.At(agenda.CauseRate, at)
		return Request{}
	}
	free, worthwhile := l.Room(now, c.Lease)
	if !worthwhile && max(free[lane.Live], free[lane.Backlog], free[lane.Replays]) > 0 { // what is in flight may hang
		c.Agenda.At(agenda.CauseLittleRoom, now.Add(lane.MinPace))
	}
	keys, crowded := l.TakeReady(free)
	keys = slices.DeleteFunc(keys, func(k lane.ReadyKey) bool {
		return now.Before(c.damaged.keys[ordering.Key{Destination: l.Name, Key: k.Key}].again)
	})
	for class := range free {
		if crowded[class] {
			free[class] = 0
		}
	}
	l.ScanOverdue = scan && free[lane.Live] <= 0
	to := l.Current().Destination
	request = Request{
		Destination: l.Name, Keys: keys, skipFailed: to.OnFailure == policy.SkipFailed, Promise: to.Retry.NotAfter, reordered: l.Reordered,
	}
	longest, followers := l.RunBounds(c.Lease)
	request.Run = min(longest, 1+followers/max(1, len(keys)))
	for i := range keys {
		keys[i].Floor = c.floors.LookUp(ordering.Key{Destination: l.Name, Key: keys[i].Key}, l.Reordered, request.skipFailed).Event
	}
	request.Scans = c.newScans(l, now, free, scan, worthwhile)
	return request
}

// newScans returns which parts of a lane's due deliveries to read. Live ones are read from the
// position of the last claim, or from the overlap before it; the backlog ends where they begin.
func (c *Rows) newScans(l *lane.Lane, now time.Time, free [lane.Classes]int, scanLive, worthwhile bool) (scans []lane.Scan) {
	window := lane.Keyset{At: c.Clock.Now().Add(-lane.LiveWindow)}
	w := &l.Cursors[lane.Live]
	after := w.Position
	if !w.More && after != (lane.Keyset{}) {
		after = lane.Keyset{At: after.At.Add(-lane.Overlap)}
	}
	if after.Compare(window) < 0 {
		if after != (lane.Keyset{}) && w.More { // live deliveries that were not reached in time have become backlog
			l.Cursors[lane.Backlog].Due = time.Time{}
		}
		after = window
	}
	// Deliveries that are claimed by their key take no room from these: keys that always continue
	// would leave none.
	if free[lane.Live] > 0 && (scanLive || w.More && worthwhile) {
		scans = append(scans, w.Scan(lane.Live, now, free[lane.Live], after, lane.Keyset{}))
	}
	if l.RescanFrom != (lane.Keyset{}) && free[lane.Backlog] > 0 {
		scans = append(scans, lane.Scan{Class: lane.Backlog, Free: free[lane.Backlog], After: l.RescanFrom, Until: after, Rescan: true})
		free[lane.Backlog] = 0 // the cursor continues with the next claim
	}
	for _, class := range []lane.Class{lane.Backlog, lane.Replays} {
		w := &l.Cursors[class]
		until := lane.Keyset{}
		if class == lane.Backlog {
			until = after
		}
		switch {
		case free[class] <= 0 || !worthwhile:
		case w.IsDue(now):
			scans = append(scans, w.Scan(class, now, free[class], w.Position, until))
		case w.More || w.FoundNothing: // its last claim may have failed
			c.Agenda.At(agenda.CauseCursor, w.Due)
		}
	}
	return c.deferShared(now, c.deferDamaged(l, scans))
}

// deferShared leaves out shared scans until it is time to try again. A relay that claims without
// the lock keeps them. See docs/decisions/0065-one-claim-at-the-front.md.
func (c *Rows) deferShared(now time.Time, scans []lane.Scan) []lane.Scan {
	if c.contention.Alone(now) {
		for i := range scans {
			scans[i].Alone = true
		}
		return scans
	}
	return slices.DeleteFunc(scans, func(s lane.Scan) bool {
		early := s.Shared && now.Before(c.contention.Next)
		if early {
			c.Agenda.At(agenda.CauseContention, c.contention.Next)
		}
		return early
	})
}
