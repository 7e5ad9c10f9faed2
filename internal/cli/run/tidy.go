package run

import (
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/relay"
)

const (
	startingTakes = 5 * time.Second // then a relay has started
	tidyEvery     = 15 * time.Second
)

// A tidier gives memory back to the system: once after the start, and then each tidyEvery in which
// the relay claimed nothing. An idle relay would otherwise keep for days what its start, a scrape
// or a look at the page has used.
type tidier struct {
	claimed atomic.Int64 // since the last look
}

// hooks returns hooks that follow how much is claimed, and call next.
func (t *tidier) hooks(next relay.Hooks) relay.Hooks {
	hooks := next
	hooks.ClaimRan = func(deliveries int, took time.Duration) {
		t.claimed.Add(int64(deliveries))
		if next.ClaimRan != nil {
			next.ClaimRan(deliveries, took)
		}
	}
	return hooks
}

// run returns when ended is closed.
func (t *tidier) run(ended <-chan struct{}) {
	timer := time.NewTimer(startingTakes)
	defer timer.Stop()
	for first := true; ; first = false {
		select {
		case <-timer.C:
			timer.Reset(tidyEvery)
		case <-ended:
			return
		}
		if t.claimed.Swap(0) == 0 || first {
			debug.FreeOSMemory()
			cli.ReleaseProgram()
		}
	}
}
