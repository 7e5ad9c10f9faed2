package policy

import (
	"testing"
	"time"
)

// A relay tries ever more rarely while another one has the lock, and claims without it in the end. Each claim that was made begins
// anew.
func TestFront(t *testing.T) {
	t.Parallel()
	var f Front
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	if !f.Exclusive(now) || now.Before(f.Next) {
		t.Errorf("at first: %+v", f)
	}
	first, tries := now, 0
	for ; f.Exclusive(now); now = f.Next {
		f.Record(now, true)
		if wait := f.Next.Sub(now); wait < firstRetry || wait > longestRetry {
			t.Fatalf("try %d is followed by the next after %s", tries, wait)
		}
		tries++
	}
	if waited := now.Sub(first); waited < frontPatience || waited > frontPatience+longestRetry || tries > 20 {
		t.Errorf("without the lock after %s and %d tries", waited, tries)
	}
	f.Record(now, false)
	if !f.Exclusive(now) || now.Before(f.Next) {
		t.Errorf("after a claim: %+v", f)
	}
}
