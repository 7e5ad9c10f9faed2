package relay

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/capacity"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
)

// fewLanes is up to how many lanes the claimer visits all of them in each turn.
const fewLanes = 100

// untilFound is when the cursors of a lane at rest begin again by themselves: never.
const untilFound = 365 * 24 * time.Hour

// forgetAfter is how long a lane of many rests until it is forgotten.
const forgetAfter = 2 * time.Minute

// lanes are those of a relay. They are safe for concurrent use.
//
// Few lanes are made with the relay. Of many, a lane is made when it gets something, or when a search of the database finds that it may
// claim something, and forgotten when it has rested for a while. A turn of the claimer visits those at work: a lane rests when a turn
// would find nothing to do for it.
type lanes struct {
	mu           sync.Mutex
	newEndpoint  func(post.Destination) (*post.Endpoint, error)
	destinations []post.Destination // those that are configured
	index        map[string]int     // of each in destinations
	byName       map[string]*lane   // also those that were removed: something of them may be in flight
	active       []*lane            // of destinations that are configured; what is in it never changes
	working      []*lane            // of many
	parts        capacity.Division
	promise      time.Duration // the shortest X-Outbox-Not-After that a destination is promised
	forgotAt     time.Time
}

// newLanes returns no lanes, which make their endpoints by newEndpoint.
func newLanes(newEndpoint func(post.Destination) (*post.Endpoint, error)) *lanes {
	return &lanes{newEndpoint: newEndpoint, byName: map[string]*lane{}}
}

// set makes the lanes those of the destinations, which have been validated, with the endpoints that are new. Few are made at once.
func (ls *lanes) set(now time.Time, destinations []post.Destination, endpoints map[string]*post.Endpoint) error {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	ls.destinations, ls.index, ls.promise = destinations, make(map[string]int, len(destinations)), 0
	active := make([]*lane, 0, min(len(destinations), fewLanes))
	for i, d := range destinations {
		ls.index[d.Name] = i
		if p := d.Retry.NotAfter; ls.promise == 0 || p < ls.promise {
			ls.promise = p
		}
		l, known := ls.byName[d.Name]
		if !known {
			if len(destinations) > fewLanes {
				continue
			}
			var err error
			if l, err = ls.make(d); err != nil {
				return err
			}
		}
		e := endpoints[d.Name]
		if known && e == nil && differs(l.current().Destination, d) { // it was made meanwhile
			var err error
			if e, err = ls.newEndpoint(d); err != nil {
				return err
			}
		}
		if e != nil {
			l.configure(now, e)
		}
		active = append(active, l)
	}
	for _, l := range ls.active {
		l.atWork.Store(false)
		if _, kept := ls.index[l.name]; !kept {
			l.remove()
		}
	}
	ls.active, ls.working = active, nil
	if len(destinations) > fewLanes {
		ls.working = slices.Clone(active)
		for _, l := range active {
			l.atWork.Store(true)
		}
	}
	return nil
}

// differs reports whether requests to the destinations are not made alike. Whether one that follows files does cannot be told.
func differs(a, b post.Destination) bool {
	return a.Follows() || b.Follows() || !a.SameEgress(b) || len(a.Differences(b)) > 0
}

// endpoints makes those of the lanes that a configuration changes.
func (ls *lanes) endpoints(destinations []post.Destination) (changed map[string]*post.Endpoint, err error) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	changed = map[string]*post.Endpoint{}
	for _, d := range destinations {
		if l, made := ls.byName[d.Name]; made && (l.isRemoved() || differs(l.current().Destination, d)) {
			if changed[d.Name], err = ls.newEndpoint(d); err != nil {
				return nil, err
			}
		}
	}
	return changed, nil
}

// make makes a lane. The caller holds mu.
func (ls *lanes) make(d post.Destination) (*lane, error) {
	e, err := ls.newEndpoint(d)
	if err != nil {
		return nil, err
	}
	l := newLane(e)
	ls.byName[d.Name] = l
	return l, nil
}

// get returns the lane of a destination, also of one that was removed; nil: this relay never served it.
func (ls *lanes) get(name string) *lane {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if l, known := ls.byName[name]; known {
		return l
	}
	i, configured := ls.index[name]
	if !configured {
		return nil
	}
	l, err := ls.make(ls.destinations[i])
	if err != nil { // which its validation has excluded
		return nil
	}
	l.restsSince = time.Now()
	l.stopScans(l.restsSince)
	ls.active = append(ls.active, l) // behind what others have of it
	return l
}

// list returns the lanes of configured destinations that have been made. The caller must not change it.
func (ls *lanes) list() []*lane {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return ls.active
}

// all returns the lanes that have been made, also of destinations that were removed.
func (ls *lanes) all() []*lane {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return slices.Collect(maps.Values(ls.byName))
}

// configured returns how many destinations are configured.
func (ls *lanes) configured() int {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return len(ls.destinations)
}

// areMany reports whether lanes are made when they are needed, and rest.
func (ls *lanes) areMany() bool { return ls.configured() > fewLanes }

// visited returns the lanes that a turn of the claimer looks after. The caller must not change it.
func (ls *lanes) visited() []*lane {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if len(ls.destinations) <= fewLanes {
		return ls.active
	}
	return slices.Clone(ls.working)
}

// engage makes a lane work: its state has changed, so that the next turn must visit it. What is due of one that was forgotten, a search finds.
func (ls *lanes) engage(l *lane) {
	if l.atWork.Load() {
		return
	}
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if len(ls.destinations) <= fewLanes || ls.byName[l.name] != l || l.atWork.Swap(true) {
		return
	}
	ls.working = append(ls.working, l)
	l.setShare(ls.parts, false)
}

// dismiss lets those rest that need no visit. Their cursors begin again when a search finds something.
func (ls *lanes) dismiss(now time.Time, hook func(LaneState)) {
	if !ls.areMany() {
		return
	}
	if now.Sub(ls.forgotAt) > forgetAfter/4 {
		ls.forgotAt = now
		ls.forget(now)
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
		l.stopScans(now)
	}
	ls.mu.Lock()
	for _, l := range resting {
		l.restsSince = now
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

// forget drops the lanes that have rested for long enough, with their connections.
func (ls *lanes) forget(now time.Time) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	var kept []*lane
	for _, l := range ls.active {
		if l.atWork.Load() || now.Sub(l.restsSince) < forgetAfter || !l.hasNoMemory(now) {
			kept = append(kept, l)
			continue
		}
		delete(ls.byName, l.name)
		l.current().Retire()
	}
	ls.active = kept
}

// searchRest is how many times as long as it took a search rests, and searchRestMost the longest rest.
const ()

// logs returns the endpoints of the destinations that are logs.
func (ls *lanes) logs(destinations []post.Destination) (all []*post.Endpoint) {
	for _, d := range destinations {
		if !d.IsLog() {
			continue
		}
		if l := ls.get(d.Name); l != nil {
			all = append(all, l.current())
		}
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
		if byName[s.Destination] = s; s.Breaker != "closed" {
			ls.get(s.Destination) // which makes the lane: this relay may have to probe it
		}
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
			known = b.State != policy.BreakerClosed || b.State != before
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

// makeReady makes an ordering key ready, of which the next delivery may be claimed.
func (ls *lanes) makeReady(key ordering.Key, first ordering.Place, class class) {
	if l := ls.get(key.Destination); l != nil {
		l.makeReady(key.Key, first, class)
		ls.engage(l)
	}
}
