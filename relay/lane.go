package relay

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/breaker"
	"github.com/outbox-relay/outbox-relay/internal/relay/capacity"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
)

// A lane is the deliveries of one destination on their way through this relay. The claimer owns its fields; what it shares
// with others is outgoing.
type lane struct {
	name string
	outgoing
	atWork     atomic.Bool // see lanes; of few, all are
	restsSince time.Time
	stopped    bool // its cursors do not begin again before a search finds something

	cursors     [classes]cursor
	rescanFrom  keyset // from where to read once more; zero: nowhere
	scanOverdue bool   // a scan was due when this lane could claim nothing
	// reordered is how often deliveries of earlier events had become pending again, as the last claim found it.
	reordered          int64
	reported           LaneState // to the hook
	checkedAt          time.Time // when it was last compared with reported
	breakerLockedUntil time.Time // when to write the breaker again, after another session had locked its row
}

func newLane(e *post.Endpoint) *lane {
	d := e.Destination
	return &lane{name: d.Name, outgoing: outgoing{
		Endpoint: e, share: d.MaxInFlight, flow: capacity.New(d.MaxInFlight, d.RateLimit), breaker: policy.Breaker{Policy: d.Breaker},
	}}
}

// inFlight returns how many deliveries the lane holds.
func (l *lane) inFlight() (n int) {
	for _, held := range l.held() {
		n += held
	}
	return n
}

// isActive reports whether the lane holds something, or its last claim has left something.
func (l *lane) isActive() bool { return l.cursors[live].more || l.cursors[backlog].more || l.busy() }

// reportState calls the hook if the lane's state has changed, at most once a second.
func (l *lane) reportState(now time.Time, hook func(LaneState)) {
	if hook == nil || now.Sub(l.checkedAt) < time.Second {
		return
	}
	l.checkedAt = now
	if s := l.state(); s != l.reported {
		l.reported = s
		hook(s)
	}
}

// isAtRest reports whether a turn of the claimer would find nothing to do for the lane.
func (l *lane) isAtRest(now time.Time) bool {
	return !l.scanOverdue && l.hasScannedAll(now) && !slices.ContainsFunc(l.cursors[:], func(w cursor) bool { return w.foundNothing }) && l.holdsNothing()
}

// restartScans makes the next claim begin at the front of backlog and replays. A cursor that has found nothing to send so far goes
// on to its end first, and then begins again: if each call began it again, it would never come to its end.
func (l *lane) restartScans() {
	l.stopped = false
	for _, c := range []class{backlog, replays} {
		if w := &l.cursors[c]; w.foundNothing && w.more {
			w.restarts = true
		} else {
			w.rest(time.Time{})
		}
	}
}

// stopScans leaves backlog and replays alone until a search finds something.
func (l *lane) stopScans(now time.Time) {
	l.stopped = true
	l.cursors[backlog].rest(now.Add(untilFound))
	l.cursors[replays].rest(now.Add(untilFound))
}

// rescanSince makes the next claim read once more what became due since the given time of the database, beside the cursors.
func (l *lane) rescanSince(since time.Time) {
	if l.rescanFrom == (keyset{}) || since.Before(l.rescanFrom.at) {
		l.rescanFrom = keyset{at: since}
	}
}

// advanceRescan moves past what a claim has read.
func (l *lane) advanceRescan(result scanResult) {
	l.rescanFrom = keyset{}
	if result.more {
		l.rescanFrom = result.last
	}
}

// hasScannedAll reports whether all that is due has been read.
func (l *lane) hasScannedAll(now time.Time) bool {
	return !slices.ContainsFunc(l.cursors[:], func(w cursor) bool { return w.more }) && l.rescanFrom == (keyset{}) &&
		!l.cursors[backlog].isDue(now) && !l.cursors[replays].isDue(now) && !l.hasReady()
}

// endTrial closes a breaker in trial whose lane has nothing more to send and of which something was accepted.
func (l *lane) endTrial(now time.Time) (ended bool) {
	if l.busy() || !l.hasScannedAll(now) {
		return false
	}
	l.changeBreaker(func(b *policy.Breaker) {
		if ended = b.State == policy.BreakerHalfOpen && b.Accepted; ended {
			b.Close(now)
		}
	})
	return ended
}

// View returns what the breaker's keeper needs to know of the lane.
func (l *lane) View(now time.Time) breaker.View {
	v := breaker.View{Destination: l.name}
	v.Breaker, v.Hold, v.UntilTurn = l.breakerAt(now)
	if v.Breaker.State == policy.BreakerHalfOpen {
		v.Busy, v.Scanned = l.busy(), l.hasScannedAll(now)
	}
	return v
}

func (l *lane) Change(change func(*policy.Breaker)) { l.changeBreaker(change) }

// Rescan makes claims read what was held.
func (l *lane) Rescan(probe bool) {
	if !probe {
		l.restartScans()
		return
	}
	for i := range l.cursors { // each probe continues behind the one before it, then at the front: another delivery may pass
		w := &l.cursors[i]
		w.due, w.restarts = time.Time{}, w.position != (keyset{})
	}
}

// settleKey counts a delivery with an ordering key that was settled.
func (l *lane) settleKey(s *settle.Settlement, frees, blocks bool) {
	switch key := s.OrderingKey; {
	case key == nil:
	case s.Spilled && !s.InHand.Scheduled.IsZero():
		l.endArrival(*key)
	case s.Spilled:
		l.endSpill(*key)
	default:
		l.keySettled(*key, class(s.Class), frees, s.InHand != nil && blocks)
	}
}

// LaneState is what one relay lets one destination have.
type LaneState struct {
	Destination string
	// Concurrency is how many requests there may be at once: as many as are configured, less what the receiver was found
	// not to bear, or what slow start allows after an outage. 0 while the breaker is open.
	Concurrency int
	// RateLimit is how many requests there may be in a second, configured or found. 0: any number.
	RateLimit float64
	// Breaker is closed, open or half_open. A relay calls open also what another relay tries.
	Breaker string
}
