package policy

import (
	"slices"
	"sync"
	"time"
)

// RetryTimes are times at which to look. Without them a retry would wait for the next poll, which may come later than all of its
// delay. Only near ones are kept, in steps, so that there are never more than a few thousand, whatever fails: to a long delay
// a poll adds next to nothing. They are safe for concurrent use.
type RetryTimes struct {
	mu    sync.Mutex
	begun time.Time   // what the steps are counted from
	at    []time.Time // ascending
}

const (
	dueAhead = 10 * time.Minute
	dueStep  = 100 * time.Millisecond
)

// Add remembers to look when the given time has passed since now.
func (d *RetryTimes) Add(now time.Time, in time.Duration) {
	if in > dueAhead {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.begun.IsZero() {
		d.begun = now
	}
	at := d.begun.Add((now.Sub(d.begun) + in).Truncate(dueStep) + dueStep)
	if i, known := slices.BinarySearchFunc(d.at, at, time.Time.Compare); !known {
		d.at = slices.Insert(d.at, i, at)
	}
}

// Take reports whether it is time to look, and when it will be next; zero: unknown. What it has reported it forgets.
func (d *RetryTimes) Take(now time.Time) (due bool, next time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	past := 0
	for past < len(d.at) && !now.Before(d.at[past]) {
		past++
	}
	d.at = slices.Delete(d.at, 0, past)
	if len(d.at) > 0 {
		next = d.at[0]
	}
	return past > 0, next
}
