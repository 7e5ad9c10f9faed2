package relay

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// A delivery that kills its relay looks like every other one that the relay held. A delivery is a suspect when relays died
// three times in a row while they held it. A suspect waits before its next claim, longer each time. Most are only unlucky:
// they are sent in between, and their count begins anew. From the sixth death on a suspect is sent alone, with no other
// POST of this relay beside it. From then on only requests that were sent alone count, and only they fail it.
const (
	// Both numbers are also in the SQL of claims, and a test compares them.
	suspectFrom = 3
	aloneFrom   = 6
	// crashLoop is at which count a delivery is failed: five requests that were sent alone and never settled.
	crashLoop = aloneFrom + 5
	// aloneShare bounds how much of its time a relay spends on requests sent alone, while all others wait.
	aloneShare = 10
	// aloneEnough is how many requests sent alone a relay must survive before it sends further suspects beside others. After
	// a series of deaths from another cause there may be hundreds. One that does kill this relay is still a suspect to the next.
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
	ended int       // requests sent alone that this relay has survived
}

// hasEnough reports whether the relay has survived enough requests sent alone to send further suspects beside others.
func (s *solitude) hasEnough() bool {
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

// awaitPost waits until a delivery may be sent: a suspect until no other POST is under way, any other until no suspect is
// being sent alone. The caller calls leave after the POST. Instead of leave it returns a result if the delivery must not
// be sent now.
func (s *senders) awaitPost(d *delivery) (leave func(), instead *policy.Result) {
	switch {
	case d.rescues >= crashLoop:
		return nil, &policy.Result{Reason: policy.ReasonCrashLoop, Message: fmt.Sprintf(
			"%d times in a row a relay died while it sent this delivery with nothing else beside it", d.rescues-aloneFrom)}
	case d.lost:
		wait := suspectWait(d.rescues)
		return nil, s.postpone(d, wait+rand.N(wait)) // at random, so that those lost together part
	case d.rescues < aloneFrom || s.alone.hasEnough():
		s.alone.posts.RLock()
		return s.alone.posts.RUnlock, nil
	}
	if wait := s.alone.reserve(time.Now()); wait > 0 {
		return nil, s.postpone(d, rand.N(2*wait+time.Second)) // not all at the same time
	}
	s.alone.posts.Lock()
	d.alone = true
	return func() {
		s.alone.posts.Unlock()
		s.alone.end(time.Now())
	}, nil
}

// postpone makes a claimed delivery due again after the given time. If that fails, it is due at once.
func (s *senders) postpone(d *delivery, wait time.Duration) *policy.Result {
	if err := s.store.postpone(s.settling, d, wait); err != nil {
		s.databaseError("postpone suspect", err)
	} else {
		s.wake.retries.Add(time.Now(), wait)
	}
	return &policy.Result{Reason: policy.ReasonSuspect}
}
