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
