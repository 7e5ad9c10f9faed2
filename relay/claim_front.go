package relay

import (
	"slices"
	"time"
)

// scan returns the next scan of a walk. See docs/decisions/0065-one-claim-at-the-front.md
func (c *claimer) scan(class class, w *walk, now time.Time, free int, after, until keyset) scan {
	s := scan{class: class, free: free, after: after, until: until, clear: w.more && w.clear, shared: w.isShared(now)}
	s.exclusive = s.shared && c.front.Exclusive(now)
	return s
}

// atFront leaves out scans that ask for the lock of the front before it is time to try again.
func (c *claimer) atFront(now time.Time, scans []scan) []scan {
	return slices.DeleteFunc(scans, func(s scan) bool {
		early := s.exclusive && now.Before(c.front.Next)
		if early {
			c.plan(c.front.Next)
		}
		return early
	})
}

// isShared reports whether other relays are believed to claim where the walk has come to.
func (w *walk) isShared(now time.Time) bool { return w.more && now.Before(w.shared) }
