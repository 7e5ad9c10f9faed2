package run

import (
	"runtime/debug"
	"runtime/metrics"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/relay"
)

// percentInEffect returns GOGC as the runtime has it.
func percentInEffect() int {
	sample := []metrics.Sample{{Name: "/gc/gogc:percent"}}
	metrics.Read(sample)
	return int(sample[0].Value.Uint64())
}

// A busy relay collects rarely. One that becomes idle, or has had little to do for a while,
// collects as usual. Not parallel, because the whole process has one GOGC.
func TestGCTunerFollowsTheLoad(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(usualPercent))
	c := newGCTuner()
	ran, idle := 0, 0
	hooks := c.hooks(relay.Hooks{ClaimRan: func(int, time.Duration) { ran++ }, Idle: func() { idle++ }})
	hooks.ClaimRan(busyDeliveries-1, 0)
	testkit.Equal(t, "GOGC with little to do", percentInEffect(), usualPercent)
	hooks.ClaimRan(busyDeliveries, 0)
	if got := percentInEffect(); got <= usualPercent {
		t.Errorf("with much to do GOGC is %d, want more than %d", got, usualPercent)
	}
	hooks.Idle()
	testkit.Equal(t, "GOGC of an idle relay", percentInEffect(), usualPercent)
	now := time.Now().Add(time.Hour)
	c.note(now, busyDeliveries)
	c.note(now.Add(quietAfter-1), 1)
	if got := percentInEffect(); got <= usualPercent {
		t.Errorf("just after much work GOGC is %d, want more than %d", got, usualPercent)
	}
	c.note(now.Add(quietAfter), 1)
	testkit.Equal(t, "GOGC some time after much work", percentInEffect(), usualPercent)
	if ran != 2 || idle != 1 {
		t.Errorf("the next hooks were called %d and %d times, want 2 and 1", ran, idle)
	}
}

func TestGCTunerLeavesAGivenGOGC(t *testing.T) {
	for _, percent := range []int{50, 200, -1} {
		restore := debug.SetGCPercent(percent)
		c := newGCTuner()
		debug.SetGCPercent(restore)
		if c != nil {
			t.Errorf("GOGC of %d is not left as it is", percent)
		}
	}
	if c := (*gcTuner)(nil); c.hooks(relay.Hooks{}).ClaimRan != nil {
		t.Error("without a gcTuner there is a hook")
	}
}

func TestPercentOfABusyRelay(t *testing.T) {
	t.Parallel()
	for live, want := range map[uint64]int{
		0: mostPercent, 5 << 20: mostPercent, 8 << 20: mostPercent, 10 << 20: 300, 16 << 20: 200, 17 << 20: usualPercent, 1 << 30: usualPercent,
	} {
		if got := busyPercent(live); got != want {
			t.Errorf("with %d MiB in use GOGC is %d, want %d", live>>20, got, want)
		}
	}
}
