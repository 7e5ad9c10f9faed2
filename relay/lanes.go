package relay

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/capacity"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
)

// fewLanes is up to how many lanes the claimer visits all of them in each turn.
const fewLanes = 100

// untilFound is when the cursors of a lane at rest begin again by themselves: never.
const untilFound = 365 * 24 * time.Hour

// lanes are those of a relay. They are safe for concurrent use.
//
// Of many lanes, a turn of the claimer visits those at work. A lane begins to work when it gets something, and when a search of the
// database finds that it may claim something. It rests when a turn would find nothing to do for it.
type lanes struct {
	mu      sync.Mutex
	byName  map[string]*lane // also those that were removed: something of them may be in flight
	active  []*lane          // replaced, never changed
	working []*lane          // of many
	parts   capacity.Division
	promise time.Duration // the shortest of all
}

func (ls *lanes) add(l *lane) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.byName == nil {
		ls.byName = map[string]*lane{}
	}
	ls.byName[l.name] = l
	ls.setActive(append(slices.Clone(ls.active), l))
}

// setActive replaces the lanes. The caller holds mu.
func (ls *lanes) setActive(active []*lane) {
	ls.active, ls.promise = active, 0
	for _, l := range active {
		if p := l.current().Destination.Retry.NotAfter; ls.promise == 0 || p < ls.promise {
			ls.promise = p
		}
	}
	isActive := make(map[*lane]bool, len(active))
	for _, l := range active {
		isActive[l] = true
	}
	ls.working = slices.DeleteFunc(ls.working, func(l *lane) bool {
		if !isActive[l] {
			l.atWork.Store(false)
		}
		return !isActive[l]
	})
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

// areMany reports whether most of the lanes rest.
func (ls *lanes) areMany() bool { return len(ls.list()) > fewLanes }

// visited returns the lanes that a turn of the claimer looks after. The caller must not change it.
func (ls *lanes) visited() []*lane {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if len(ls.active) <= fewLanes {
		return ls.active
	}
	return slices.Clone(ls.working)
}

// engage makes a lane work: its state has changed, so that the next turn must visit it. It reports whether the lane rested.
func (ls *lanes) engage(l *lane) (rested bool) {
	if l.atWork.Load() {
		return false
	}
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if len(ls.active) <= fewLanes || l.atWork.Swap(true) {
		return false
	}
	ls.working = append(ls.working, l)
	l.setShare(ls.parts, false)
	return true
}

// dismiss lets those rest that need no visit. Their cursors begin again when a search finds something.
func (ls *lanes) dismiss(now time.Time, hook func(LaneState)) {
	if !ls.areMany() {
		return
	}
	var resting []*lane
	for _, l := range ls.visited() {
		if l.isAtRest(now) {
			resting = append(resting, l)
		}
	}
	if len(resting) == 0 {
		return
	}
	for _, l := range resting {
		l.checkedAt = time.Time{}
		l.reportState(now, hook)
		l.cursors[backlog].rest(now.Add(untilFound))
		l.cursors[replays].rest(now.Add(untilFound))
	}
	ls.mu.Lock()
	for _, l := range resting {
		l.atWork.Store(false)
	}
	ls.working = slices.DeleteFunc(ls.working, func(l *lane) bool { return !l.atWork.Load() })
	ls.mu.Unlock()
	for _, l := range resting {
		if !l.isAtRest(now) { // it got something meanwhile, and was still taken for one at work
			ls.engage(l)
		}
	}
}

// searchRest is how many times as long as it took a search rests, and searchRestMost the longest rest.
const (
	searchRest     = 10
	searchRestMost = 30 * time.Second
)

// searchDue makes those of many lanes work for which something is due.
func (c *claimer) searchDue(ctx context.Context, instance int32) error {
	begun := time.Now()
	if begun.Before(c.searchAt) {
		c.agenda.At(agenda.CauseScan, c.searchAt)
		return nil
	}
	found, err := c.store.searchDue(ctx, instance)
	if err != nil {
		return err
	}
	took := time.Since(begun)
	c.searchAt = begun.Add(took + min(searchRest*took, searchRestMost))
	for _, name := range found {
		if l := c.lanes.get(name); l != nil && c.lanes.engage(l) {
			l.restartScans()
		}
	}
	return nil
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
	for _, l := range ls.visited() {
		if room, fast := l.fastRoom(now, lease); fast {
			size = min(size, room)
		}
	}
	return size
}

// applyStates applies the states of destinations that a beat read, which began at the given time. A destination that is not
// among them has a closed breaker and no evidence against it. It reports whether a breaker has opened or closed.
func (ls *lanes) applyStates(began, now time.Time, states []policy.DestinationState, instance int32) (changed bool) {
	byName := make(map[string]policy.DestinationState, len(states))
	for _, s := range states {
		byName[s.Destination] = s
	}
	for _, l := range ls.list() {
		state, known := byName[l.name]
		if !known {
			state = policy.DestinationState{Destination: l.name, Breaker: "closed"}
		}
		_, hold, _ := l.breakerAt(now)
		l.changeBreaker(func(b *policy.Breaker) {
			if state.Remaining > b.Implausible(hold) {
				state.Remaining = 0
			}
			before := b.State
			b.ApplyState(began, now, state, instance)
			changed = changed || b.State != before
			known = known || b.State != before
		})
		if known {
			ls.engage(l)
		}
	}
	return changed
}

// divide divides the relay's capacity. A lane for which something was brought is active, too.
func (ls *lanes) divide(requests int, brought map[string][]delivery) capacity.Division {
	var sharers []capacity.Sharer
	for _, l := range ls.visited() {
		sharers = append(sharers, l.sharer(len(brought[l.name]) > 0 || l.isActive()))
	}
	parts := capacity.Divide(requests, sharers)
	ls.mu.Lock()
	ls.parts = parts
	ls.mu.Unlock()
	return parts
}

// shortestPromise returns the shortest X-Outbox-Not-After that a lane promises.
func (ls *lanes) shortestPromise() time.Duration {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return ls.promise
}
