package relay

import (
	"sync/atomic"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
)

// wakeup is how the goroutines of a relay wake each other. Each channel holds at most one token.
type wakeup struct {
	// The mailbox of the claimer; see post and read.
	token     chan struct{}     // something was posted
	posted    atomic.Uint32     // agenda.Cause
	commits   atomic.Int64      // of which producers have notified this relay
	retries   agenda.RetryTimes // of what this relay has put off; they do not wake the claimer
	listening atomic.Bool       // the session listens for notifications
	idle      atomic.Bool       // what the claimer's last turn found, for the session

	alerts chan struct{} // there may be alerts to send

	// For maintenance.
	parked   chan struct{} // there may be parked deliveries with a route
	reparked chan struct{} // events were parked by routes that had changed
	routes   chan struct{} // the stored routes may have changed
	schema   chan struct{} // the schema may have changed under this relay
	reloaded chan struct{} // there may be another schedule of the archive, and removed lanes to empty
}

func newWakeup() *wakeup {
	token := func() chan struct{} { return make(chan struct{}, 1) }
	return &wakeup{token: token(), alerts: token(), parked: token(), reparked: token(), routes: token(), schema: token(), reloaded: token()}
}

// post makes the claimer take a turn for the given cause.
func (w *wakeup) post(cause agenda.Cause) {
	w.posted.Or(uint32(cause))
	signal(w.token)
}

// read returns and removes what was posted.
func (w *wakeup) read() (posted agenda.Cause, commits int) {
	select { // before the rest is read: a token that comes later may cost a turn, one that is lost would cost a wake-up
	case <-w.token:
	default:
	}
	return agenda.Cause(w.posted.Swap(0)), int(w.commits.Swap(0))
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
