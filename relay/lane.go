package relay

import (
	"slices"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/capacity"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
)

// A lane is the deliveries of one destination on their way through this relay. The claimer owns its fields; what it shares
// with others is outgoing.
type lane struct {
	name string
	outgoing

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

// isActive reports whether the lane holds something, or its last claim has left something.
func (l *lane) isActive() bool { return l.cursors[live].more || l.cursors[backlog].more || l.busy() }

// reportState calls the hook if the lane's state has changed, at most once a second.
func (l *lane) reportState(now time.Time, hook func(LaneState)) {
	if now.Sub(l.checkedAt) < time.Second {
		return
	}
	l.checkedAt = now
	if s := l.state(); s != l.reported {
		l.reported = s
		hook(s)
	}
}

// restartScans makes the next claim begin at the front of backlog and replays. A cursor that has found nothing to send so far goes
// on to its end first, and then begins again: if each call began it again, it would never come to its end.
func (l *lane) restartScans() {
	for _, c := range []class{backlog, replays} {
		if w := &l.cursors[c]; w.foundNothing && w.more {
			w.restarts = true
		} else {
			w.rest(time.Time{})
		}
	}
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

// lanes are those of a relay. They are safe for concurrent use.
type lanes struct {
	mu     sync.Mutex
	byName map[string]*lane // also those that were removed: something of them may be in flight
	active []*lane          // replaced, never changed
}

func (ls *lanes) add(l *lane) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.byName == nil {
		ls.byName = map[string]*lane{}
	}
	ls.byName[l.name] = l
	ls.active = append(slices.Clone(ls.active), l)
}

// get returns the lane of a destination, also of one that was removed; nil: this relay never served it.
func (ls *lanes) get(name string) *lane {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return ls.byName[name]
}

// list returns the lanes of all configured destinations. The caller must not change it.
func (ls *lanes) list() []*lane {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return ls.active
}

// endpoints returns where the deliveries of all lanes go.
func (ls *lanes) endpoints() (all []*post.Endpoint) {
	for _, l := range ls.list() {
		all = append(all, l.current())
	}
	return all
}

// rangeSize returns how many events to take: as many as each lane that sends quickly has room for.
func (ls *lanes) rangeSize(now time.Time, lease time.Duration) int {
	size := maxRangeEvents
	for _, l := range ls.list() {
		if room, fast := l.fastRoom(now, lease); fast {
			size = min(size, room)
		}
	}
	return size
}

// applyStates applies the states of destinations that a beat read, which began at the given time. A destination that is not
// among them has a closed breaker and no evidence against it. It reports whether a breaker has opened or closed.
func (ls *lanes) applyStates(began, now time.Time, states []policy.DestinationState, instance int32) (changed bool) {
	for _, l := range ls.list() {
		state := policy.DestinationState{Destination: l.name, Breaker: "closed"}
		if i := slices.IndexFunc(states, func(s policy.DestinationState) bool { return s.Destination == l.name }); i >= 0 {
			state = states[i]
		}
		_, hold, _ := l.breakerAt(now)
		l.changeBreaker(func(b *policy.Breaker) {
			if state.Remaining > b.Implausible(hold) {
				state.Remaining = 0
			}
			before := b.State
			b.ApplyState(began, now, state, instance)
			changed = changed || b.State != before
		})
	}
	return changed
}

// divide divides the relay's capacity. A lane for which something was brought is active, too.
func (ls *lanes) divide(requests int, brought map[string][]delivery) capacity.Division {
	var sharers []capacity.Sharer
	for _, l := range ls.list() {
		sharers = append(sharers, l.sharer(len(brought[l.name]) > 0 || l.isActive()))
	}
	return capacity.Divide(requests, sharers)
}
