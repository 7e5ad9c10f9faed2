package policy

import (
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// An outage of the destination spends no attempt, not even the last one.
func TestDestinationAtFaultSpendsNoAttempt(t *testing.T) {
	t.Parallel()
	v := Result{Reason: ReasonServerError, StatusCode: 500, Posted: true}
	for _, attempt := range []int{1, DefaultMaxAttempts} {
		if s := Decide(v, Circumstances{Attempt: attempt, Retry: retryPolicy(0, time.Second), AtFault: true}); s.Outcome != Hold {
			t.Errorf("attempt %d: %s, want %s", attempt, s.Outcome, Hold)
		}
	}
}

func TestDecide(t *testing.T) {
	t.Parallel()
	p := retryPolicy(0.1, time.Second, time.Minute)
	retry := Result{Reason: ReasonServerError, StatusCode: 500, Message: "500 Internal Server Error", Posted: true}
	for _, c := range []struct {
		name     string
		attempts int
		give     Result
		fraction float64
		outcome  Outcome
		delay    time.Duration
		message  string
	}{
		{"first attempt", 0, retry, 0, Retry, time.Second, retry.Message},
		{"jitter", 0, retry, 0.5, Retry, 1050 * time.Millisecond, retry.Message},
		{"second attempt", 1, retry, 0, Retry, time.Minute, retry.Message},
		{"seventh attempt", 6, retry, 0, Retry, time.Minute, retry.Message},
		{"eighth attempt", 7, retry, 0, Fail, 0, "attempt 8 of 8: 500 Internal Server Error"},
		{"far beyond", 1_000_000, retry, 0, Fail, 0, "attempt 1000001 of 8: 500 Internal Server Error"},
		{"asked to wait", 0, Result{Reason: ReasonUnavailable, RetryAfter: time.Hour, Posted: true}, 0, Retry, time.Hour, ""},
		{"asked to wait beyond the cap", 0, Result{Reason: ReasonUnavailable, RetryAfter: 240 * time.Hour, Posted: true}, 0, Retry, 24 * time.Hour, ""},
		{"delivered at the eighth", 7, Result{Reason: ReasonOK, Posted: true}, 0, Delivered, 0, ""},
		{"failed at once", 0, Result{Reason: ReasonRejected, Message: "422", Posted: true}, 0, Fail, 0, "422"},
		{"held at the eighth", 7, Result{Reason: ReasonShutdown}, 0, Hold, 0, ""},
	} {
		s := Decide(c.give, Circumstances{Attempt: c.attempts + 1, Retry: p, Fraction: c.fraction})
		if s.Outcome != c.outcome || s.Delay != c.delay || s.Message != c.message || s.Reason != c.give.Reason {
			t.Errorf("%s: %s after %s, %q; want %s after %s, %q", c.name, s.Outcome, s.Delay, s.Message, c.outcome, c.delay, c.message)
		}
	}
}

func TestLastMessageStaysWithinItsBounds(t *testing.T) {
	t.Parallel()
	v := Result{Reason: ReasonServerError, Message: strings.Repeat("x", plain.MaxBytes), Posted: true}
	s := Decide(v, Circumstances{Attempt: 8, Retry: retryPolicy(0, time.Second)})
	if len(s.Message) > plain.MaxBytes || !strings.HasPrefix(s.Message, "attempt 8 of 8: ") {
		t.Errorf("%d bytes: %.40q", len(s.Message), s.Message)
	}
}
