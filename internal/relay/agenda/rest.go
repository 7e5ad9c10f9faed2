package agenda

import "time"

// A Rest is how long work beside delivering pauses.
type Rest struct {
	Least time.Duration
	Times int           // as long as the work took, if that is longer
	Most  time.Duration // however long the work took; 0: no bound
}

// After returns how long to rest after work that took so long.
func (r Rest) After(took time.Duration) time.Duration {
	rest := max(r.Least, time.Duration(r.Times)*took)
	if r.Most > 0 {
		rest = min(rest, max(r.Least, r.Most))
	}
	return rest
}

// RestFactor is how many times as long as it spent on finding nothing a cursor rests, and the
// watcher as long as its check took.
const RestFactor = 100

// LongestWork bounds the time on nothing that a rest follows, and so the rest to a minute. A server
// that stood still for 20 seconds during a claim would otherwise cost what lies behind the cursor
// half an hour.
const LongestWork = 600 * time.Millisecond
