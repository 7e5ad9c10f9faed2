package bench

import (
	"strings"
	"testing"
	"time"
)

func TestLimits(t *testing.T) {
	t.Parallel()
	l := limits{window: time.Second, inFlight: 10, maxInFlight: 64, answer: 2, roundTrip: 0.2, rate: 900, busy: 0.5, relay: 0.3, server: 0.1, load: 0.1, processors: 2}
	with := func(change func(*limits)) limits {
		changed := l
		change(&changed)
		return changed
	}
	for want, limits := range map[string]limits{
		"the database's answers":                                 l,
		"the network to the database: a round trip takes 5.0 ms": with(func(l *limits) { l.roundTrip = 5 }),
		"the receiver's answers: 60 of 64 requests":              with(func(l *limits) { l.inFlight = 60 }),
		"the processors of this machine: 95 % of 2":              with(func(l *limits) { l.busy, l.inFlight = 0.95, 60 }),
		"relay used 0.3 processors, this command's producers and receiver 0.1, PostgreSQL 0.1, other programs 1.4: repeat": with(func(l *limits) { l.busy = 0.95 }),
		"PostgreSQL 1.4, other programs 0.1":             with(func(l *limits) { l.busy, l.server = 0.95, 1.4 }),
		"PostgreSQL and other programs 1.5":              with(func(l *limits) { l.busy, l.server = 0.95, 0 }),
		"rate_limit: 1000 requests/s":                    with(func(l *limits) { l.rateLimit = 1000 }),
		"the receiver, which refused or lost 3 requests": with(func(l *limits) { l.failures, l.busy = 3, 1 }),
		"unknown, since 90 ms are too short":             with(func(l *limits) { l.window, l.busy = 90*time.Millisecond, 1 }),
	} {
		if got := limits.String(); !strings.Contains(got, want) {
			t.Errorf("%+v: %q does not contain %q", limits, got, want)
		}
	}
}

// A few of the system's steps of 10 ms say nothing of an event.
func TestPer(t *testing.T) {
	t.Parallel()
	for used, counted := range map[time.Duration]bool{0: false, 20 * time.Millisecond: false, 100 * time.Millisecond: true} {
		if got := per(used, time.Microsecond, 1000); (got != nil) != counted || got != nil && *got != 100 {
			t.Errorf("per of %s is %v", used, got)
		}
	}
}
