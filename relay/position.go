package relay

import (
	"slices"
	"time"
)

// Sweeping a lane, bounded in two ways: by its share of the time, and in how long each statement of it holds up the
// other lanes. A lane in which many deliveries are due and cannot be claimed, such as those behind a failed head of
// their ordering key, is swept in chunks.
const (
	sweepShare = 100                    // a sweep rests this many times as long as it took
	slowSweep  = 200 * time.Millisecond // a sweep that takes longer goes in chunks from then on
	sweepChunk = 2000                   // deliveries looked at in one chunk
)

// advance moves the lane's position, or its sweep, past what a claim has looked at. at is the database's time of the
// claim, took how long the claim lasted, poll the poll interval.
func (l *lane) advance(a ask, deliveries []delivery, at time.Time, took, poll time.Duration) {
	if a.free == 0 {
		return // it has looked only for the next of its keys
	}
	// What was claimed as the next of its key says nothing about how far the claim has looked.
	found := deliveries
	if len(a.unblocked) > 0 {
		found = slices.DeleteFunc(slices.Clone(deliveries), func(d delivery) bool {
			return d.event.orderingKey != nil && slices.Contains(a.unblocked, *d.event.orderingKey)
		})
	}
	full := len(found) >= a.free
	end := keyset{at: at} // everything that was due has been looked at
	switch {
	case full:
		last := found[len(found)-1]
		end = keyset{at: last.nextAttemptAt.Time, id: last.eventID}
	case a.until != (keyset{}):
		end = a.until
	}
	switch {
	case !a.sweep:
		l.position, l.more = end, full
	case l.chunked && (full || a.until != (keyset{})):
		l.swept = end
		l.sweeping += took
		l.sweepDue = time.Now().Add(took)
	default:
		// It goes on as a claim does, from where the sweep ended.
		l.position, l.more = end, full
		l.sweeping += took
		l.chunked = l.sweeping > slowSweep
		l.endSweep(poll)
	}
}

// failed takes back what a claim that failed was asked to do. A sweep that failed, perhaps because it took too long, goes
// in chunks, and not at once: the next claim shall be able to do without it.
func (l *lane) failed(a ask, now time.Time, poll time.Duration) {
	l.unblock(a.unblocked...)
	if a.sweep {
		l.chunked = true
		l.sweepDue = now.Add(poll)
	}
}

// endSweep begins the rest until the next sweep. A little less than the poll interval, so that a sweep that comes with
// each safety tick does not miss every other one.
func (l *lane) endSweep(poll time.Duration) {
	l.sweepDue = time.Now().Add(max(poll*9/10, sweepShare*l.sweeping))
	l.swept, l.sweeping = keyset{}, 0
}

// sweepNow makes the next claim begin a sweep.
func (l *lane) sweepNow() {
	l.sweepDue, l.swept, l.sweeping = time.Time{}, keyset{}, 0
}

// unblock notes ordering keys in which the next delivery can be claimed.
func (l *lane) unblock(keys ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, key := range keys {
		if l.unblocked == nil {
			l.unblocked = map[string]bool{}
		}
		l.unblocked[key] = true
	}
}

// takeUnblocked returns at most n of those keys, each once.
func (l *lane) takeUnblocked(n int) (keys []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for key := range l.unblocked {
		if len(keys) == n {
			break
		}
		keys = append(keys, key)
		delete(l.unblocked, key)
	}
	return keys
}
