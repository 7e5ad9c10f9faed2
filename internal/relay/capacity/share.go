package capacity

import "github.com/outbox-relay/outbox-relay/internal/relay/policy"

// A Sharer is a lane that shares the relay's capacity: how many requests there may be at once.
type Sharer struct {
	State    policy.BreakerState
	Allowed  int  // how many requests a trial may have in flight
	InFlight int  // how many there are
	Active   bool // has something to send
}

// A Division is how lanes share the relay's capacity. A lane whose breaker is not closed takes of
// it what it has in flight, and what its trial may have: were it a sharer like the others, a
// destination that is down would halve what they may send.
type Division struct {
	rest   int // of the capacity, for the lanes whose breakers are closed
	usable int // how many those are
	active int // how many of those have something to send
	fair   int // most for a lane on trial
}

// Divide divides the relay's capacity.
func Divide(capacity int, sharers []Sharer) (d Division) {
	trials := 0
	for _, s := range sharers {
		switch s.State {
		case policy.BreakerClosed:
			d.usable++
			if s.Active {
				d.active++
			}
		case policy.BreakerHalfOpen:
			trials++
		}
	}
	d.fair = max(1, capacity/max(1, d.active+trials))
	d.rest = capacity
	for _, s := range sharers {
		switch s.State {
		case policy.BreakerOpen:
			d.rest -= s.InFlight
		case policy.BreakerHalfOpen:
			d.rest -= max(s.InFlight, min(s.Allowed, d.fair))
		}
	}
	return d
}

// Part returns how much of the capacity a lane may have, at least 1. One that has nothing to send
// gets as much as if all lanes had something: they may all get something now.
func (d Division) Part(state policy.BreakerState, active bool) int {
	switch {
	case state != policy.BreakerClosed:
		return d.fair
	case active:
		return max(1, d.rest/max(1, d.active))
	}
	return max(1, d.rest/max(1, d.usable))
}
