package lane

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

// Few is up to how many lanes the claimer visits all of them in each turn.
const Few = 100

// untilFound is when the cursors of a lane at rest begin again by themselves: never.
const untilFound = 365 * 24 * time.Hour

// forgetAfter is how long a lane of many rests until it is forgotten.
const forgetAfter = 2 * time.Minute

// Lanes are those of a relay. They are safe for concurrent use.
//
// Few lanes are made with the relay. Of many, a lane is made when it gets something, or when a
// search of the database finds that it may claim something, and forgotten when it has rested for a
// while. A turn of the claimer visits those at work: a lane rests when a turn would find nothing to
// do for it.
type Lanes struct {
	mu           sync.Mutex
	newEndpoint  func(post.Destination) (*post.Endpoint, error)
	destinations []post.Destination // those that are configured
	index        map[string]int     // of each in destinations
	byName       map[string]*Lane   // also those that were removed: something of them may be in flight
	active       []*Lane            // of destinations that are configured; what is in it never changes
	working      []*Lane            // of many
	parts        capacity.Division
	promise      time.Duration // the shortest X-Outbox-Not-After that a destination is promised
	forgotAt     time.Time
}

// New returns no lanes, which make their endpoints by newEndpoint.
func New(newEndpoint func(post.Destination) (*post.Endpoint, error)) *Lanes {
	return &Lanes{newEndpoint: newEndpoint, byName: map[string]*Lane{}}
}

// Set makes the lanes those of the destinations, which have been validated, with the endpoints that
// are new. Few are made at once.
func (ls *Lanes) Set(now time.Time, destinations []post.Destination, endpoints map[string]*post.Endpoint) error {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	ls.destinations, ls.index, ls.promise = destinations, make(map[string]int, len(destinations)), 0
	active := make([]*Lane, 0, min(len(destinations), Few))
	for i, d := range destinations {
		ls.index[d.Name] = i
		if p := d.Retry.NotAfter; ls.promise == 0 || p < ls.promise {
			ls.promise = p
		}
		l, known := ls.byName[d.Name]
		if !known {
			if len(destinations) > Few {
				continue
			}
			var err error
			if l, err = ls.make(d); err != nil {
				return err
			}
		}
		e := endpoints[d.Name]
		if known && e == nil && differs(l.Current().Destination, d) { // it was made meanwhile
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
		if _, kept := ls.index[l.Name]; !kept {
			l.remove()
		}
	}
	ls.active, ls.working = active, nil
	if len(destinations) > Few {
		ls.working = slices.Clone(active)
		for _, l := range active {
			l.atWork.Store(true)
		}
	}
	return nil
}

// differs reports whether requests to the destinations are not made alike. Whether one that follows
// files does cannot be told.
func differs(a, b post.Destination) bool {
	return a.Follows() || b.Follows() || !a.SameEgress(b) || len(a.Differences(b)) > 0
}

// Endpoints makes those of the lanes that a configuration changes.
func (ls *Lanes) Endpoints(destinations []post.Destination) (changed map[string]*post.Endpoint, err error) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	changed = map[string]*post.Endpoint{}
	for _, d := range destinations {
		if l, made := ls.byName[d.Name]; made && (l.IsRemoved() || differs(l.Current().Destination, d)) {
			if changed[d.Name], err = ls.newEndpoint(d); err != nil {
				return nil, err
			}
		}
	}
	return changed, nil
}

// make makes a lane. The caller holds mu.
func (ls *Lanes) make(d post.Destination) (*Lane, error) {
	e, err := ls.newEndpoint(d)
	if err != nil {
		return nil, err
	}
	l := newLane(e)
	ls.byName[d.Name] = l
	return l, nil
}

// Get returns the lane of a destination, also of one that was removed; nil: this relay never served
// it.
func (ls *Lanes) Get(name string) *Lane {
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

// List returns the lanes of configured destinations that have been made. The caller must not change
// it.
func (ls *Lanes) List() []*Lane {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return ls.active
}

// All returns the lanes that have been made, also of destinations that were removed.
func (ls *Lanes) All() []*Lane {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return slices.Collect(maps.Values(ls.byName))
}

// Configured returns how many destinations are configured.
func (ls *Lanes) Configured() int {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return len(ls.destinations)
}

// Names returns the names of the configured destinations.
func (ls *Lanes) Names() []string {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return slices.Collect(maps.Keys(ls.index))
}

// AreMany reports whether lanes are made when they are needed, and rest.
func (ls *Lanes) AreMany() bool { return ls.Configured() > Few }

// Visited returns the lanes that a turn of the claimer looks after. The caller must not change it.
func (ls *Lanes) Visited() []*Lane {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if len(ls.destinations) <= Few {
		return ls.active
	}
	return slices.Clone(ls.working)
}

// Engage makes a lane work: its state has changed, so that the next turn must visit it. What is due
// of one that was forgotten, a search finds.
func (ls *Lanes) Engage(l *Lane) {
	if l.atWork.Load() {
		return
	}
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if len(ls.destinations) <= Few || ls.byName[l.Name] != l || l.atWork.Swap(true) {
		return
	}
	ls.working = append(ls.working, l)
	l.SetShare(ls.parts, false)
}

// Dismiss lets those rest that need no visit. Their cursors begin again when a search finds
// something.
func (ls *Lanes) Dismiss(now time.Time, hook func(State)) {
	if !ls.AreMany() {
		return
	}
	if now.Sub(ls.forgotAt) > forgetAfter/4 {
		ls.forgotAt = now
		ls.forget(now)
	}
	var resting []*Lane
	for _, l := range ls.Visited() {
		if l.isAtRest(now) {
			resting = append(resting, l)
		}
	}
	if len(resting) == 0 {
		return
	}
	for _, l := range resting {
		l.checkedAt = time.Time{}
		l.ReportState(now, hook)
		l.stopScans(now)
	}
	ls.mu.Lock()
	for _, l := range resting {
		l.restsSince = now
		l.atWork.Store(false)
	}
	ls.working = slices.DeleteFunc(ls.working, func(l *Lane) bool { return !l.atWork.Load() })
	ls.mu.Unlock()
	for _, l := range resting {
		if !l.isAtRest(now) { // it got something meanwhile, and was still taken for one at work
			ls.Engage(l)
		}
	}
}

// forget drops the lanes that have rested for long enough, with their connections.
func (ls *Lanes) forget(now time.Time) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	var kept []*Lane
	for _, l := range ls.active {
		if l.atWork.Load() || now.Sub(l.restsSince) < forgetAfter || !l.hasNoMemory(now) {
			kept = append(kept, l)
			continue
		}
		delete(ls.byName, l.Name)
		l.Current().Retire()
	}
	ls.active = kept
}

// Logs returns the endpoints of the destinations that are logs.
func (ls *Lanes) Logs(destinations []post.Destination) (all []*post.Endpoint) {
	for _, d := range destinations {
		if !d.IsLog() {
			continue
		}
		if l := ls.Get(d.Name); l != nil {
			all = append(all, l.Current())
		}
	}
	return all
}

// RangeSize returns how many events to take: as many as each lane that sends quickly has room for,
// and no more than most.
func (ls *Lanes) RangeSize(now time.Time, lease time.Duration, most int) int {
	size := most
	for _, l := range ls.Visited() {
		if room, fast := l.fastRoom(now, lease); fast {
			size = min(size, room)
		}
	}
	return size
}

// ApplyStates applies the states of destinations that a beat read, which began at the given time. A
// destination that is not among them has a closed breaker and no evidence against it. It reports
// whether a breaker has changed, and which are closed now that were not.
func (ls *Lanes) ApplyStates(began, now time.Time, states []policy.DestinationState, relayID int32) (changed bool, closed []string) {
	byName := make(map[string]policy.DestinationState, len(states))
	for _, s := range states {
		if byName[s.Destination] = s; s.Breaker != "closed" {
			ls.Get(s.Destination) // which makes the lane: this relay may have to probe it
		}
	}
	for _, l := range ls.List() {
		state, known := byName[l.Name]
		if !known {
			state = policy.DestinationState{Destination: l.Name, Breaker: "closed"}
		}
		_, hold, _, _ := l.breakerAt(now)
		l.Change(func(b *policy.Breaker) {
			if state.Remaining > b.Implausible(hold) {
				state.Remaining = 0
			}
			before := b.State
			b.ApplyState(began, now, state, relayID)
			changed = changed || b.State != before
			if b.State == policy.BreakerClosed && before != b.State {
				closed = append(closed, l.Name)
			}
			known = b.State != policy.BreakerClosed || b.State != before
		})
		if known {
			ls.Engage(l)
		}
	}
	return changed, closed
}

// Waits returns the destinations that have asked this relay to wait.
func (ls *Lanes) Waits(now time.Time) (names []string) {
	for _, l := range ls.List() {
		if l.waits(now) {
			names = append(names, l.Name)
		}
	}
	return names
}

// Divide divides the relay's capacity. A lane for which something was brought is active, too.
func (ls *Lanes) Divide(requests int, brought map[string][]Delivery) capacity.Division {
	var sharers []capacity.Sharer
	for _, l := range ls.Visited() {
		sharers = append(sharers, l.sharer(len(brought[l.Name]) > 0 || l.IsActive()))
	}
	parts := capacity.Divide(requests, sharers)
	ls.mu.Lock()
	ls.parts = parts
	ls.mu.Unlock()
	return parts
}

// ShortestPromise returns the shortest X-Outbox-Not-After that a lane promises.
func (ls *Lanes) ShortestPromise() time.Duration {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return ls.promise
}

// MakeReady makes an ordering key ready, of which the next delivery may be claimed.
func (ls *Lanes) MakeReady(key ordering.Key, first ordering.Place, class Class) {
	if l := ls.Get(key.Destination); l != nil {
		l.MakeReady(key.Key, first, class)
		ls.Engage(l)
	}
}
