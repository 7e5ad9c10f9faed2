package relay

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// pastPromise is what operators read of a delivery whose promise has ended.
const pastPromise = "not sent again: its receiver was promised that nothing comes after %s (retry.not_after), may have processed it unseen, " +
	"and may forget it from then on; find out what became of it there, then discard it or, with a new promise, replay it: outbox-relay replay %d"

// senders send what the lanes hold: one goroutine each, as many as its lane may have, and only while it has something to send.
type senders struct {
	*core
	settler *settler
	alone   policy.Solitude
	running sync.WaitGroup
}

func (s *senders) start(l *lane) { s.running.Go(func() { s.send(l) }) }

func (s *senders) wait() { s.running.Wait() }

// send empties a lane until there is nothing left for this sender.
func (s *senders) send(l *lane) {
	for {
		run, wait := l.nextRun(time.Now())
		switch {
		case run != nil:
			if l.addSender() { // the limit has grown since the queue was filled
				s.start(l)
			}
			s.sendRun(l, run)
		case wait > 0:
			s.awaitTurn(wait)
			if s.taking.Err() != nil {
				s.giveBack(l, policy.ReasonShutdown)
			}
		default:
			return
		}
	}
}

// sendRun sends the deliveries of a run in sequence. Those behind one that was not delivered are given back: their turn
// comes after its next attempt.
func (s *senders) sendRun(l *lane, run []delivery) {
	for i := range run {
		d := &run[i]
		begun := time.Now()
		started := begun
		v := policy.Result{Reason: policy.ReasonLease}
		ready := true
		if i > 0 {
			l.stepRun(d.class, 1)
			ready = s.awaitToken(l, d)
			started = time.Now()
		}
		to := l.current()
		if ready {
			v = s.attempt(l, d)
		}
		ended := time.Now()
		took := ended.Sub(started)
		about := policy.Circumstances{
			Attempt: d.attempts + 1, Retry: to.Destination.Retry, Fraction: rand.Float64(), Responses: to.Destination.Responses,
			OnFailure: to.Destination.OnFailure, Ordered: d.event.OrderingKey != nil, LastOfRun: d.lastOfRun,
			Paused: v.Reason == policy.ReasonGone && !l.pause(), LogDelivered: s.config().LogDelivered,
		}
		var changed bool
		if about.AtFault, changed = l.recordResult(ended, d.eventID, &v, took, ended.Sub(begun)); changed {
			signal(s.wake.room)
		}
		decided := policy.Decide(v, about)
		s.settler.settle(newSettlement(*d, decided, started, took))
		d.event = post.Event{} // of a long run, only what is being sent is kept in memory
		if decided.Blocks {
			l.stepRun(d.class, len(run)-i-1)
			for _, d := range run[i+1:] {
				s.settler.settle(held(d, policy.ReasonOrder))
			}
			return
		}
	}
}

// awaitToken waits for the turn of the next delivery of a run. It returns false if its lease would end first.
func (s *senders) awaitToken(l *lane, d *delivery) (ready bool) {
	for s.taking.Err() == nil {
		wait, inTime := l.takeToken(time.Now(), d)
		if wait == 0 || !inTime {
			return inTime
		}
		s.awaitTurn(wait)
	}
	return true
}

// longestNap bounds a wait for the rate: meanwhile the lane may be held, paused or removed, or its rate raised.
const longestNap = time.Second

// awaitTurn waits, at most longestNap, or until the relay stops.
func (s *senders) awaitTurn(wait time.Duration) {
	timer := time.NewTimer(min(wait, longestNap))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-s.taking.Done():
	}
}

// giveBackUnsent empties the lanes' queues at a stop. The senders would do it too, but only when their POSTs have ended,
// and until then no other relay could take what waits behind them.
func (s *senders) giveBackUnsent() {
	for _, l := range s.lanes.list() {
		s.giveBack(l, policy.ReasonShutdown)
	}
}

func (s *senders) giveBack(l *lane, reason policy.Reason) {
	for _, d := range l.takeUnsent() {
		s.settler.settle(held(d, reason))
	}
}

// attempt makes the one POST of a claim, or returns why there is none.
func (s *senders) attempt(l *lane, d *delivery) (v policy.Result) {
	to, now := l.current(), time.Now()
	// One delivery that trips a defect must not take the relay, and all others, with it.
	defer func() {
		if defect := recover(); defect != nil {
			v = policy.Panicked(defect)
		}
	}()
	if s.taking.Err() != nil {
		return policy.Result{Reason: policy.ReasonShutdown}
	}
	if reason := l.stopReason(); reason != "" {
		return policy.Result{Reason: reason}
	}
	if d.tooLate(to, now) {
		return policy.Result{Reason: policy.ReasonLease}
	}
	leave, instead := s.awaitPost(d)
	if instead != nil {
		return *instead
	}
	defer leave()
	now = time.Now()
	if d.tooLate(to, now) { // after waiting
		return policy.Result{Reason: policy.ReasonLease}
	}
	if d.promiseEnds.Sub(now) < to.Destination.Timeout {
		return policy.Result{Reason: policy.ReasonNotAfter, Message: fmt.Sprintf(pastPromise, d.notAfter.UTC().Format(time.RFC3339), d.eventID)}
	}
	if d.event.Key == nil {
		return policy.Result{Reason: policy.ReasonEventMissing, Message: "the event is gone from outbox"}
	}
	if d.event.Payload == nil {
		payload, err := s.store.payload(s.doing, d.eventID)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return policy.Result{Reason: policy.ReasonEventMissing, Message: "the event is gone from outbox"}
		case err != nil:
			s.databaseError("load payload", err)
			s.postpone(d, s.config().PollInterval) // or only a walk would find it, which may rest for long
			return policy.Result{Reason: policy.ReasonDatabase}
		}
		d.event.Payload = payload
	}
	message := d.message()
	if spans := s.config().Spans; spans != nil {
		d.span, message.Trace = spans.Start(message, d.promised, to.URL)
	}
	var ready func() *policy.Result
	if d.alone { // if the relay dies of it, nothing can be written afterwards
		ready = func() *policy.Result { return s.countAlone(d) }
	}
	return to.Deliver(s.doing, message, ready)
}

// countAlone records that a suspect is about to be sent. If that fails it returns a result, and the suspect must not be sent.
func (s *senders) countAlone(d *delivery) (instead *policy.Result) {
	if err := s.store.countAlone(s.settling, d); err != nil {
		s.databaseError("count suspect", err)
		return &policy.Result{Reason: policy.ReasonDatabase}
	}
	return nil
}
