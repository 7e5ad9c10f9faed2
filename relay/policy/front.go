package policy

import "time"

// A Front decides when a relay tries again to claim where other relays do, too. Relays that drain one destination meet at its front,
// where each would read and try to lock what another one is just claiming. They claim there one after the other, by a lock that they
// try to take and never wait for. A relay that has had no turn for SharedFor claims without the lock for AloneFor: any login of the
// database can hold it.
//
// The zero value is ready to use. Its methods take the time and are not safe for concurrent use.
type Front struct {
	Next time.Time // when to try again; zero or past: now

	wait    time.Duration // how long the next try was put off
	refused time.Time     // since when it has had no turn, while wait is not zero
	alone   time.Time     // until when it claims without the lock
}

const (
	// SharedFor is how long other relays are believed to claim where a claim has met them.
	SharedFor = 500 * time.Millisecond

	// AloneFor is long enough for one claim in SharedFor to be no loss, and short beside a drain.
	AloneFor = 10 * time.Second

	firstRetry   = 4 * time.Millisecond
	longestRetry = 16 * time.Millisecond
)

// Record records a claim at a shared front, and whether another session had the lock.
func (f *Front) Record(now time.Time, taken bool) {
	if !taken {
		*f = Front{alone: f.alone}
		return
	}
	if f.wait == 0 || now.Sub(f.Next) >= SharedFor { // what was before is over
		*f = Front{refused: now}
	}
	if now.Sub(f.refused) >= SharedFor {
		*f = Front{Next: now, alone: now.Add(AloneFor)}
		return
	}
	f.wait = min(max(2*f.wait, firstRetry), longestRetry)
	f.Next = now.Add(f.wait)
}

// Alone reports whether the relay claims without the lock.
func (f *Front) Alone(now time.Time) bool { return now.Before(f.alone) }
