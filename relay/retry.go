package relay

import (
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// maxDelay keeps every delay far from where timestamps and durations overflow.
const maxDelay = 30 * 24 * time.Hour

// DefaultSchedule returns the delays after the first, second, … attempt; the last repeats.
func DefaultSchedule() []time.Duration {
	return []time.Duration{5 * time.Second, 30 * time.Second, 5 * time.Minute, 30 * time.Minute, 4 * time.Hour}
}

// delay returns how long to wait after the given attempt (1 is the first). fraction, in [0, 1), chooses within the
// jitter. retryAfter is what the receiver asked for, 0 if nothing: it can lengthen the delay up to RetryAfterMax, never
// shorten it.
func (p RetryPolicy) delay(attempt int, fraction float64, retryAfter time.Duration) time.Duration {
	index := min(max(attempt, 1), len(p.Schedule)) - 1
	scheduled := p.Schedule[index]
	scheduled += time.Duration(float64(scheduled) * *p.Jitter * fraction)
	return max(scheduled, min(retryAfter, p.RetryAfterMax))
}

// jitterFraction draws the number that delay takes.
func jitterFraction() float64 { return rand.Float64() }

// parseRetryAfter reads a Retry-After header, in seconds or as an HTTP date (RFC 9110 §10.2.3). Anything else, and a
// time that has passed, is 0: ignored.
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
