package agenda

import (
	"slices"
	"sync"
	"time"
)

// RetryTimes are when deliveries that this relay has put off are due. Without them a retry would
// wait for the next tick, which may come later than all of its delay. Only near ones are kept, in
// steps, so that there are never more than a few thousand, whatever fails: to a long delay a tick
// adds next to nothing. They are safe for concurrent use. Nothing wakes the claimer for a new one.
type RetryTimes struct {
	mu    sync.Mutex
	begun time.Time   // what the steps are counted from
	at    []time.Time // ascending
}

const (
	dueAhead = 10 * time.Minute
	dueStep  = 100 * time.Millisecond
)

// Add adds the time that lies so far behind now.
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

// Plan registers the earliest time in an agenda, and forgets those that have passed.
func (d *RetryTimes) Plan(a *Agenda, now time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.at) == 0 {
		return
	}
	a.At(CauseRetry, d.at[0])
	past := 0
	for past < len(d.at) && !now.Before(d.at[past]) {
		past++
	}
	d.at = slices.Delete(d.at, 0, past)
}
