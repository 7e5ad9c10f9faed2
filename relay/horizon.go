package relay

import (
	"math"
	"time"
)

// Horizon returns for how long after its first attempt a delivery may be attempted again under this policy, at the
// latest: every delay with all of its jitter, or what a receiver may ask for with Retry-After if that is longer. The zero
// value's is that of the standard schedule, 168h. Time in which nothing is attempted comes on top: a destination that is
// held or paused, relays that do not run. [RetryPolicy.Promise] bounds all of it, until an operator replays.
func (p RetryPolicy) Horizon() time.Duration {
	p = p.withDefaults()
	var horizon time.Duration
	for attempt := 1; attempt < p.MaxAttempts; attempt++ {
		horizon = addDurations(horizon, p.delay(attempt, 1, maxDelay))
	}
	return horizon
}

// horizon adds what the attempts themselves may take: each lasts up to the timeout, and may be claimed a lease late, by a
// relay that dies.
func (d Destination) horizon(lease time.Duration) time.Duration {
	horizon := d.Retry.Horizon()
	for range d.Retry.withDefaults().MaxAttempts {
		horizon = addDurations(horizon, addDurations(d.Timeout, lease))
	}
	return horizon
}

// promise reports a promise that is shorter than what the destination's own schedule may take.
func (v *validator) promise(path string, d Destination, lease time.Duration) {
	least := d.horizon(lease)
	v.Require(d.Retry.Promise >= least, path+".retry.horizon",
		"%s is shorter than schedule, max_attempts, retry_after_max, timeout and lease may take (%s), so that deliveries would fail before their last attempt; write %.0fh or more, or shorten those",
		d.Retry.Promise, least, math.Ceil(least.Hours()))
}

// withDefaults returns a copy in which every zero value is replaced by its default.
func (p RetryPolicy) withDefaults() RetryPolicy {
	setDefault(&p.MaxAttempts, DefaultMaxAttempts)
	setDefault(&p.RetryAfterMax, DefaultRetryAfterMax)
	setDefault(&p.Promise, DefaultPromise)
	if len(p.Schedule) == 0 {
		p.Schedule = DefaultSchedule()
	}
	if p.Jitter == nil {
		jitter := DefaultJitter
		p.Jitter = &jitter
	}
	return p
}

// addDurations adds two durations that are not negative; what overflows is the longest there is.
func addDurations(a, b time.Duration) time.Duration {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}
