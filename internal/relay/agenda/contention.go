package agenda

import "time"

// A Contention decides when a relay may claim where other relays claim, too. Relays that drain one
// destination meet at its front, the oldest due deliveries, where each would read and try to lock
// the rows that another one is claiming. So they claim there one after the other, under a lock that
// they try to take and never wait for. Any login of the database can hold that lock: a relay that
// has not got it for SharedFor claims without it for AloneFor.
//
// The zero value is ready to use. Its methods take the time and are not safe for concurrent use.
type Contention struct {
	Next time.Time // when to try again; zero or past: now

	wait    time.Duration // how long the next try was put off
	refused time.Time     // since when the lock was always held, while wait is not zero
	alone   time.Time     // until when it claims without the lock
}

const (
	// SharedFor is how long other relays are believed to claim where a claim has met them.
	SharedFor = 500 * time.Millisecond

	// AloneFor is how long a relay claims without the lock: long beside the wait of SharedFor
	// before it, and short beside a drain.
	AloneFor = 10 * time.Second

	firstRetry   = 4 * time.Millisecond
	longestRetry = 16 * time.Millisecond
)

// Record records a claim at a shared front, and whether another session had the lock.
func (f *Contention) Record(now time.Time, taken bool) {
	if !taken {
		*f = Contention{alone: f.alone}
		return
	}
	if f.wait == 0 || now.Sub(f.Next) >= SharedFor { // earlier refusals are too old to count
		*f = Contention{refused: now}
	}
	if now.Sub(f.refused) >= SharedFor {
		*f = Contention{Next: now, alone: now.Add(AloneFor)}
		return
	}
	f.wait = min(max(2*f.wait, firstRetry), longestRetry)
	f.Next = now.Add(f.wait)
}

// Alone reports whether the relay claims without the lock.
func (f *Contention) Alone(now time.Time) bool { return now.Before(f.alone) }
