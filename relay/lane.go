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

	walks [classes]walk
	back  keyset // from where to look once more; zero: nowhere
	owed  bool   // a look was due when nothing could be claimed
	// reordered is how often deliveries of earlier events had become pending again, as the last claim found it.
	reordered int64
	shown     LaneState // to the hook
	seen      time.Time // when that was
	tend      time.Time // when to look at the breaker again, after another session had locked its row
}

// newLane returns the lane of an endpoint.
func newLane(e *post.Endpoint) *lane {
	d := e.Destination
	return &lane{name: d.Name, outgoing: outgoing{
		Endpoint: e, share: d.MaxInFlight, flow: policy.NewFlow(d.MaxInFlight, d.RateLimit), breaker: policy.Breaker{Policy: d.Breaker},
	}}
}

// show tells the hook when what the lane may have has changed.
func (l *lane) show(now time.Time, hook func(LaneState)) {
	if now.Sub(l.seen) < time.Second {
		return
	}
	l.seen = now
	if s := l.state(); s != l.shown {
		l.shown = s
		hook(s)
	}
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
