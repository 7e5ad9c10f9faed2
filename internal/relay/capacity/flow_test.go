package capacity

import (
	"math"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// A simulation of one lane, in virtual time.
type simulation struct {
	flow    Flow
	now     time.Time
	latency func(inFlight int) time.Duration
	accepts func(now time.Time) bool
	asks    func(now time.Time) time.Duration // when to come back, with a refusal
	arrive  float64                           // events a second; 0: there is always more to send

	arrived  float64         // events, with the part of the next one
	queue    []time.Time     // when each event that waits arrived
	waits    []time.Duration // of each event, until it was sent
	inFlight []answer
	asleep   time.Time // until when the next request waits for its turn
	accepted int
	refused  int
	most     int
}

type answer struct {
	sent, at   time.Time
	ok         bool
	retryAfter time.Duration
}

// run lets the time pass in milliseconds.
func (s *simulation) run(d time.Duration) {
	s.accepted, s.refused, s.most, s.waits = 0, 0, 0, nil
	for end := s.now.Add(d); s.now.Before(end); s.now = s.now.Add(time.Millisecond) {
		waiting := s.inFlight[:0]
		for _, a := range s.inFlight {
			if a.at.After(s.now) {
				waiting = append(waiting, a)
				continue
			}
			reason := policy.ReasonRateLimited
			if a.ok {
				reason = policy.ReasonOK
				s.accepted++
			} else {
				s.refused++
			}
			s.flow.Answered(s.now, reason, a.at.Sub(a.sent), a.retryAfter)
		}
		s.inFlight = waiting
		for s.arrived += s.arrive / 1000; s.arrived >= 1; s.arrived-- {
			s.queue = append(s.queue, s.now)
		}
		for len(s.inFlight) < s.flow.Concurrency() && !s.now.Before(s.asleep) && (s.arrive == 0 || len(s.queue) > 0) {
			if wait := s.flow.Wait(s.now); wait > 0 {
				s.asleep = s.now.Add(wait)
				break
			}
			if s.arrive > 0 {
				s.waits, s.queue = append(s.waits, s.now.Sub(s.queue[0])), s.queue[1:]
			}
			latency := s.latency(len(s.inFlight) + 1)
			s.inFlight = append(s.inFlight, answer{sent: s.now, at: s.now.Add(latency), ok: s.accepts(s.now)})
			if a := &s.inFlight[len(s.inFlight)-1]; !a.ok {
				a.retryAfter = s.asks(s.now)
			}
		}
		s.most = max(s.most, len(s.inFlight))
	}
}

func simulate(most int, configured float64) *simulation {
	return &simulation{
		flow: New(most, configured), now: time.Unix(1_000_000, 0),
		latency: func(int) time.Duration { return 5 * time.Millisecond },
		accepts: func(time.Time) bool { return true },
		asks:    func(time.Time) time.Duration { return 0 },
	}
}

// bucket accepts so many a second, and a burst after a rest.
func bucket(perSecond, burst float64) func(time.Time) bool {
	tokens := burst
	var last time.Time
	return func(now time.Time) bool {
		if !last.IsZero() {
			tokens = min(burst, tokens+now.Sub(last).Seconds()*perSecond)
		}
		last = now
		if tokens < 1 {
			return false
		}
		tokens--
		return true
	}
}

// after refuses everything for a while.
func after(d time.Duration, accepts func(time.Time) bool) func(time.Time) bool {
	var first time.Time
	return func(now time.Time) bool {
		if first.IsZero() {
			first = now
		}
		return now.Sub(first) > d && accepts(now)
	}
}

// windows accepts so many in each second of the clock.
func windows(perSecond int) func(time.Time) bool {
	used, window := 0, int64(0)
	return func(now time.Time) bool {
		if now.Unix() != window {
			used, window = 0, now.Unix()
		}
		used++
		return used <= perSecond
	}
}

// However a receiver counts: the lane settles near what it bears, with few refusals.
func TestFlowFindsTheRateThatTheReceiverBears(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		accepts func(time.Time) bool
		rate    float64
	}{
		"no burst":         {bucket(50, 1), 50},
		"a small burst":    {bucket(50, 5), 50},
		"a second's burst": {bucket(50, 50), 50},
		"windows":          {windows(50), 50},
		"none at first":    {after(20*time.Second, bucket(50, 5)), 50},
		"slow":             {bucket(2, 2), 2},
		"fast":             {bucket(2000, 100), 2000},
	} {
		s := simulate(64, 0)
		s.accepts = c.accepts
		s.run(30 * time.Second)
		s.run(30 * time.Second)
		perSecond := float64(s.accepted) / 30
		refused := float64(s.refused) / float64(s.accepted+s.refused)
		t.Logf("%s: %.1f/s accepted, %.2f %% refused, found %.1f/s", name, perSecond, 100*refused, s.flow.Paced())
		if math.Abs(perSecond-c.rate) > 0.2*c.rate || refused > 0.05 {
			t.Errorf("%s: %.1f/s of %.1f/s accepted, %.1f %% refused", name, perSecond, c.rate, 100*refused)
		}
	}
}

// A receiver that comes to bear more is found out, and one that stops refusing is in the end not
// paced at all.
func TestFlowFollowsItsReceiver(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	s := simulate(64, 0)
	s.accepts = bucket(50, 5)
	s.run(30 * time.Second)
	s.accepts = bucket(200, 20)
	s.run(3 * time.Minute)
	s.run(30 * time.Second)
	if perSecond := float64(s.accepted) / 30; perSecond < 160 {
		t.Errorf("%.1f/s of 200/s", perSecond)
	}
	s.accepts = bucket(20, 5)
	s.run(30 * time.Second)
	s.run(30 * time.Second)
	if perSecond := float64(s.accepted) / 30; perSecond < 16 || perSecond > 24 {
		t.Errorf("%.1f/s of 20/s", perSecond)
	}
	s.latency = func(int) time.Duration { return time.Second } // now that alone holds it back
	s.accepts = func(time.Time) bool { return true }
	s.run(10 * time.Minute)
	if s.flow.found != 0 || s.most != 64 {
		t.Errorf("still paced at %.1f/s, %d at once", s.flow.found, s.most)
	}
}

func TestFlowReachesWhatIsConfigured(t *testing.T) {
	t.Parallel()
	s := simulate(64, 0)
	s.run(time.Second)
	testkit.Equal(t, "at once", s.most, 64)
	// After a time of 503s too.
	for range 20 {
		s.now = s.now.Add(time.Second)
		s.flow.Answered(s.now, policy.ReasonUnavailable, time.Millisecond, 0)
	}
	testkit.Equal(t, "requests at once while it is unavailable", s.flow.Concurrency(), 1)
	s.run(10 * time.Second)
	testkit.Equal(t, "at once after recovery", s.most, 64)
}

func TestConfiguredRateIsKept(t *testing.T) {
	t.Parallel()
	s := simulate(64, 20)
	s.run(10 * time.Second)
	if s.accepted < 195 || s.accepted > 205 || s.most > 20 {
		t.Errorf("%d in ten seconds at 20/s, %d at once", s.accepted, s.most)
	}
	s.accepts = bucket(10, 1) // the receiver bears less than was configured
	s.run(30 * time.Second)
	s.run(10 * time.Second)
	if s.accepted < 80 || s.accepted > 110 {
		t.Errorf("%d in ten seconds at 10/s", s.accepted)
	}
}

// A receiver whose answers take longer the more there are at once is not pushed to where they take
// for ever.
func TestFlowYieldsToLatency(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	s := simulate(1000, 0)
	s.latency = func(inFlight int) time.Duration { // eight at a time are at ease
		return 20 * time.Millisecond * time.Duration(max(1, inFlight/8))
	}
	s.run(time.Minute)
	s.run(10 * time.Second)
	if s.most < 8 || s.most > 100 || s.accepted < 3000 {
		t.Errorf("%d at once, %d in ten seconds", s.most, s.accepted)
	}

	// One that is slow for every single answer gets all that may be.
	s = simulate(100, 0)
	s.latency = func(int) time.Duration { return 300 * time.Millisecond }
	s.run(time.Minute)
	s.run(10 * time.Second)
	if s.most < 95 || s.accepted < 3000*85/100 {
		t.Errorf("%d at once, %d in ten seconds", s.most, s.accepted)
	}
}

// A receiver that is found not to bear more than one request at once, and then answers slowly, but
// any number, gets all that may be.
func TestFlowLeavesItsFloor(t *testing.T) {
	t.Parallel()
	s := simulate(64, 0)
	for range 20 {
		s.now = s.now.Add(4 * time.Second)
		s.flow.Answered(s.now, policy.ReasonTimeout, 3*time.Second, 0)
	}
	testkit.Equal(t, "requests at once after timeouts", s.flow.Concurrency(), 1)
	s.latency = func(int) time.Duration { return 2 * time.Second }
	s.run(2 * time.Minute)
	s.run(10 * time.Second)
	testkit.Equal(t, "at once, when answers are slow", s.most, 64)
}

// A receiver that says when to come back gets nothing until then, one request at once then, and
// soon as many as before.
func TestFlowWaitsAsAsked(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		says func(left time.Duration) time.Duration
		most int // requests in ten seconds, beside those on their way
	}{
		"until the end":   {func(left time.Duration) time.Duration { return left }, 1},
		"a second":        {func(time.Duration) time.Duration { return time.Second }, 10},
		"three seconds":   {func(time.Duration) time.Duration { return 3 * time.Second }, 4},
		"longer than any": {func(time.Duration) time.Duration { return 10 * time.Hour }, 0},
	} {
		s := simulate(64, 0)
		s.run(time.Second)
		before := s.accepted
		end := s.now.Add(10 * time.Second)
		s.accepts = func(now time.Time) bool { return !now.Before(end) }
		s.asks = func(now time.Time) time.Duration { return c.says(end.Sub(now)) }
		s.run(10*time.Second - time.Millisecond)
		if s.refused > 64+c.most {
			t.Errorf("%s: %d requests were refused", name, s.refused)
		}
		if name == "longer than any" {
			s.run(maxClosed - 7*time.Second) // it stays closed for that long
		} else {
			s.run(3 * time.Second)
		}
		s.run(2 * time.Second)
		if s.accepted < 3*before/2 || s.refused > 0 {
			t.Errorf("%s: %d accepted in two seconds, %d before in one; %d refused", name, s.accepted, before, s.refused)
		}
	}
}

// A receiver that bears fifty a second, and asks to come back in a second, is not kept busy finding
// that out.
func TestFlowWaitsAndFindsTheRate(t *testing.T) {
	t.Parallel()
	for _, burst := range []float64{1, 50} {
		s := simulate(64, 0)
		s.accepts = bucket(50, burst)
		s.asks = func(time.Time) time.Duration { return time.Second }
		s.run(30 * time.Second)
		s.run(30 * time.Second)
		if perSecond := float64(s.accepted) / 30; perSecond < 40 || s.refused > s.accepted/50 {
			t.Errorf("a burst of %g: %.1f/s of 50/s, %d refused", burst, perSecond, s.refused)
		}
	}
}

// A receiver that takes five seconds to answer still gets the ten requests a second that are
// allowed.
func TestRateIsReachedWhenAnswersTakeLong(t *testing.T) {
	t.Parallel()
	s := simulate(64, 10)
	s.latency = func(int) time.Duration { return 5 * time.Second }
	s.run(time.Minute)
	s.run(time.Minute)
	if s.accepted < 540 || s.accepted > 601 {
		t.Errorf("%d in a minute at 10/s, %d at once", s.accepted, s.most)
	}
}

func TestThroughput(t *testing.T) {
	t.Parallel()
	start := time.Unix(1_000_000, 0)
	var r Throughput
	if _, known := r.Measure(start, 50); known {
		t.Error("known at once")
	}
	if _, known := r.Measure(start.Add(rateWindow-1), 50); known {
		t.Error("known before the first window")
	}
	if got, known := r.Measure(start.Add(100*time.Millisecond), 50); !known || got != 1000 {
		t.Errorf("100 in 100 ms: %g (%t)", got, known)
	}
	if got, _ := r.Measure(start.Add(200*time.Millisecond), 200); got != 1250 {
		t.Errorf("a quarter of the way from 1000 to 2000: %g", got)
	}
	if got, _ := r.Measure(start.Add(time.Hour), 0); got != 1250 {
		t.Errorf("a pause changes it to %g", got)
	}
	if got, _ := r.Measure(start.Add(time.Hour+100*time.Millisecond), 125); got != 1250 {
		t.Errorf("the pause counts: %g", got)
	}
	// A clock that stands still or jumps back yields no infinity and no negative rate.
	for _, now := range []time.Time{start.Add(time.Hour), start.Add(-time.Hour), start.Add(2 * time.Hour)} {
		if got, _ := r.Measure(now, 1000); got < 0 || got > 1e12 {
			t.Errorf("%g", got)
		}
	}
}
