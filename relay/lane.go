package relay

import (
	"sync"
	"time"
)

// A lane is the deliveries of one destination on their way through this relay: a queue that the claimer fills and
// senders empty. Senders exist only while there is something to send.
type lane struct {
	*endpoint

	// Owned by the claimer; see position.go.
	position keyset        // where the last claim ended; what lies before it is left to sweeps
	more     bool          // the last claim took all it asked for: there may be more behind it
	asked    time.Time     // when the last claim was made
	sweepDue time.Time     // when to look again at what lies before position: late commits, and what was given back
	swept    keyset        // how far the current sweep has come; zero: it begins
	sweeping time.Duration // how long the current sweep has taken
	chunked  bool          // sweeps are long, and go in chunks

	mu      sync.Mutex
	queue   []delivery
	head    int // of the queue
	senders int
	limit   int // of senders
	// unblocked are ordering keys whose last delivery was settled as delivered: the next in each can be claimed.
	unblocked map[string]bool
	// taken counts what is claimed and not yet settled: queued, being sent, or waiting for the settler.
	taken   int
	settled int // since the rate was last measured
	rate    rate
	// gone is set by a 410, until something is claimed again although the destination was paused: it was resumed.
	gone     bool
	pausedAt time.Time // when the pause was in the database; zero: it is not
}

// newLane returns an empty lane to a destination.
func newLane(d Destination, version string) (*lane, error) {
	e, err := newEndpoint(d, version)
	if err != nil {
		return nil, err
	}
	return &lane{endpoint: e, limit: d.MaxInFlight}, nil
}

// Bounds of how much a lane holds, in deliveries.
const (
	maxTaken   = 2000
	minPace    = 20 * time.Millisecond  // between two claims for less than a worthwhile batch
	fillAhead  = 200 * time.Millisecond // of sending at the measured rate
	sendMargin = 2 * time.Second        // of the lease, to settle in after a POST that took its whole timeout
)

// room returns how many deliveries a claim may bring, and whether that is worth a claim now. The lane never holds more
// than it sends within a fraction of the lease: what waits longer would be given back unsent.
func (l *lane) room(now time.Time, lease time.Duration) (free int, worthwhile bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone && l.pausedAt.IsZero() {
		return 0, false // what a claim brought now would be given back, and claimed again
	}
	ahead := min(fillAhead, (lease-l.destination.Timeout-sendMargin)/2)
	target := l.limit
	if perSecond, known := l.rate.measure(now, l.settled); known {
		target += max(0, min(maxTaken-l.limit, int(perSecond*ahead.Seconds())))
	} else {
		target *= 2
	}
	l.settled = 0
	free = max(target-l.taken, 0)
	return free, free > 0 && (free >= target/4 || now.Sub(l.asked) >= minPace)
}

// push queues claimed deliveries and returns how many senders to start for them.
func (l *lane) push(deliveries []delivery) (start int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.pausedAt.IsZero() && l.asked.After(l.pausedAt) { // a claim that was under way before tells nothing
		l.gone, l.pausedAt = false, time.Time{}
	}
	// Moved to the front, so that a queue that never runs empty does not grow.
	waiting := copy(l.queue, l.queue[l.head:])
	clear(l.queue[waiting:])
	l.queue, l.head = append(l.queue[:waiting], deliveries...), 0
	l.taken += len(deliveries)
	start = max(min(l.limit-l.senders, len(l.queue)-l.head), 0)
	l.senders += start
	return start
}

// next hands one delivery to a sender; false tells the sender to end.
func (l *lane) next() (delivery, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.head == len(l.queue) || l.senders > l.limit {
		l.senders--
		return delivery{}, false
	}
	d := l.queue[l.head]
	l.queue[l.head] = delivery{} // release the payload
	l.head++
	return d, true
}

// unsent empties the queue.
func (l *lane) unsent() []delivery {
	l.mu.Lock()
	defer l.mu.Unlock()
	waiting := l.queue[l.head:]
	l.queue, l.head = nil, 0
	return waiting
}

// setLimit changes how many senders the lane may have; those beyond it end with their current POST.
func (l *lane) setLimit(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.limit = n
}

// busy reports whether the lane holds anything.
func (l *lane) busy() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.taken > 0
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

// paused reports whether the receiver has said that it wants nothing more.
func (l *lane) paused() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.gone
}

// release makes room for n settled deliveries again.
func (l *lane) release(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.taken -= n
	l.settled += n
}

// rate is a moving average of deliveries per second.
type rate struct {
	perSecond float64
	since     time.Time
	count     int
}

// rateWindow is the shortest time over which a rate is measured.
const rateWindow = 50 * time.Millisecond

// measure adds n deliveries and returns the rate; false until it is known. A pause in which nothing was asked for does
// not lower it: it says nothing about the receiver.
func (r *rate) measure(now time.Time, n int) (perSecond float64, known bool) {
	r.count += n
	elapsed := now.Sub(r.since)
	switch {
	case r.since.IsZero() || elapsed > time.Second && r.count == 0:
		r.since, r.count = now, 0
	case elapsed >= rateWindow:
		current := float64(r.count) / elapsed.Seconds()
		if r.perSecond == 0 {
			r.perSecond = current
		} else {
			r.perSecond += (current - r.perSecond) / 4
		}
		r.since, r.count = now, 0
	}
	return r.perSecond, r.perSecond > 0
}
