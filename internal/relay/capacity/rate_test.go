package capacity

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// A share of refusals that does not depend on the rate does not keep it down: the lane delivers
// what comes as it comes, whether it begins without a rate or with that of a limit of one a second
// that is gone.
func TestShareOfRefusalsDoesNotKeepTheRateDown(t *testing.T) {
	t.Parallel()
	for _, share := range []float64{0.02, 0.06, 0.3} {
		for _, arrive := range testsize.Of([]float64{1, 5, 10, 100, 1000}, []float64{1, 5, 10, 100}) {
			for _, limited := range []bool{false, true} {
				t.Run(fmt.Sprintf("%g of %g a second, limited before: %t", share, arrive, limited), func(t *testing.T) {
					t.Parallel()
					for seed := range testsize.Of[uint64](5, 1) {
						s := simulate(64, 0)
						if limited {
							s.accepts = bucket(1, 2)
							s.run(time.Minute)
							if s.flow.found == 0 || s.flow.found > 2 {
								t.Fatalf("%.2f/s found of 1/s", s.flow.found)
							}
						}
						s.accepts, s.arrive = refuseSome(seed, share), arrive
						recovery := time.Duration(0)
						for limited && (len(s.queue) > 0 || s.flow.found != 0 && s.flow.found < 2*arrive) {
							if recovery += time.Second; recovery > 8*time.Minute {
								t.Fatalf("seed %d: %.2f/s found after %s", seed, s.flow.found, recovery)
							}
							s.run(time.Second)
						}
						s.run(2 * time.Minute)
						slices.Sort(s.waits)
						sent, median, wait := float64(len(s.waits)), s.waits[len(s.waits)/2], s.waits[len(s.waits)*9/10]
						t.Logf("seed %d: recovered in %s, sent %g, p50 %s, p90 %s", seed, recovery, sent, median, wait)
						if sent < 0.8*120*arrive || median > 0 {
							t.Errorf("seed %d: sent %g of %g; half has waited for more than %s", seed, sent, 120*arrive, median)
						}
					}
				})
			}
		}
	}
}

// At a receiver that bears so many a second, the lane gets about these, and overruns it little,
// however low the limit is.
func TestFlowSettlesAtALimit(t *testing.T) {
	t.Parallel()
	for _, limit := range testsize.Of([]float64{1, 5, 50, 500}, []float64{1, 5, 50}) {
		for _, burst := range []float64{max(2, limit/10), max(2, limit)} {
			for _, arrive := range []float64{0, 5 * limit} {
				s := simulate(64, 0)
				s.accepts, s.arrive = bucket(limit, burst), arrive
				s.run(2 * time.Minute)
				s.run(3 * time.Minute)
				perSecond := float64(s.accepted) / 180
				refused := float64(s.refused) / float64(s.accepted+s.refused)
				t.Logf("%g/s, a burst of %g, %g/s come: %.2f/s accepted, %.2f %% refused", limit, burst, arrive, perSecond, 100*refused)
				if perSecond < 0.8*limit || refused > 0.055 {
					t.Errorf("%g/s, a burst of %g, %g/s come: %.2f/s accepted, %.2f %% refused", limit, burst, arrive, perSecond, 100*refused)
				}
			}
		}
	}
}

// A receiver that refuses a share and has a limit, too, gets about its limit, and its share is not
// taken for the limit.
func TestFlowSettlesAtALimitBesideAShare(t *testing.T) {
	t.Parallel()
	for _, limit := range testsize.Of([]float64{50, 500}, []float64{50}) {
		s := simulate(64, 0)
		limited, some := bucket(limit, limit/10), refuseSome(1, 0.06)
		s.accepts = func(now time.Time) bool { return some(now) && limited(now) }
		s.run(2 * time.Minute)
		s.run(3 * time.Minute)
		accepted, sent := float64(s.accepted)/180, float64(s.accepted+s.refused)/180
		if t.Logf("%g/s: %.1f/s accepted, %.1f/s sent", limit, accepted, sent); accepted < 0.7*limit || sent > 1.25*limit {
			t.Errorf("%g/s: %.1f/s accepted, %.1f/s sent", limit, accepted, sent)
		}
	}
}

// A clock that is put back begins a round, rather than making it last until the clock has caught
// up.
func TestRoundOutlivesAClockThatWasPutBack(t *testing.T) {
	t.Parallel()
	var r refusals
	now := time.Unix(1_000_000, 0) // without a monotonic reading
	r.record(now, policy.ReasonOK, 0, true)
	now = now.Add(-time.Hour)
	for range roundAnswers {
		r.record(now, policy.ReasonOK, 0, true)
		now = now.Add(100 * time.Millisecond)
	}
	if !r.complete(now, true) {
		t.Errorf("%d answers since %s at %s are no round", r.answers(), r.began, now)
	}
}

// What a receiver asks for is known: to wait until a time, or for fewer requests than are
// configured.
func TestSlowdown(t *testing.T) {
	t.Parallel()
	s := simulate(8, 100)
	testkit.Equal(t, "before anything was sent", s.flow.Slowdown(s.now), (Slowdown{}))
	s.accepts = bucket(5, 2)
	s.run(time.Minute)
	if got := s.flow.Slowdown(s.now); got.PerSecond < 2 || got.PerSecond > 8 || !got.Until.IsZero() {
		t.Errorf("%+v of a receiver that bears 5 a second", got)
	}
	s.flow.Close(s.now, time.Second)
	for after, want := range map[time.Duration]time.Time{0: s.now.Add(time.Second), time.Second: {}} {
		if got := s.flow.Slowdown(s.now.Add(after)); !got.Until.Equal(want) {
			t.Errorf("after %s: until %s, want %s", after, got.Until, want)
		}
	}
	s.flow.Configure(s.now, 8, 1) // less than was found
	if got := s.flow.Slowdown(s.now); got.PerSecond != 0 {
		t.Errorf("slowed to %g by the configuration", got.PerSecond)
	}
}
