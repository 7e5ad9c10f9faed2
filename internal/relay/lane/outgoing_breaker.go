package lane

import (
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/capacity"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// RecordResult passes a result to breaker and flow: of a request that took so long, and that
// occupied its sender so long, with the wait for the destination's rate included. It reports
// whether the breaker blames the destination as a whole, and whether the claimer has something to
// write, or to plan.
func (o *outgoing) RecordResult(now time.Time, event int64, v *policy.Result, took, occupied time.Duration) (atFault, changed bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	write, pending := o.breaker.Write, o.breaker.Pending()
	atFault = o.breaker.RecordResult(now, event, v, min(o.share, o.flow.Concurrency()))
	if v.Posted {
		o.measurePost(occupied)
		o.flow.Answered(now, v.Reason, took, min(v.RetryAfter, o.Destination.Retry.RetryAfterMax))
	}
	return atFault, o.breaker.Write != write || o.breaker.Pending() != pending
}

// breakerAt returns a copy of the breaker, how long a trial holds it, how long the next request has
// to wait, and how much of that the destination has asked for.
func (o *outgoing) breakerAt(now time.Time) (b policy.Breaker, hold, untilTurn, asked time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.breaker, o.Destination.Timeout + policy.TryHold, o.flow.UntilTurn(now), max(0, o.flow.Reopens.Sub(now))
}

// Slowdown returns what the receiver asks for.
func (o *outgoing) Slowdown(now time.Time) capacity.Slowdown {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.flow.Slowdown(now)
}

// TellsOthers reports whether other relays deliver what this one gives back, and are to be told. Of
// a destination that has asked to wait they are told every five seconds: more is given back all the
// time, and each word makes every relay scan all of its lanes.
func (o *outgoing) TellsOthers(now time.Time) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch o.stopReason(now) {
	case policy.ReasonRemoved:
		return true
	case policy.ReasonRetryAfter:
		if now.Sub(o.toldOthers) < tellOthers {
			return false
		}
		o.toldOthers = now
		return true
	case policy.ReasonBreaker:
		return o.breaker.Alone
	}
	return false
}

// waits reports whether the lane's receiver has asked it to wait.
func (o *outgoing) waits(now time.Time) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return now.Before(o.flow.Reopens)
}

// EndWait sends again although the receiver has asked to wait, with one request at once first.
func (o *outgoing) EndWait(now time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.flow.Open(now)
	o.waitEnded = true
}

// endedWait reports whether an operator has ended the wait, and the database has nothing newer.
func (o *outgoing) endedWait() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.waitEnded
}

// noteSlowdownTold records that the database has something newer.
func (o *outgoing) noteSlowdownTold() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.waitEnded = false
}

// Change changes the breaker.
func (o *outgoing) Change(change func(b *policy.Breaker)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	change(&o.breaker)
}

// VoidLeases makes all claims void whose leases end before the given time: the relay has lost them.
func (o *outgoing) VoidLeases(until time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.voidUntil = until
}

// IsVoid reports whether the relay has lost the claim of a delivery.
func (o *outgoing) IsVoid(d *Delivery) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return d.LeaseEnds.Before(o.voidUntil)
}
