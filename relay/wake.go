package relay

import (
	"sync/atomic"

	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// wakeup carries the reasons for which waiting goroutines look again. Each channel holds at most one token: a token
// says "look", not how often.
type wakeup struct {
	// For the claimer.
	room      chan struct{}      // a lane that wants more has room again
	tick      chan struct{}      // the safety tick
	notified  chan bool          // a producer committed while this relay was armed; true: look behind the positions too
	commits   atomic.Int64       // notifications of producers since the claimer last took their number
	lapsed    atomic.Bool        // producers had stopped to notify while this relay was armed, and notify again
	rescued   atomic.Bool        // the claims of a dead relay have ended since the claimer last looked
	listening atomic.Bool        // the session listens
	idle      atomic.Bool        // as of the claimer's last turn
	retries   *policy.RetryTimes // what this relay has put off is due again

	alerts chan struct{} // there may be alerts to send

	// For maintenance.
	parked   chan struct{} // there may be parked deliveries with a route
	routes   chan struct{} // the stored routes may have changed
	schema   chan struct{} // the schema may have changed under this relay
	reloaded chan struct{} // there may be an archive to plan anew, and removed lanes to empty
}

func newWakeup() *wakeup {
	token := func() chan struct{} { return make(chan struct{}, 1) }
	return &wakeup{
		room: token(), tick: token(), notified: make(chan bool, 1), retries: &policy.RetryTimes{}, alerts: token(),
		parked: token(), routes: token(), schema: token(), reloaded: token(),
	}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// notify wakes the claimer. A token that asks for a sweep replaces one that does not, so that no sweep is lost.
func (w *wakeup) notify(sweep bool) {
	for {
		select {
		case w.notified <- sweep:
			return
		default:
		}
		if !sweep {
			return
		}
		select {
		case <-w.notified:
		default:
		}
	}
}
