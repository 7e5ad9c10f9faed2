package policy

import (
	"testing"
	"time"
)

// A relay tries ever more rarely while another one has the lock. A claim that was made ends that.
func TestFront(t *testing.T) {
	t.Parallel()
	var f Front
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for range 2 {
		for i, want := range []time.Duration{4, 8, 16, 16} {
			f.Record(now, true)
			if wait := f.Next.Sub(now); wait != want*time.Millisecond {
				t.Errorf("try %d is followed by the next after %s", i, wait)
			}
			now = f.Next
		}
		if f.Record(now, false); now.Before(f.Next) {
			t.Errorf("after a claim the next waits until %s", f.Next)
		}
	}
}
