package relay

import (
	"slices"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// A lane is the deliveries of one destination on their way through this relay. The claimer owns its fields; what it shares
// with others is outgoing.
type lane struct {
	name string
	outgoing

	walks    [classes]walk
	back     keyset // from where to look once more; zero: nowhere
	lookOwed bool   // a look for new work was due when this lane could claim nothing
	// reordered is how often deliveries of earlier events had become pending again, as the last claim found it.
	reordered          int64
	reported           LaneState // to the hook
	checkedAt          time.Time // when it was last compared with reported
	breakerLockedUntil time.Time // when to write the breaker again, after another session had locked its row
}

func newLane(e *post.Endpoint) *lane {
	d := e.Destination
	return &lane{name: d.Name, outgoing: outgoing{
		Endpoint: e, share: d.MaxInFlight, flow: policy.NewFlow(d.MaxInFlight, d.RateLimit), breaker: policy.Breaker{Policy: d.Breaker},
	}}
}

// isActive reports whether the lane holds something, or its last claim has left something.
func (l *lane) isActive() bool { return l.walks[live].more || l.walks[backlog].more || l.busy() }

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

// walkNow makes the next claim begin at the front of backlog and replays. A walk that has found nothing to send so far goes on
// to its end first, and then begins again: if each call began it anew, it would never come to its end.
func (l *lane) walkNow() {
	for _, c := range []class{backlog, replays} {
		if w := &l.walks[c]; w.barren && w.more {
			w.again = true
		} else {
			w.rest(time.Time{})
		}
	}
}

// lookBack makes the next claim look once at everything that became due since the given time of the database, beside the walks.
func (l *lane) lookBack(since time.Time) {
	if l.back == (keyset{}) || since.Before(l.back.at) {
		l.back = keyset{at: since}
	}
}

// advanceLookBack moves past what a claim has looked at.
func (l *lane) advanceLookBack(result scanResult) {
	l.back = keyset{}
	if result.more {
		l.back = result.last
	}
}

// hasWalkedAll reports whether all that is due has been looked at.
func (l *lane) hasWalkedAll(now time.Time) bool {
	return !slices.ContainsFunc(l.walks[:], func(w walk) bool { return w.more }) && l.back == (keyset{}) &&
		!l.walks[backlog].isDue(now) && !l.walks[replays].isDue(now) && !l.hasReady()
}

// endTrial closes a breaker in trial whose lane has nothing more to send and of which something was accepted.
func (l *lane) endTrial(now time.Time) (ended bool) {
	if l.busy() || !l.hasWalkedAll(now) {
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

// get returns the lane of a destination that something was claimed for.
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

// busy reports whether any lane holds anything.
func (ls *lanes) busy() bool {
	return slices.ContainsFunc(ls.list(), func(l *lane) bool { return l.busy() })
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
func (ls *lanes) divide(capacity int, brought map[string][]delivery) policy.Division {
	var sharers []policy.Sharer
	for _, l := range ls.list() {
		sharers = append(sharers, l.sharer(len(brought[l.name]) > 0 || l.isActive()))
	}
	return policy.Divide(capacity, sharers)
}
