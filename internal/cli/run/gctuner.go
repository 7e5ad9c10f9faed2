package run

import (
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/relay"
)

// What a gcTuner counts as busy, and how much garbage it allows then.
const (
	busyStep       = 100 * time.Millisecond
	busyDeliveries = 100 // claimed in one step
	quietAfter     = time.Second

	usualPercent = 100 // GOGC's default: the heap may grow by its own size between two collections
	mostPercent  = 400
	garbageRoom  = 32 << 20 // bytes by which the heap may grow at least while the relay is busy, as far as mostPercent allows
)

// A gcTuner makes garbage collections rarer while much is delivered. Each marks all that stays in
// memory, which for a small heap costs a tenth of the relay's processor time. With little to do the
// relay collects as usual, and stays small.
type gcTuner struct {
	live []metrics.Sample

	mu      sync.Mutex // guards the fields below
	percent int        // as set last
	begun   time.Time  // the step
	claimed int        // in the step
	busyAt  time.Time
}

// newGCTuner returns nil if GOGC is set, which then decides alone.
func newGCTuner() *gcTuner {
	set := []metrics.Sample{{Name: "/gc/gogc:percent"}}
	metrics.Read(set)
	if set[0].Value.Kind() != metrics.KindUint64 || set[0].Value.Uint64() != usualPercent {
		return nil
	}
	return &gcTuner{live: []metrics.Sample{{Name: "/gc/heap/live:bytes"}}, percent: usualPercent}
}

// hooks returns hooks that follow how much is claimed, and call next. A nil gcTuner returns next.
func (t *gcTuner) hooks(next relay.Hooks) relay.Hooks {
	if t == nil {
		return next
	}
	hooks := next
	hooks.ClaimRan = func(deliveries int, took time.Duration) {
		t.note(time.Now(), deliveries)
		if next.ClaimRan != nil {
			next.ClaimRan(deliveries, took)
		}
	}
	hooks.Idle = func() {
		t.mu.Lock()
		t.set(usualPercent)
		t.mu.Unlock()
		if next.Idle != nil {
			next.Idle()
		}
	}
	return hooks
}

// note records a claim.
func (t *gcTuner) note(now time.Time, deliveries int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if now.Sub(t.begun) >= busyStep {
		t.begun, t.claimed = now, 0
	}
	t.claimed += deliveries
	switch {
	case t.claimed >= busyDeliveries:
		t.busyAt = now
		metrics.Read(t.live)
		t.set(busyPercent(t.live[0].Value.Uint64()))
	case now.Sub(t.busyAt) >= quietAfter:
		t.set(usualPercent)
	}
}

// busyPercent returns the GOGC of a busy relay by how many bytes the last collection left. The
// larger the heap, the less it gains from rare collections, and the more memory they would take.
// Hundreds alone, because each change stops all goroutines for a moment.
func busyPercent(live uint64) int {
	percent := garbageRoom * 100 / max(live, 1)
	return max(usualPercent, int(min(percent, mostPercent))/100*100)
}

// set sets GOGC. The caller holds mu.
func (t *gcTuner) set(percent int) {
	if percent != t.percent {
		t.percent = percent
		debug.SetGCPercent(percent)
	}
}
