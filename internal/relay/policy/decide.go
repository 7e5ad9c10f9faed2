package policy

import (
	"fmt"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// FailurePolicy says what becomes of an ordering key whose delivery failed for good.
type FailurePolicy string

const (
	// BlockFailed keeps the later deliveries of the key waiting until an operator replays or
	// discards the failed one.
	BlockFailed FailurePolicy = "block"
	// SkipFailed continues with the next delivery of the key.
	SkipFailed FailurePolicy = "skip"
)

// Circumstances are what bears on the outcome of a claim besides its result. For a claim that sent
// nothing the zero value is enough.
type Circumstances struct {
	Attempt   int         // number of the request, from 1
	Retry     RetryPolicy // with its defaults
	Fraction  float64     // in [0, 1), chooses within the jitter
	Responses Responses
	OnFailure FailurePolicy

	AtFault       bool // the breaker blames the destination as a whole: the delivery keeps its attempt
	AlreadyPaused bool // an earlier 410 has paused the destination
	Ordered       bool // the delivery has an ordering key
	LastOfRun     bool // and is the last of those that were claimed together

	LogDelivered bool
}

// A Decision is what is written about a claim.
type Decision struct {
	Result
	Outcome  Outcome
	Delay    time.Duration // until the next attempt, for Retry
	Blocks   bool          // the later deliveries of its ordering key must wait
	FreesKey bool          // the next delivery of its ordering key can be claimed
	Logged   bool          // its attempt is written to the log
	// PausesDestination: its receiver said that it is gone for good.
	PausesDestination bool
}

// Decide returns what is written about a claim. Nothing else decides that, and nothing changes it
// afterwards.
func Decide(v Result, c Circumstances) Decision {
	d := Decision{Result: v, Outcome: outcomeOf(v, c)}
	if d.Outcome == Retry {
		// That this relay had to stop says nothing against the delivery: it gets another attempt,
		// though this was the last.
		if c.Attempt >= c.Retry.MaxAttempts && v.Reason != ReasonShutdown {
			d.Outcome = Fail
			d.Message = plain.Clip(fmt.Sprintf("attempt %d of %d: %s", c.Attempt, c.Retry.MaxAttempts, v.Message))
		} else {
			d.Delay = c.Retry.DelayAfter(c.Attempt, c.Fraction, v.RetryAfter)
		}
	}
	d.Blocks = d.Outcome != Delivered && !(d.Outcome == Fail && c.OnFailure == SkipFailed)
	d.FreesKey = c.Ordered && (c.LastOfRun && !d.Blocks || v.Reason == ReasonLease)
	d.PausesDestination = d.Outcome == Fail && v.Gone()
	d.Logged = v.Posted && (d.Outcome != Delivered || c.LogDelivered)
	return d
}

// outcomeOf returns the outcome before the number of attempts counts. The table of statuses follows
// what each says about the same request later: will it be accepted (Retry) or never (Fail)?
func outcomeOf(v Result, c Circumstances) Outcome {
	switch v.Reason {
	case ReasonOK:
		return Delivered
	case ReasonInvalidEvent, ReasonTooLarge, ReasonEventMissing, ReasonCrashLoop, ReasonNotAfter:
		return Fail
	case ReasonGone:
		if c.AlreadyPaused { // one has to fail; the others in flight are retried, when the destination is resumed
			return Retry
		}
		return Fail
	}
	switch {
	case !v.Posted:
		return Hold
	case slices.Contains(c.Responses.Fail, v.StatusCode):
		return Fail
	case v.Reason == ReasonRejected && !slices.Contains(c.Responses.Retry, v.StatusCode):
		return Fail
	case c.AtFault:
		return Hold
	}
	return Retry
}
