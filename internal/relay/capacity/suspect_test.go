package capacity

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestSuspectsWaitLonger(t *testing.T) {
	t.Parallel()
	for rescues, want := range map[int]time.Duration{
		SuspectFrom: time.Second, SuspectFrom + 1: 2 * time.Second, CrashLoop - 1: 128 * time.Second, 32767: 10 * time.Minute,
	} {
		if got := SuspectWait(rescues); got != want {
			t.Errorf("after %d: %s, want %s", rescues, got, want)
		}
	}
}

// Requests that are sent alone, while all others wait, take a tenth of a relay's time at the most.
func TestSolitudeIsRare(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	var s Solitude
	if s.Reserve(now) != 0 || s.Reserve(now) == 0 {
		t.Fatal("not exactly one at a time")
	}
	now = now.Add(2 * time.Second)
	s.end(now)
	testkit.Equal(t, "wait of the next", s.Reserve(now), 18*time.Second)
	for range aloneEnough - 1 {
		now = now.Add(18 * time.Second)
		if wait := s.Reserve(now); wait != 0 || s.HasEnough() {
			t.Errorf("then in %s, enough %t", wait, s.HasEnough())
		}
		now = now.Add(2 * time.Second)
		s.end(now)
	}
	if !s.HasEnough() {
		t.Error("a relay that survived them continues sending suspects alone")
	}
}
