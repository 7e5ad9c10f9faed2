package capacity

import (
	"sync"
	"time"
)

// A delivery that kills its relay looks like every other one that the relay held. A delivery is a
// suspect when relays died three times in a row while they held it. A suspect waits before its next
// claim, longer each time. Most are only unlucky: they are sent in between, and their count begins
// again. From the sixth death on a suspect is sent alone, with no other POST of this relay beside
// it. From then on only requests that were sent alone count, and only they fail it.
//
// SuspectFrom and AloneFrom are also in the SQL of claims, and a test compares them.
const (
	SuspectFrom = 3
	AloneFrom   = 6
	// CrashLoop is at which count a delivery is failed: five requests that were sent alone and
	// never settled.
	CrashLoop = AloneFrom + 5
)

const (
	// aloneShare bounds how much of its time a relay spends on requests sent alone, while all
	// others wait.
	aloneShare = 10
	// aloneEnough is how many requests sent alone a relay must survive before it sends further
	// suspects beside others. After a series of deaths from another cause there may be hundreds.
	// One that does kill this relay is still a suspect to the next.
	aloneEnough = 2
)

// SuspectWait returns how long a suspect that was lost again waits before its next claim.
func SuspectWait(rescues int) time.Duration {
	return min(time.Second<<min(max(rescues-SuspectFrom, 0), 20), 10*time.Minute)
}

// Solitude lets a suspect be sent with no other POST beside it. It is safe for concurrent use.
type Solitude struct {
	posts sync.RWMutex // held shared by every other POST
	bind  sync.Once
	leave func() // what Beside returns

	mu    sync.Mutex
	busy  bool
	begun time.Time
	next  time.Time // when the next suspect may be sent alone
	ended int       // requests sent alone that this relay has survived
}

// HasEnough reports whether the relay has survived enough requests sent alone to send further
// suspects beside others.
func (s *Solitude) HasEnough() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ended >= aloneEnough
}

// Reserve returns how long the next suspect must wait for its turn to be sent alone; 0: it has it,
// until the function that Alone returns is called.
func (s *Solitude) Reserve(now time.Time) (wait time.Duration) {
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

// Beside waits until no suspect is being sent alone. The caller calls leave after its POST.
func (s *Solitude) Beside() (leave func()) {
	s.bind.Do(func() { s.leave = s.posts.RUnlock }) // not once for each POST
	s.posts.RLock()
	return s.leave
}

// Alone waits until no other POST is under way, for a suspect that has the turn. The caller calls
// leave after its POST.
func (s *Solitude) Alone() (leave func(now time.Time)) {
	s.posts.Lock()
	return func(now time.Time) {
		s.posts.Unlock()
		s.end(now)
	}
}

// end gives the others their turn, for aloneShare-1 times as long as they have waited.
func (s *Solitude) end(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.busy, s.next = false, now.Add((aloneShare-1)*now.Sub(s.begun))
	s.ended++
}
