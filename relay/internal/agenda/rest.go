package agenda

import "time"

// A Rest is how long work beside delivering pauses.
type Rest struct {
	Least time.Duration
	Times int // as long as the work took, if that is longer
}

// After returns how long to rest after work that took so long.
func (r Rest) After(took time.Duration) time.Duration {
	return max(r.Least, time.Duration(r.Times)*took)
}
