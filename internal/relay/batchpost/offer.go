package batchpost

import (
	"sync"
	"time"
)

// askAgain is how long a receiver that does not take batches is not asked again.
const askAgain = 4 * time.Hour

// An Offer is what is known of whether a receiver takes batches: it says so in its answers to
// single events, and nothing else counts. The zero value knows nothing. It is safe for concurrent
// use.
type Offer struct {
	mu    sync.Mutex
	made  bool
	until time.Time // not asked before; zero: it was not refused yet
}

// Made reports whether the receiver takes batches, and Asking whether the answers to single events
// are to be read for it.
func (o *Offer) Made(now time.Time) (made, asking bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.made, !o.made && !now.Before(o.until)
}

// Learn notes what an answer says, and reports whether it is news.
func (o *Offer) Learn(now time.Time, made bool) (news bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if made == o.made && made || !o.made && now.Before(o.until) { // answers that were on their way, or were not asked, say nothing new
		return false
	}
	o.made, o.until = made, now.Add(askAgain)
	return true
}
