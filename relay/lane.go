package relay

import (
	"slices"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// A lane is the deliveries of one destination on their way through this relay: queues that the claimer fills and senders
// empty. Senders exist only while there is something to send.
type lane struct {
	name string

	// Owned by the claimer; see position.go.
	walks [classes]walk
	back  keyset    // from where to look once more; zero: nowhere
	asked time.Time // when the last claim was made
	owed  bool      // a look was due when nothing could be claimed
	// reordered is how often deliveries of earlier events had become pending again, as the last claim found it.
	reordered int64
	shown     LaneState // to the hook
	seen      time.Time // when that was
	tend      time.Time // when to look at the breaker again, after another session had locked its row

	mu sync.Mutex
	*post.Endpoint
	queues  [classes]queue
	senders int
	share   int // of the relay's capacity
	flow    policy.Flow
	breaker policy.Breaker
	keys    orderingKeys
	perPost time.Duration // how long a delivery takes a sender, as a moving average; 0: unknown
	settled int           // since the rate was last measured
	rate    policy.Throughput
	// gone is set by a 410, until something is claimed again although the destination was paused: it was resumed.
	gone     bool
	pausedAt time.Time // when the pause was in the database; zero: it is not
	removed  bool      // from the configuration
}

// A class is one of three kinds of deliveries that share a lane fairly.
type class int

const (
	live    class = iota // became due within liveWindow
	backlog              // became due before: what waited for its destination, and late commits
	replays              // made pending again by an operator
	classes = 3
)

// liveWindow is how long after it became due a delivery goes before the backlog.
const liveWindow = 10 * time.Second

// weights are the shares of a lane that its classes get while all three have something to send. None starves.
var weights = [classes]int{live: 8, backlog: 3, replays: 1}

// A queue holds the runs of one class. A run is what is sent in sequence: one delivery or, of an ordering key, several.
type queue struct {
	runs   [][]delivery
	head   int
	credit int // grows by the weight while others are served
	taken  int // claimed and not yet settled: queued, being sent, or waiting for the settler
	behind int // of those, in runs: they wait for the one before them, and for no sender
}

func (q *queue) empty() bool { return q.head == len(q.runs) }

func (q *queue) push(run []delivery) {
	if q.head > len(q.runs)/2 { // moved to the front, so that a queue that never runs empty does not grow
		waiting := copy(q.runs, q.runs[q.head:])
		clear(q.runs[waiting:])
		q.runs, q.head = q.runs[:waiting], 0
	}
	q.runs = append(q.runs, run)
	q.taken += len(run)
	q.behind += len(run) - 1
}

func (q *queue) pop() []delivery {
	run := q.runs[q.head]
	q.runs[q.head] = nil // release the payloads
	q.head++
	return run
}

// Bounds of how much a lane holds, in deliveries.
const (
	maxTaken   = 2000
	minPace    = 20 * time.Millisecond  // between two claims for less than a worthwhile batch
	fillAhead  = 200 * time.Millisecond // of sending at the measured rate
	sendMargin = 2 * time.Second        // of the lease, to settle in after a POST that took its whole timeout
	maxRun     = 16                     // of one ordering key, sent in sequence
	maxBehind  = 2000                   // in runs, of all ordering keys
)

// newLane returns the lane of an endpoint.
func newLane(e *post.Endpoint) *lane {
	d := e.Destination
	return &lane{
		name: d.Name, Endpoint: e, share: d.MaxInFlight,
		flow: policy.NewFlow(d.MaxInFlight, d.RateLimit), breaker: policy.Breaker{Policy: d.Breaker},
	}
}

// limit is how many senders the lane may have.
func (l *lane) limit() int {
	limit := min(l.share, l.flow.Concurrency())
	if trying, allowed := l.breaker.Trying(); trying {
		limit = min(limit, allowed)
	}
	return limit
}

// state returns what the lane may have now.
func (l *lane) state() LaneState {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := LaneState{Destination: l.name, Concurrency: l.limit(), RateLimit: l.flow.Paced(), Breaker: l.breaker.State.String()}
	if l.breaker.Holding() {
		s.Concurrency = 0
	}
	return s
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

// room returns how many deliveries of each class a claim may bring, and whether that is worth a claim now. A class never
// holds more than the lane sends within a fraction of the lease: what waits longer would be given back unsent.
func (l *lane) room(now time.Time, lease time.Duration) (free [classes]int, worthwhile bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.removed || l.gone && l.pausedAt.IsZero() || l.breaker.Holding() {
		return free, false // what a claim brought now would be given back, and claimed again
	}
	limit := l.limit()
	target := limit
	perSecond, known := l.rate.Measure(now, l.settled)
	l.settled = 0
	trying, _ := l.breaker.Trying()
	ahead := l.ahead(lease)
	switch {
	case trying:
		// Nothing ahead: what is claimed now may have to be given back.
	case known:
		target += max(0, min(maxTaken-limit, int(perSecond*min(fillAhead, ahead).Seconds())))
		// One at least, or a lane of one sender would be out of live deliveries whenever it has sent one.
		if target == limit && l.perPost < ahead && (l.flow.Paced() == 0 || l.flow.Paced()*ahead.Seconds() > 1) {
			target++
		}
	case l.flow.Paced() == 0:
		target *= 2
	}
	most := 0
	for c := range free {
		free[c] = max(target-(l.queues[c].taken-l.queues[c].behind), 0)
		most = max(most, free[c])
	}
	return free, most > 0 && (most >= target/4 || now.Sub(l.asked) >= minPace)
}

// ahead is how long something claimed may wait before it is sent: half of what the lease leaves.
func (l *lane) ahead(lease time.Duration) time.Duration {
	return (lease - l.Destination.Timeout - sendMargin) / 2
}

// early returns when the next claim makes sense: when the receiver has asked to wait until then, or when a claim made now
// would wait away its lease for the lane's rate. Zero: now.
func (l *lane) early(now time.Time, lease time.Duration) (until time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Before(l.flow.Reopens) {
		return l.flow.Reopens
	}
	if wait := l.flow.Turn(now) - l.ahead(lease); wait > 0 && !l.breaker.Holding() {
		return now.Add(wait)
	}
	return time.Time{}
}

// push queues claimed runs of one class and returns how many senders to start for them.
func (l *lane) push(now time.Time, c class, runs [][]delivery) (start int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.pausedAt.IsZero() && l.asked.After(l.pausedAt) { // a claim that was under way before tells nothing
		l.gone, l.pausedAt = false, time.Time{}
	}
	for _, run := range runs {
		l.queues[c].push(run)
		if key := run[0].event.OrderingKey; key != nil && c == replays {
			l.keys.markReplayed(*key, true)
		}
	}
	waiting := 0
	for i := range l.queues {
		waiting += len(l.queues[i].runs) - l.queues[i].head
	}
	start = max(min(l.limit()-l.senders, waiting), 0)
	l.senders += start
	return start
}

// next hands one run to a sender, or tells it to wait for the destination's rate. Without either the sender ends.
func (l *lane) next(now time.Time) (run []delivery, wait time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c, waits := l.turn()
	if !waits || l.senders > l.limit() && !l.breaker.Holding() {
		l.senders--
		return nil, 0
	}
	// What is not sent needs no turn.
	if head := &l.queues[c].runs[l.queues[c].head][0]; !l.breaker.Holding() && !l.gone && !l.removed && !l.tooLate(head, now) {
		if wait := l.flow.Wait(now); wait > 0 {
			return nil, wait
		}
	}
	for i := range l.queues {
		if !l.queues[i].empty() {
			l.queues[i].credit += weights[i]
			l.queues[c].credit -= weights[i]
		}
	}
	return l.queues[c].pop(), 0
}

// grow reports whether to start one more sender: the lane may have it, and something waits for one. The caller starts it.
func (l *lane) grow() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, waiting := l.turn(); !waiting || l.breaker.Holding() || l.senders >= l.limit() {
		return false
	}
	l.senders++
	return true
}

// tooLate reports whether too little is left of a delivery's lease for a POST that begins at the given time.
func (l *lane) tooLate(d *delivery, at time.Time) bool {
	return d.leaseEnds.Sub(at) < l.Destination.Timeout+sendMargin
}

// turn returns the class whose turn it is, by smooth weighted round robin over those that have something to send.
func (l *lane) turn() (c class, waits bool) {
	for i := range l.queues {
		q := &l.queues[i]
		if q.empty() {
			q.credit = 0
			continue
		}
		if !waits || q.credit+weights[i] > l.queues[c].credit+weights[c] {
			c, waits = class(i), true
		}
	}
	return c, waits
}

// unsent empties the queues.
func (l *lane) unsent() (waiting []delivery) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.queues {
		for q := &l.queues[i]; !q.empty(); {
			run := q.pop()
			q.behind -= len(run) - 1
			waiting = append(waiting, run...)
		}
	}
	return waiting
}

// setShare changes how many senders the lane may have at most; those beyond it end with their current run.
func (l *lane) setShare(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.share = n
}

// busy reports whether the lane holds anything.
func (l *lane) busy() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.queues {
		if l.queues[i].taken > 0 {
			return true
		}
	}
	return false
}

// pause keeps what is queued from being sent. It returns false if something else has done so before.
func (l *lane) pause() (first bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	first, l.gone = !l.gone, true
	return first
}

// pauseWritten lets the lane claim again: the database decides now whether there is anything to claim.
func (l *lane) pauseWritten() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		l.pausedAt = time.Now()
	}
}

// stopped returns why nothing may be sent now; empty: it may.
func (l *lane) stopped() policy.Reason {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.removed:
		return policy.ReasonRemoved
	case l.gone:
		return policy.ReasonPaused
	case l.breaker.Holding():
		return policy.ReasonBreaker
	}
	return ""
}

// took counts deliveries that were claimed and are given back without having been queued.
func (l *lane) took(c class, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queues[c].taken += n
}

// release makes room for n settled deliveries of a class again.
func (l *lane) release(c class, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queues[c].taken -= n
	l.settled += n
}

// current returns the endpoint that the next request goes to.
func (l *lane) current() *post.Endpoint {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Endpoint
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
