package inbox

import (
	"errors"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/internal/sqlstate"
	"github.com/outbox-relay/outbox-relay/consumer/internal/verdict"
)

// longestDelay bounds the delay that a handler may ask for to what a timestamp can hold.
const longestDelay = 10 * 365 * 24 * time.Hour

// completeRetries checks the settings of retries and fills in their defaults. The schedule is that
// of relays, see DefaultSchedule in internal/relay/policy/retry.go, which receivers may not import.
func (c *Config) completeRetries() error {
	if len(c.Schedule) == 0 {
		c.Schedule = []time.Duration{5 * time.Second, 30 * time.Second, 5 * time.Minute, 30 * time.Minute, 4 * time.Hour}
	}
	c.Schedule = append([]time.Duration(nil), c.Schedule...)
	for i, delay := range c.Schedule {
		if delay < 0 || delay > longestDelay {
			return fmt.Errorf("inbox: Config.Schedule[%d] is %v: set 0 to %v", i, delay, longestDelay)
		}
	}
	if c.Jitter == nil {
		jitter := defaultJitter
		c.Jitter = &jitter
	}
	if !(0 <= *c.Jitter && *c.Jitter <= 1) { // NaN too
		return fmt.Errorf("inbox: Config.Jitter is %v: set 0 to 1", *c.Jitter)
	}
	if c.MaxAttempts < 0 {
		return fmt.Errorf("inbox: Config.MaxAttempts is negative: %d", c.MaxAttempts)
	}
	if c.MaxAttempts == 0 {
		c.MaxAttempts = defaultMaxAttempts
	}
	return nil
}

// settlement is what an attempt without success writes to the event's row.
type settlement struct {
	state    State // StatePending or StateFailed
	attempts int   // how many were spent: 1, or 0 when the handler is not to blame
	// interrupted says that the event itself may be to blame, if it happens often. Of a lock that
	// did not come another session is.
	interrupted bool
	after       time.Duration
	text        string // why, redacted
}

// errStopping ends the context of a handler that is still running at the end of DrainTimeout.
var errStopping = errors.New("the inbox is stopping")

// errInterrupted marks an attempt that lost its connection. The handler's error, if any, says
// nothing about the handler.
var errInterrupted = errors.New("the connection of the handler's transaction was lost")

// errKeyHeld marks an attempt that waited too long for the lock of its ordering key.
var errKeyHeld = errors.New("the lock of the event's ordering key did not come")

// errNoPayload marks an event whose payload an operator has removed, such as for personal data in
// it.
var errNoPayload = errors.New("the event's payload was removed, so there is nothing to work")

// errDropped is memory.ErrAborted for a handler of an inbox.
var errDropped = errors.New("a statement of the handler failed and the handler returned nil all the same")

const (
	// maxInterruptions is how many times in a row the work on an event may be cut off, by the death
	// of its worker or by the database, before the event itself is taken for the cause.
	maxInterruptions = 20

	// conflictDelay is the delay after an attempt that the database cut off.
	conflictDelay = time.Second

	crashLoopText = "given up: its worker died before the handler returned, again and again"
)

// settlementOf returns what to write down about an attempt that ended with err. spent and
// interruptions are what the row held before; fraction, in [0, 1), chooses within the jitter.
func (c *Config) settlementOf(err error, spent, interruptions int, fraction float64) settlement {
	o := settlement{state: StatePending}
	if errors.Is(err, errInterrupted) || errors.Is(err, errKeyHeld) || sqlstate.IsConflict(err) && !verdict.IsMarked(err) { // the handler's own word goes before
		// The database was in the way. That spends no attempt, but must not repeat for ever, unless
		// it was another session's lock.
		o.after = jittered(conflictDelay, *c.Jitter, fraction)
		if o.interrupted = !errors.Is(err, errKeyHeld); o.interrupted && interruptions+1 >= maxInterruptions {
			o.state = StateFailed
		}
		return o
	}
	o.attempts = 1
	v := verdict.Of(err)
	switch {
	case v.Action == verdict.Fail || spent+1 >= c.MaxAttempts:
		o.state = StateFailed
	case v.Timed:
		o.after = min(v.After, longestDelay)
	default:
		o.after = jittered(c.Schedule[min(spent, len(c.Schedule)-1)], *c.Jitter, fraction)
	}
	return o
}

func jittered(delay time.Duration, jitter, fraction float64) time.Duration {
	return delay + time.Duration(float64(delay)*jitter*fraction)
}
