package relay

import (
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/send"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// An observer remembers what the hooks said.
type observer struct {
	mu       sync.Mutex
	changed  chan struct{} // closed by the next report
	claimed  int
	attempts []send.Attempt
	outcomes map[policy.Outcome]int // settled
	reasons  map[policy.Reason]int  // settled
	stale    int
	rescued  []int32
	idle     int
	notices  []notice
	failures map[string]int // failed statements, by operation
	errors   []error        // theirs
}

type notice struct {
	channel string
	alert   alert.Alert
	err     error
}

func newObserver() *observer {
	return &observer{changed: make(chan struct{}), outcomes: map[policy.Outcome]int{}, reasons: map[policy.Reason]int{}, failures: map[string]int{}}
}

func (o *observer) note(change func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	change()
	close(o.changed)
	o.changed = make(chan struct{})
}

// hooks returns hooks that remember, and then call next's where it has them.
func (o *observer) hooks(next Hooks) Hooks {
	return Hooks{
		Claimed: func(destination string, n int) {
			o.note(func() { o.claimed += n })
			if next.Claimed != nil {
				next.Claimed(destination, n)
			}
		},
		Attempted: func(a send.Attempt) {
			o.note(func() { o.attempts = append(o.attempts, a) })
			if next.Attempted != nil {
				next.Attempted(a)
			}
		},
		Settled: func(_ string, outcome policy.Outcome, reason policy.Reason, n int) {
			o.note(func() { o.outcomes[outcome] += n; o.reasons[reason] += n })
		},
		StaleSettle: func(n int) { o.note(func() { o.stale += n }) },
		Rescued: func(relayID int32) {
			o.note(func() { o.rescued = append(o.rescued, relayID) })
		},
		Idle: func() { o.note(func() { o.idle++ }) },
		Notified: func(channel string, alert alert.Alert, err error) {
			o.note(func() { o.notices = append(o.notices, notice{channel, alert, err}) })
		},
		Quarantined: next.Quarantined,
		Reloaded:    next.Reloaded,
		DatabaseError: func(operation string, err error) {
			o.note(func() { o.failures[operation]++; o.errors = append(o.errors, err) })
		},
	}
}

// await waits until what the hooks said so far makes done true.
func (o *observer) await(t testing.TB, what string, done func(*observer) bool) {
	t.Helper()
	deadline := time.After(relaytest.Patience)
	for {
		o.mu.Lock()
		ok, changed := done(o), o.changed
		o.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			o.mu.Lock()
			defer o.mu.Unlock()
			t.Fatalf("never came: %s; settled %v %v, stale %d, rescued %v, failed statements %v",
				what, o.outcomes, o.reasons, o.stale, o.rescued, o.failures)
		}
	}
}

// told returns what of an alert under one rule was sent, firing or resolved, in that order.
func (o *observer) told(rule string) (states []string) {
	for _, n := range o.notices {
		if n.alert.Rule == rule {
			states = append(states, n.alert.State())
		}
	}
	return states
}

// settles waits until n deliveries have had an outcome in total.
func (o *observer) settles(t testing.TB, outcome policy.Outcome, n int) {
	t.Helper()
	o.await(t, string(outcome), func(o *observer) bool { return o.outcomes[outcome] >= n })
}

// sees returns what get reads of the observer.
func sees[T any](o *observer, get func(*observer) T) T {
	o.mu.Lock()
	defer o.mu.Unlock()
	return get(o)
}
