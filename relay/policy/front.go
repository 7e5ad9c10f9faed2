package policy

import "time"

// Times of claims at a front that several relays share.
const (
	// SharedFor is how long other relays are believed to claim where a claim has met them.
	SharedFor = time.Second

	frontPatience = 250 * time.Millisecond
	firstRetry    = 4 * time.Millisecond
	longestRetry  = 16 * time.Millisecond
)

// A Front decides when a relay claims where other relays do, too. Relays that drain one destination meet at its front, where each
// would read and try to lock what another one is just claiming. They claim there one after the other, by a lock that they try to
// take and never wait for. Any login of the database could hold it: a relay that has not got it for a while claims without.
//
// The zero value is ready to use. Its methods take the time and are not safe for concurrent use.
type Front struct {
	Next time.Time // when to try again; zero or past: now

	since time.Time     // when another relay first had the lock; zero: none has
	wait  time.Duration // how long the next try was put off
}

// Record records a claim at a shared front, and whether another relay had the lock when the claim asked for it.
func (f *Front) Record(now time.Time, taken bool) {
	if !taken {
		*f = Front{}
		return
	}
	if f.since.IsZero() {
		f.since = now
	}
	f.wait = min(max(2*f.wait, firstRetry), longestRetry)
	f.Next = now.Add(f.wait)
}

// Exclusive reports whether the next claim asks for the lock.
func (f *Front) Exclusive(now time.Time) bool {
	return f.since.IsZero() || now.Sub(f.since) < frontPatience
}
