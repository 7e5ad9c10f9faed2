package relay

import (
	"slices"
	"time"
)

// scan returns the next scan of a walk. See docs/decisions/0065-one-claim-at-the-front.md.
func (w *walk) scan(class class, now time.Time, free int, after, until keyset) scan {
	shared := w.more && now.Before(w.shared)
	return scan{class: class, free: free, after: after, until: until, clear: w.more && w.clear, shared: shared}
}

// atFront leaves out shared scans until it is time to try again. A relay that claims without the lock keeps them.
func (c *claimer) atFront(now time.Time, scans []scan) []scan {
	if c.front.Alone(now) {
		for i := range scans {
			scans[i].alone = true
		}
		return scans
	}
	return slices.DeleteFunc(scans, func(s scan) bool {
		early := s.shared && now.Before(c.front.Next)
		if early {
			c.plan(c.front.Next)
		}
		return early
	})
}
