package policy

import (
	"math"
	"time"
)

// Longest returns for how long after its first attempt a delivery may be attempted again under this
// policy, at the latest: every delay with all of its jitter, or what a receiver may ask for with
// Retry-After if that is longer. The zero value's is that of the standard schedule, 168h. Time in
// which nothing is attempted comes on top: a destination that is held or paused, relays that do not
// run. [RetryPolicy.NotAfter] bounds all of it, until an operator replays.
func (p RetryPolicy) Longest() time.Duration {
	p = p.WithDefaults()
	var longest time.Duration
	for attempt := 1; attempt < p.MaxAttempts; attempt++ {
		longest = addDurations(longest, p.DelayAfter(attempt, 1, maxDelay))
	}
	return longest
}

// LongestWith adds what the attempts themselves may take: each lasts up to the timeout, and may be
// claimed a lease late, by a relay that dies.
func (p RetryPolicy) LongestWith(timeout, lease time.Duration) time.Duration {
	longest := p.Longest()
	for range p.WithDefaults().MaxAttempts {
		longest = addDurations(longest, addDurations(timeout, lease))
	}
	return longest
}

// addDurations adds two durations that are not negative; what overflows is the longest there is.
func addDurations(a, b time.Duration) time.Duration {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}
