package relay

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// pastPromise tells operators why a delivery is not sent any more, and what is theirs to decide.
const pastPromise = "not sent again: its receiver was promised that nothing comes after %s (retry.horizon), may have processed it unseen, " +
	"and may forget it from then on; find out what became of it there, then discard it or, with a new promise, replay it: outbox-relay replay %d"

// send empties a lane until there is nothing left for this sender.
func (r *Relay) send(l *lane) {
	for {
		run, wait := l.next(time.Now())
		switch {
		case run != nil:
			if l.grow() { // the limit has grown since the queue was filled
				r.senders.Go(func() { r.send(l) })
			}
			r.sendRun(l, run)
		case wait > 0:
			r.awaitTurn(wait)
			if r.taking.Err() != nil {
				r.giveBack(l)
			}
		default:
			return
		}
	}
}

// sendRun sends the deliveries of a run in sequence. Those behind one that was not delivered are given back: their turn
// comes after its next attempt.
func (r *Relay) sendRun(l *lane, run []delivery) {
	for i := range run {
		d := &run[i]
		begun := time.Now()
		v := policy.Result{Reason: policy.ReasonLease}
		ready := true
		if i > 0 {
			l.step(d.class, 1)
			ready = r.awaitToken(l, d)
		}
		to := l.current()
		started := time.Now()
		if ready {
			v = r.attempt(l, d)
		}
		took := time.Since(started)
		if v.Posted {
			l.posted(time.Since(begun))
		}
		about := policy.Circumstances{
			Attempt: d.attempts + 1, Retry: to.Destination.Retry, Fraction: rand.Float64(), Responses: to.Destination.Responses,
			OnFailure: to.Destination.OnFailure, Ordered: d.event.OrderingKey != nil, LastOfRun: d.lastOfRun,
			Paused: v.Reason == policy.ReasonGone && !l.pause(), LogDelivered: r.config().LogDelivered,
		}
		var changed bool
		if about.AtFault, changed = l.recordResult(time.Now(), d.eventID, &v, took); changed {
			signal(r.wake.room)
		}
		decided := policy.Decide(v, about)
		r.settler.settle(newSettlement(*d, decided, started, took))
		d.event = post.Event{} // of a long run, only what is being sent is kept in memory
		if decided.Blocks {
			l.step(d.class, len(run)-i-1)
			for _, d := range run[i+1:] {
				r.settler.settle(held(d, policy.ReasonOrder))
			}
			return
		}
	}
}

// awaitToken waits for the turn of the next delivery of a run. It returns false if its lease would end first.
func (r *Relay) awaitToken(l *lane, d *delivery) (ready bool) {
	for r.taking.Err() == nil {
		wait, inTime := l.token(time.Now(), d)
		if wait == 0 || !inTime {
			return inTime
		}
		r.awaitTurn(wait)
	}
	return true
}

// longestNap is after which time a waiter for a turn sees whether one is still needed: the lane may have been held,
// paused or removed, or its rate raised.
const longestNap = time.Second

// awaitTurn waits, unless the relay is told to stop.
func (r *Relay) awaitTurn(wait time.Duration) {
	timer := time.NewTimer(min(wait, longestNap))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-r.taking.Done():
	}
}

// giveBackUnsent empties the lanes' queues at a stop. The senders would do it too, but only when their POSTs have ended,
// and until then no other relay could take what waits behind them.
func (r *Relay) giveBackUnsent() {
	for _, l := range r.lanes.list() {
		r.giveBack(l)
	}
}

func (r *Relay) giveBack(l *lane) {
	for _, d := range l.unsent() {
		r.settler.settle(held(d, policy.ReasonShutdown))
	}
}

// attempt makes the one POST of a claim, unless something speaks against it.
func (r *Relay) attempt(l *lane, d *delivery) (v policy.Result) {
	to := l.current()
	// One delivery that trips a defect must not take the relay, and all others, with it.
	defer func() {
		if defect := recover(); defect != nil {
			v = policy.Result{Reason: policy.ReasonPanic, Message: plain.Clip(describePanic(defect)), Posted: true}
		}
	}()
	if r.taking.Err() != nil {
		return policy.Result{Reason: policy.ReasonShutdown}
	}
	if reason := l.stopped(); reason != "" {
		return policy.Result{Reason: reason}
	}
	if time.Until(d.leaseEnds) < to.Destination.Timeout+sendMargin {
		return policy.Result{Reason: policy.ReasonLease}
	}
	leave, instead := r.awaitPost(d)
	if instead != nil {
		return *instead
	}
	defer leave()
	if time.Until(d.leaseEnds) < to.Destination.Timeout+sendMargin { // after waiting
		return policy.Result{Reason: policy.ReasonLease}
	}
	if time.Until(d.promiseEnds) < to.Destination.Timeout {
		return policy.Result{Reason: policy.ReasonHorizon, Message: fmt.Sprintf(pastPromise, d.notAfter.UTC().Format(time.RFC3339), d.eventID)}
	}
	if d.event.Key == nil {
		return policy.Result{Reason: policy.ReasonEventMissing, Message: "the event is gone from outbox"}
	}
	if d.event.Payload == nil {
		payload, err := r.store.payload(r.doing, d.eventID)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return policy.Result{Reason: policy.ReasonEventMissing, Message: "the event is gone from outbox"}
		case err != nil:
			r.databaseError("load payload", err)
			r.postpone(d, r.cfg.PollInterval) // or only a walk would find it, which may rest for long
			return policy.Result{Reason: policy.ReasonDatabase}
		}
		d.event.Payload = payload
	}
	req, err := post.NewRequest(to, d.message(), time.Now())
	if err != nil {
		return post.Refused(err)
	}
	if err := r.countSuspect(d); err != nil {
		r.databaseError("count suspect", err)
		return policy.Result{Reason: policy.ReasonDatabase}
	}
	ctx, cancel := context.WithTimeout(r.doing, to.Destination.Timeout)
	defer cancel()
	return post.Send(ctx, to, req, d.event.Payload)
}

// describePanic returns the text of a runtime error, which holds no data, and of any other panic only its type: its value
// may be part of a request.
func describePanic(defect any) string {
	if err, ok := defect.(runtime.Error); ok {
		return "panic: " + err.Error()
	}
	return fmt.Sprintf("panic: a value of type %T", defect)
}
