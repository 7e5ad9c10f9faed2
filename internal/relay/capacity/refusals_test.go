package capacity

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// refuseSome refuses a share of the requests, whatever their rate.
func refuseSome(seed uint64, share float64) func(time.Time) bool {
	random := rand.New(rand.NewPCG(seed, 1))
	return func(time.Time) bool { return random.Float64() >= share }
}

// A receiver that refuses a share of the requests, whatever their rate, is sent what comes as it
// comes, although it asks to come back later.
func TestFlowBearsAShareOfRefusals(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		refused, accepted float64 // of those that come, and of those that would be accepted
	}{
		{0.02, 0.97}, {0.06, 0.97}, {0.1, 0.97}, {0.2, 0.8}, {0.3, 0.8},
	} {
		for _, arrive := range []float64{2, 10, 50, 400, 2000} {
			for _, asks := range []time.Duration{0, 2 * time.Second, 30 * time.Second} {
				t.Run(fmt.Sprintf("%g of %g a second, %s", c.refused, arrive, asks), func(t *testing.T) {
					t.Parallel()
					var accepted, wanted float64
					var waits []time.Duration
					// Some ten thousand requests say enough; with the race detector each takes 15
					// µs.
					seeds, lasts := uint64(max(1, min(5, 1000/arrive))), min(time.Minute, time.Duration(60_000/arrive*float64(time.Second)))
					for seed := range seeds {
						s := simulate(64, 0)
						s.arrive = arrive
						s.accepts = refuseSome(seed, c.refused)
						s.asks = func(time.Time) time.Duration { return asks }
						s.run(lasts)
						accepted, wanted = accepted+float64(s.accepted), wanted+arrive*lasts.Seconds()*(1-c.refused)
						waits = append(waits, s.waits...)
					}
					slices.Sort(waits)
					if median := waits[len(waits)/2]; accepted < c.accepted*wanted || median > 0 {
						t.Errorf("%.1f %% of what would be accepted was; half has waited for more than %s", 100*accepted/wanted, median)
					}
				})
			}
		}
	}
}

// A receiver is closed to when it has refused all for a while, and a single refusal is no stop.
func TestStopOfAReceiver(t *testing.T) {
	t.Parallel()
	const ok, limited, unavailable = policy.ReasonOK, policy.ReasonRateLimited, policy.ReasonUnavailable
	for name, c := range map[string]struct {
		every   time.Duration
		answers []policy.Reason
		closed  bool
	}{
		"429 before anything was accepted": {time.Millisecond, []policy.Reason{limited}, true},
		"503 before anything was accepted": {time.Millisecond, []policy.Reason{unavailable}, true},
		"one 429":                          {time.Millisecond, []policy.Reason{ok, limited}, false},
		"one 503 after a pause":            {time.Minute, []policy.Reason{ok, unavailable}, false},
		"a second of refusals":             {400 * time.Millisecond, []policy.Reason{ok, limited, unavailable, limited, limited}, true},
		"less than a second":               {time.Second / 4, []policy.Reason{ok, limited, unavailable, limited, limited}, false},
		"many at once":                     {0, append([]policy.Reason{ok}, slices.Repeat([]policy.Reason{limited}, stopAnswers)...), true},
		"answers between":                  {time.Second, []policy.Reason{ok, limited, limited, limited, ok, limited, limited, limited}, false},
	} {
		f, now := New(8, 0), time.Unix(1_000_000, 0)
		for i, reason := range c.answers {
			now = now.Add(c.every)
			wait := time.Minute
			if reason == ok {
				wait = 0
			}
			f.Answered(now, reason, time.Millisecond, wait)
			if closed := now.Before(f.Reopens); closed != (c.closed && i == len(c.answers)-1) {
				t.Errorf("%s: closed after answer %d: %t", name, i+1, closed)
			}
		}
	}
}
