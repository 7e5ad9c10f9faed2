package policy

import "time"

// A Front decides when a relay tries again to claim where other relays do, too. Relays that drain one destination meet at its front,
// where each would read and try to lock what another one is just claiming. They claim there one after the other, by a lock that they
// try to take and never wait for.
//
// The zero value is ready to use. Its methods take the time and are not safe for concurrent use.
type Front struct {
	Next time.Time // when to try again; zero or past: now

	wait time.Duration // how long the next try was put off
}

const (
	// SharedFor is how long other relays are believed to claim where a claim has met them. Any login of the database could hold the
	// lock: a relay that does not get it stops believing, and claims without.
	SharedFor = 500 * time.Millisecond

	firstRetry   = 4 * time.Millisecond
	longestRetry = 16 * time.Millisecond
)

// Record records a claim at a shared front, and whether another relay had the lock.
func (f *Front) Record(now time.Time, taken bool) {
	if !taken {
		*f = Front{}
		return
	}
	f.wait = min(max(2*f.wait, firstRetry), longestRetry)
	f.Next = now.Add(f.wait)
}
