package session

import (
	"testing"
	"time"
)

// Of many notifications a few cause something at once, and one more at the next beat makes up for
// the others.
func TestThrottle(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	throttle := newThrottle(sweepsPerSecond, burstOfSweeps)
	if throttle.takeRefused() {
		t.Error("nothing was refused")
	}
	allowed := 0
	for range 1000 {
		if throttle.allow(now) {
			allowed++
		}
	}
	if allowed != burstOfSweeps || !throttle.takeRefused() || throttle.takeRefused() {
		t.Errorf("%d allowed, and the others are not made up for once", allowed)
	}
	throttle.allow(now)
	if !throttle.allow(now.Add(time.Second)) || throttle.takeRefused() {
		t.Error("one that is allowed makes up for those before it")
	}
}
