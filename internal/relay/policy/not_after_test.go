package policy

import (
	"math"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestLongest(t *testing.T) {
	t.Parallel()
	none, half := 0.0, 0.5
	const h = time.Hour
	for name, test := range map[string]struct {
		policy RetryPolicy
		want   time.Duration
	}{
		"the standard":                 {RetryPolicy{}, 7 * 24 * h},
		"one attempt":                  {RetryPolicy{MaxAttempts: 1}, 0},
		"the schedule is longer":       {RetryPolicy{Schedule: []time.Duration{2 * h, 10 * h}, MaxAttempts: 3, Jitter: &none, RetryAfterMax: h}, 12 * h},
		"with jitter":                  {RetryPolicy{Schedule: []time.Duration{2 * h, 10 * h}, MaxAttempts: 3, Jitter: &half, RetryAfterMax: h}, 18 * h},
		"the last delay repeats":       {RetryPolicy{Schedule: []time.Duration{2 * h}, MaxAttempts: 5, Jitter: &none, RetryAfterMax: h}, 8 * h},
		"each gap by what is longer":   {RetryPolicy{Schedule: []time.Duration{h, 10 * h}, MaxAttempts: 3, Jitter: &none, RetryAfterMax: 3 * h}, 13 * h},
		"no receiver asks for so much": {RetryPolicy{MaxAttempts: 2, RetryAfterMax: math.MaxInt64}, maxDelay},
		"the longest there is":         {RetryPolicy{Schedule: []time.Duration{math.MaxInt64 / 2}, MaxAttempts: 1000, Jitter: &none}, math.MaxInt64},
	} {
		testkit.Equal(t, name, test.policy.Longest(), test.want)
	}
	p := RetryPolicy{MaxAttempts: 3, RetryAfterMax: 10 * h}
	if got, want := p.LongestWith(10*time.Second, time.Minute), 20*h+210*time.Second; got != want {
		t.Errorf("of a destination: %s, want %s", got, want)
	}
}
