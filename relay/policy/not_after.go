package policy

import (
	"math"
	"time"
)

// Horizon returns for how long after its first attempt a delivery may be attempted again under this policy, at the
// latest: every delay with all of its jitter, or what a receiver may ask for with Retry-After if that is longer. The zero
// value's is that of the standard schedule, 168h. Time in which nothing is attempted comes on top: a destination that is
// held or paused, relays that do not run. [RetryPolicy.Promise] bounds all of it, until an operator replays.
func (p RetryPolicy) Horizon() time.Duration {
	p = p.WithDefaults()
	var horizon time.Duration
	for attempt := 1; attempt < p.MaxAttempts; attempt++ {
		horizon = addDurations(horizon, p.Delay(attempt, 1, maxDelay))
	}
	return horizon
}

// HorizonWith adds what the attempts themselves may take: each lasts up to the timeout, and may be claimed a lease late, by a
// relay that dies.
func (p RetryPolicy) HorizonWith(timeout, lease time.Duration) time.Duration {
	horizon := p.Horizon()
	for range p.WithDefaults().MaxAttempts {
		horizon = addDurations(horizon, addDurations(timeout, lease))
	}
	return horizon
}

// addDurations adds two durations that are not negative; what overflows is the longest there is.
func addDurations(a, b time.Duration) time.Duration {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}
