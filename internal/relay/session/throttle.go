package session

import (
	"time"

	"golang.org/x/time/rate"
)

// How many notifications of one kind take effect in a second, and how many at once. A few more
// follow the first one of a burst, from producers that committed before they could see that the
// relay is awake.
const (
	looksPerSecond  = 10
	sweepsPerSecond = 1
	burstOfSweeps   = 3
)

// A throttle bounds how often notifications of one kind take effect. It belongs to one goroutine.
type throttle struct {
	limit   *rate.Limiter
	refused bool // whether the last notification was refused, so that the session has to catch up
}

func newThrottle(perSecond rate.Limit, burst int) throttle {
	return throttle{limit: rate.NewLimiter(perSecond, burst)}
}

// allow reports whether a notification at the given time may take effect.
func (t *throttle) allow(now time.Time) bool {
	allowed := t.limit.AllowN(now, 1)
	t.refused = !allowed
	return allowed
}

// takeRefused reports whether the last notification was refused, the first time that it is asked.
func (t *throttle) takeRefused() (refused bool) {
	refused, t.refused = t.refused, false
	return refused
}
