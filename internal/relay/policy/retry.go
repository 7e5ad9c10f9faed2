package policy

import (
	"cmp"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/check"
)

// maxDelay keeps every delay far from where timestamps and durations overflow.
const maxDelay = 30 * 24 * time.Hour

// Defaults of a RetryPolicy.
const (
	DefaultMaxAttempts   = 8
	DefaultJitter        = 0.1
	DefaultRetryAfterMax = 24 * time.Hour
	DefaultNotAfter      = 720 * time.Hour
)

// RetryPolicy says when a delivery is attempted again.
type RetryPolicy struct {
	// Schedule holds the delay after the first attempt, the second, and so on; the last repeats.
	// Empty: 5 s, 30 s, 5 min, 30 min, 4 h.
	Schedule []time.Duration
	// MaxAttempts after which a delivery is failed. 0: 8.
	MaxAttempts int
	// Jitter lengthens each delay by a random share, from 0 up to this one, so that what failed
	// together does not return together. It never shortens. nil: 0.1. Between 0 and 1.
	Jitter *float64
	// RetryAfterMax caps what a Retry-After may ask for. 0: 24 h.
	RetryAfterMax time.Duration
	// NotAfter bounds the time from when a delivery is first claimed until its last request may be
	// under way. Requests state the end of it in X-Outbox-Not-After, and receivers need remember
	// what they processed no longer; whatever is pending then, after a long outage or pause, is
	// failed instead of sent. It may not be shorter than what schedule, timeouts and leases come
	// to. What never had a connection to its receiver is promised again each time, so that it bears
	// an outage of any length. 0: 30 days.
	NotAfter time.Duration
}

// DefaultSchedule returns the delays after the first, second, … attempt; the last repeats. Inboxes
// have the same one, see completeRetries in consumer/inbox/retry.go, which may not import this.
func DefaultSchedule() []time.Duration {
	return []time.Duration{5 * time.Second, 30 * time.Second, 5 * time.Minute, 30 * time.Minute, 4 * time.Hour}
}

// WithDefaults returns a copy in which every zero value is replaced by its default.
func (p RetryPolicy) WithDefaults() RetryPolicy {
	p.MaxAttempts = cmp.Or(p.MaxAttempts, DefaultMaxAttempts)
	p.RetryAfterMax = cmp.Or(p.RetryAfterMax, DefaultRetryAfterMax)
	p.NotAfter = cmp.Or(p.NotAfter, DefaultNotAfter)
	if len(p.Schedule) == 0 {
		p.Schedule = DefaultSchedule()
	}
	if p.Jitter == nil {
		jitter := DefaultJitter
		p.Jitter = &jitter
	}
	return p
}

// Problems returns the mistakes in a policy with its defaults.
func (p RetryPolicy) Problems(path string) []check.Problem {
	var v check.Problems
	v.Require(p.MaxAttempts > 0 && p.MaxAttempts <= 1000, path+".max_attempts", "%d is out of range; write 1 to 1000", p.MaxAttempts)
	v.Require(*p.Jitter >= 0 && *p.Jitter <= 1, path+".jitter", "%g is out of range; write 0 to 1", *p.Jitter)
	v.Require(p.RetryAfterMax > 0, path+".retry_after_max", "%s is negative; write a duration such as 24h", p.RetryAfterMax)
	v.Require(len(p.Schedule) <= 100, path+".schedule", "%d entries are too many; the last one repeats, so write at most 100", len(p.Schedule))
	for i, delay := range p.Schedule {
		v.Require(delay > 0 && delay <= maxDelay, fmt.Sprintf("%s.schedule[%d]", path, i), "%s is out of range; write more than 0 and at most %s", delay, maxDelay)
	}
	return v
}

// DelayAfter returns how long to wait after the given attempt (1 is the first). fraction, in
// [0, 1), chooses within the jitter. retryAfter is what the receiver asked for, 0 if nothing: it
// can lengthen the delay up to RetryAfterMax, never shorten it.
func (p RetryPolicy) DelayAfter(attempt int, fraction float64, retryAfter time.Duration) time.Duration {
	index := min(max(attempt, 1), len(p.Schedule)) - 1
	scheduled := p.Schedule[index]
	scheduled += time.Duration(float64(scheduled) * *p.Jitter * fraction)
	return max(scheduled, min(retryAfter, p.RetryAfterMax))
}

// parseRetryAfter reads a Retry-After header, in seconds or as an HTTP date (RFC 9110 §10.2.3).
// Anything else, and a time that has passed, is 0: ignored.
func parseRetryAfter(header http.Header, now time.Time) time.Duration {
	value := strings.TrimSpace(header.Get("Retry-After"))
	if value == "" {
		return 0
	}
	if seconds, err := strconv.ParseUint(value, 10, 64); err == nil {
		return time.Duration(min(seconds, uint64(maxDelay/time.Second))) * time.Second
	}
	if digitsOnly(value) { // more digits than 64 bits hold
		return maxDelay
	}
	if at, err := http.ParseTime(value); err == nil {
		return min(max(at.Sub(now), 0), maxDelay)
	}
	return 0
}

func digitsOnly(s string) bool {
	return strings.Trim(s, "0123456789") == ""
}
