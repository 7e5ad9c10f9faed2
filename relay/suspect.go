package relay

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"time"
)

// A delivery that kills its relay looks like every other one that the relay held. So those that were held three times in
// a row when a relay died are suspects. A suspect waits before its next claim, longer each time. What is only unlucky is
// sent in between, and its count begins anew. One that is still there after three waits is sent alone, with no other POST
// of this relay beside it; only requests that were sent alone count from then on, and only they convict it.
const (
	suspectFrom = 3
	aloneFrom   = 6 // as rescuesAfterClaim has it
	// crashLoop is at which count a delivery is failed: five requests that were sent alone and never settled.
	crashLoop = aloneFrom + 5
	// aloneShare bounds how much of its time a relay spends on requests sent alone, while all others wait.
	aloneShare = 10
	// aloneEnough is how many requests sent alone a relay must survive before it sends further suspects beside others. After
	// a series of deaths from another cause there may be hundreds. One that does kill it meets the next relay as a suspect.
	aloneEnough = 2
)

// suspectWait returns how long a suspect that was lost again waits before its next claim.
func suspectWait(rescues int) time.Duration {
	return min(time.Second<<min(max(rescues-suspectFrom, 0), 20), 10*time.Minute)
}

// solitude lets a suspect be sent with no other POST beside it. It is safe for concurrent use.
type solitude struct {
	posts sync.RWMutex // held shared by every other POST

	mu    sync.Mutex
	busy  bool
	begun time.Time
	next  time.Time // when the next suspect may be sent alone
	ended int       // requests sent alone that the relay survived
}

// over reports whether suspects need not be sent alone any more.
func (s *solitude) over() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ended >= aloneEnough
}

// reserve returns how long the next suspect must wait for its turn to be sent alone; 0: it has it, until end.
func (s *solitude) reserve(now time.Time) (wait time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.busy:
		return time.Second
	case now.Before(s.next):
		return s.next.Sub(now)
	}
	s.busy, s.begun = true, now
	return 0
}

// end gives the others their turn, for aloneShare-1 times as long as they have waited.
func (s *solitude) end(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.busy, s.next = false, now.Add((aloneShare-1)*now.Sub(s.begun))
	s.ended++
}

// enter waits until a delivery may be sent: a suspect with no other POST beside it, any other with no such suspect. It
// returns what must be called when it was sent, or a verdict instead if it is not to be sent now.
func (r *Relay) enter(d *delivery) (leave func(), instead *verdict) {
	switch {
	case d.rescues >= crashLoop:
		return nil, &verdict{outcome: Fail, reason: ReasonCrashLoop, message: fmt.Sprintf(
			"%d times in a row a relay died while it sent this delivery with nothing else beside it", d.rescues-aloneFrom)}
	case d.lost:
		wait := suspectWait(d.rescues)
		return nil, r.postpone(d, wait+rand.N(wait)) // not together with those that were lost with it
	case d.rescues < aloneFrom || r.alone.over():
		r.alone.posts.RLock()
		return r.alone.posts.RUnlock, nil
	}
	if wait := r.alone.reserve(time.Now()); wait > 0 {
		return nil, r.postpone(d, rand.N(2*wait+time.Second)) // not all at the same time
	}
	r.alone.posts.Lock()
	d.alone = true
	return func() {
		r.alone.posts.Unlock()
		r.alone.end(time.Now())
	}, nil
}

// accuse counts a suspect that is about to be sent alone. If the relay dies of it, nothing can be written afterwards.
func (r *Relay) accuse(d *delivery) error {
	if !d.alone {
		return nil
	}
	return r.store.countAlone(r.settling, d)
}

// postpone makes a claimed delivery due again after the given time. If that fails, it is due at once.
func (r *Relay) postpone(d *delivery, wait time.Duration) *verdict {
	if err := r.store.postpone(r.settling, d, wait); err != nil {
		r.databaseError("postpone suspect", err)
	} else {
		r.wake.retries.add(time.Now(), wait)
	}
	return &verdict{outcome: Hold, reason: ReasonSuspect}
}
