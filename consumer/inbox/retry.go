package inbox

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/internal/sqlstate"
	"github.com/outbox-relay/outbox-relay/consumer/internal/verdict"
)

// longestDelay keeps what a handler asks for within what a timestamp can hold.
const longestDelay = 10 * 365 * 24 * time.Hour

// completeRetries checks what decides about another attempt, and fills in its defaults.
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

// settlement is what is written down about an attempt that did not succeed.
type settlement struct {
	state    State // StatePending or StateFailed
	attempts int   // how many were spent: 1, or 0 when the handler is not to blame
	after    time.Duration
	text     string // why, redacted
}

// errStopping is the cause for which the context of a handler ends that Run does not wait for any longer.
var errStopping = errors.New("the inbox is stopping")

// errInterrupted is an attempt that was cut off: the handler's error, if there is one, says nothing about the handler.
var errInterrupted = errors.New("the connection of the handler's transaction was lost")

// errKeyHeld: another transaction has held the lock of the event's ordering key for too long.
var errKeyHeld = errors.New("the lock of the event's ordering key did not come")

// errNoPayload: an operator has removed what a handler would get, such as for what is personal in it.
var errNoPayload = errors.New("the event's payload was removed, so there is nothing to work")

// errDropped is memory.ErrAborted for a handler of an inbox.
var errDropped = errors.New("a statement of the handler failed and the handler returned nil all the same")

const (
	// maxInterruptions is how often in a row the work on an event may be cut off, by the death of its worker or by the
	// database, before the event is taken for the cause.
	maxInterruptions = 20

	// conflictDelay is when an attempt that the database or its loss cut off is repeated.
	conflictDelay = time.Second

	crashLoopText = "given up: its worker died before the handler returned, again and again"
)

// settlementOf returns what to write down about an attempt that ended with err. spent and
// interruptions are what the row held before; fraction, in [0, 1), chooses within the jitter.
func (c *Config) settlementOf(err error, spent, interruptions int, fraction float64) settlement {
	o := settlement{state: StatePending}
	if errors.Is(err, errInterrupted) || errors.Is(err, errKeyHeld) || sqlstate.IsConflict(err) && !verdict.IsMarked(err) { // the handler's own word goes before
		// The database was in the way. That spends no attempt; but it must not continue for ever
		// either.
		o.after = jittered(conflictDelay, *c.Jitter, fraction)
		if interruptions+1 >= maxInterruptions {
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

func jitterFraction() float64 { return rand.Float64() }

// endedBy returns why a handler's context ended, and nil while it has not.
func endedBy(ctx context.Context) error {
	if ctx.Err() == nil {
		return nil
	}
	return context.Cause(ctx)
}
