package relay

import "errors"

// Asleep is what [Relay.Run] ends with when there has been nothing to do for Config.SleepAfter. The
// relay is still registered, without a session: who ran it writes its heartbeat and listens, until
// another relay resumes the registration. See package internal/outboxes.
type Asleep struct {
	RelayID int32  // for Config.Resume
	Schema  string // where its tables are
}

// Error says why there is no relay.
func (*Asleep) Error() string { return "asleep: there is nothing to do" }

func isAsleep(err error) bool { return errors.As(err, new(*Asleep)) }

// idle reports whether this relay has nothing to do.
func (r *Relay) idle() bool { return r.mailbox.idle.Load() && !r.archiving.Load() }
