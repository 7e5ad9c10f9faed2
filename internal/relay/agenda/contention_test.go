package agenda

import (
	"testing"
	"time"
)

// A relay tries ever more rarely while another one has the lock. A claim that was made ends that.
func TestFront(t *testing.T) {
	t.Parallel()
	var f Contention
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

// A relay that gets no turn for long claims without the lock for a while. A turn, or a pause, ends
// the count.
func TestFrontIsHeldForLong(t *testing.T) {
	t.Parallel()
	var f Contention
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	refusedFor := func(long time.Duration) {
		t.Helper()
		for until := now.Add(long); now.Before(until); now = f.Next {
			if f.Record(now, true); f.Alone(now) {
				t.Fatalf("alone after %s", long-until.Sub(now))
			}
		}
	}
	refusedFor(SharedFor - longestRetry)
	f.Record(now, false)
	refusedFor(SharedFor - longestRetry)
	now = now.Add(SharedFor)
	refusedFor(SharedFor)
	f.Record(now, true)
	if f.Next != now {
		t.Errorf("the first claim without the lock is made at %s, not at once", f.Next)
	}
	if !f.Alone(now) || !f.Alone(now.Add(AloneFor-1)) || f.Alone(now.Add(AloneFor)) || now.Before(f.Next) {
		t.Errorf("refused for long: %+v", f)
	}
	f.Record(now, false)
	if !f.Alone(now) {
		t.Error("a claim of before ends it")
	}
	now = now.Add(AloneFor)
	refusedFor(SharedFor)
}
