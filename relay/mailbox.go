package relay

import (
	"sync/atomic"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
)

// A mailbox is how other goroutines make the claimer act. It is safe for concurrent use.
type mailbox struct {
	token     chan struct{}     // something was posted
	posted    atomic.Uint32     // agenda.Cause
	commits   atomic.Int64      // of which producers have notified this relay
	retries   agenda.RetryTimes // of what this relay has put off; they do not wake the claimer
	listening atomic.Bool       // the session listens for notifications
	idle      atomic.Bool       // what the claimer's last turn found, for the session
}

func newMailbox() *mailbox { return &mailbox{token: make(chan struct{}, 1)} }

// post makes the claimer take a turn for the given cause.
func (m *mailbox) post(cause agenda.Cause) {
	m.posted.Or(uint32(cause))
	signal(m.token)
}

// read returns and removes what was posted.
func (m *mailbox) read() (posted agenda.Cause, commits int) {
	select { // before the rest is read: a token that comes later may cost a turn, one that is lost would cost a wake-up
	case <-m.token:
	default:
	}
	return agenda.Cause(m.posted.Swap(0)), int(m.commits.Swap(0))
}
