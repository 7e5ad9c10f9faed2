package relay

import (
	"fmt"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// FailurePolicy says what becomes of an ordering key whose delivery failed for good.
type FailurePolicy string

const (
	// BlockFailed keeps the later deliveries of the key waiting until an operator replays or discards the failed one.
	BlockFailed FailurePolicy = "block"
	// SkipFailed goes on with the next delivery of the key.
	SkipFailed FailurePolicy = "skip"
)

// circumstances are what bears on the outcome of a claim besides its result. For a claim that sent nothing the zero value
// is enough.
type circumstances struct {
	attempt   int         // number of the request, from 1
	retry     RetryPolicy // with its defaults
	fraction  float64     // in [0, 1), chooses within the jitter
	responses Responses
	onFailure FailurePolicy

	atFault   bool // the breaker blames the destination as a whole: the delivery keeps its attempt
	paused    bool // an earlier 410 has paused the destination
	ordered   bool // the delivery has an ordering key
	lastOfRun bool // and is the last of those that were claimed together

	logDelivered bool
}

// A decision is what is written about a claim.
type decision struct {
	result
	outcome  Outcome
	delay    time.Duration // until the next attempt, for Retry
	blocks   bool          // the later deliveries of its ordering key must wait
	freesKey bool          // the next delivery of its ordering key can be claimed
	logged   bool          // its attempt is written to the log
}

// Decide returns what is written about a claim. Nothing else decides that, and nothing changes it afterwards.
func Decide(v result, c circumstances) decision {
	d := decision{result: v, outcome: outcomeOf(v, c)}
	if d.outcome == Retry {
		// That this relay had to stop says nothing against the delivery: it gets another attempt, though this was the last.
		if c.attempt >= c.retry.MaxAttempts && v.reason != ReasonShutdown {
			d.outcome = Fail
			d.message = plain.Clip(fmt.Sprintf("attempt %d of %d: %s", c.attempt, c.retry.MaxAttempts, v.message))
		} else {
			d.delay = c.retry.delay(c.attempt, c.fraction, v.retryAfter)
		}
	}
	d.blocks = d.outcome != Delivered && !(d.outcome == Fail && c.onFailure == SkipFailed)
	d.freesKey = c.ordered && (c.lastOfRun && !d.blocks || v.reason == ReasonLease)
	d.logged = v.posted && (d.outcome != Delivered || c.logDelivered)
	return d
}

// outcomeOf returns the outcome before the number of attempts counts. The table of statuses follows what each says about
// the same request later: will it be accepted (Retry) or never (Fail)?
func outcomeOf(v result, c circumstances) Outcome {
	switch v.reason {
	case ReasonOK:
		return Delivered
	case ReasonInvalidEvent, ReasonTooLarge, ReasonEventMissing, ReasonCrashLoop, ReasonHorizon:
		return Fail
	case ReasonGone:
		if c.paused { // one has to fail; the others in flight wait with the rest until the destination is resumed
			return Retry
		}
		return Fail
	}
	switch {
	case !v.posted:
		return Hold
	case slices.Contains(c.responses.Fail, v.statusCode):
		return Fail
	case v.reason == ReasonRejected && !slices.Contains(c.responses.Retry, v.statusCode):
		return Fail
	case c.atFault:
		return Hold
	}
	return Retry
}
