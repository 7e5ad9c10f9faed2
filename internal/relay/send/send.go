package send

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/capacity"
	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relay/spans"
	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

// pastPromise is what operators read of a delivery whose promise has ended.
const pastPromise = "not sent again: its receiver was promised that nothing comes after %s (retry.not_after), may have processed it unseen, " +
	"and may forget it from then on; find out what became of it there, then discard it or, with a new promise, replay it: outbox-relay replay %d"

// Senders send what the lanes hold: one goroutine each, as many as its lane may have, and only
// while it has something to send.
type Senders struct {
	*Phases
	Lanes   *lane.Lanes
	DB      pg.Pool
	Log     zerolog.Logger
	Poll    time.Duration     // how long a delivery is put off whose payload could not be loaded
	Spans   *spans.Spans      // nil: there are none
	History *history.Recorder // nil: nothing is counted
	Settle  func(settle.Settlement)
	// LogDelivered reports whether the attempt log holds what was delivered.
	LogDelivered func() bool
	// Attempted follows every POST, before its outcome is settled; nil: nothing does.
	Attempted func(Attempt)
	// Post makes the claimer take a turn.
	Post func(agenda.Cause)
	// Retry notes that a delivery is due again after the given time.
	Retry  func(now time.Time, after time.Duration)
	Failed func(operation string, err error) // a statement, which will be repeated
	// Alive reports whether this relay counts as alive.
	Alive func() bool

	alone   capacity.Solitude
	running sync.WaitGroup
}

// Phases end one after the other at a stop. After taking nothing more is claimed or sent; after
// doing POSTs in flight are cut off; after settling what could not be written is left to the lease.
type Phases struct{ Taking, Doing, Settling context.Context }

// Start starts a sender of a lane that has counted it.
func (s *Senders) Start(l *lane.Lane) { s.running.Go(func() { s.send(l) }) }

// Wait waits until all senders have ended.
func (s *Senders) Wait() { s.running.Wait() }

// longestNap bounds a wait for the rate: meanwhile the lane may be held, paused or removed, or its
// rate raised.
const longestNap = time.Second

// lostNap is between two looks whether this relay is registered again.
const lostNap = 50 * time.Millisecond

// send empties a lane until there is nothing left for this sender.
func (s *Senders) send(l *lane.Lane) {
	for {
		run, wait := l.NextRun(time.Now())
		switch {
		case run != nil:
			if l.AddSender() { // the limit has grown since the queue was filled
				s.Start(l)
			}
			for next := false; len(run) > 0; next = true {
				if !s.sendRun(l, run, next) || run[0].Event.OrderingKey == nil {
					break
				}
				run = l.NextOfKey(*run[0].Event.OrderingKey)
			}
		case wait > 0:
			_ = sleep.For(s.Taking, min(wait, longestNap))
			if s.Taking.Err() != nil {
				s.GiveBack(l, policy.ReasonShutdown)
			}
		default:
			return
		}
	}
}

// sendRun sends the deliveries of a run in sequence; next says that it follows another one. Those
// behind one that was not delivered are given back: their turn comes after its next attempt. It
// reports whether what follows may be sent.
func (s *Senders) sendRun(l *lane.Lane, run []lane.Delivery, next bool) (free bool) {
	key := run[0].Event.OrderingKey
	for i := range run {
		d := &run[i]
		begun := time.Now()
		started := begun
		v := policy.Result{Reason: policy.ReasonLease}
		ready := true
		if i > 0 {
			l.StepRun(d.Class, 1)
		}
		if i > 0 || next {
			ready = s.awaitToken(l, d)
			started = time.Now()
		}
		to := l.Current()
		if ready {
			v = s.attempt(l, d)
		}
		ended := time.Now()
		took := ended.Sub(started)
		alreadyPaused := v.Gone() && !l.Pause()
		about := policy.Circumstances{
			Attempt: d.Attempts + 1, Retry: to.Destination.Retry, Fraction: rand.Float64(), Responses: to.Destination.Responses,
			OnFailure: to.Destination.OnFailure, Ordered: d.Event.OrderingKey != nil, LastOfRun: d.LastOfRun,
			AlreadyPaused: alreadyPaused, LogDelivered: s.LogDelivered(),
		}
		var changed bool
		if about.AtFault, changed = l.RecordResult(ended, d.EventID, &v, took, ended.Sub(begun)); changed {
			s.Post(agenda.CauseBreaker)
		}
		decided := policy.Decide(v, about)
		var behind []lane.Delivery
		if decided.Blocks && key != nil { // before the settlement, which ends that
			behind = l.StopKey(*key)
		}
		if decided.Posted {
			s.recordAttempt(d, &decided, started, took)
		}
		s.Settle(d.Settlement(decided, started, took))
		d.Event.Payload = nil // of a long run, only what is being sent is kept in memory
		if decided.Blocks {
			l.StepRun(d.Class, len(run)-i-1)
			for _, d := range slices.Concat(run[i+1:], behind) {
				s.Settle(d.GivenBack(policy.ReasonOrder))
			}
			return false
		}
	}
	return true
}

// awaitToken waits for the turn of the next delivery of a run. It returns false if its lease would
// end first.
func (s *Senders) awaitToken(l *lane.Lane, d *lane.Delivery) (ready bool) {
	for s.Taking.Err() == nil {
		wait, inTime := l.TakeToken(time.Now(), d)
		if wait == 0 || !inTime {
			return inTime
		}
		_ = sleep.For(s.Taking, min(wait, longestNap))
	}
	return true
}

// attempt makes the one POST of a claim, or returns why there is none.
func (s *Senders) attempt(l *lane.Lane, d *lane.Delivery) (v policy.Result) {
	to := l.Current()
	// One delivery that trips a defect must not take the relay, and all others, with it.
	defer func() {
		if defect := recover(); defect != nil {
			v = policy.Panicked(defect)
		}
	}()
	// Without its session this relay looks dead: others may have taken over what it has. Once it is
	// registered again, it knows.
	for alive := false; !alive; {
		if alive = s.Alive(); !alive {
			_ = sleep.For(s.Taking, lostNap)
		}
		now := time.Now()
		if s.Taking.Err() != nil {
			return policy.Result{Reason: policy.ReasonShutdown}
		}
		if reason := l.StopReason(now); reason != "" {
			return policy.Result{Reason: reason}
		}
		if d.TooLate(to, now) || l.IsVoid(d) {
			return policy.Result{Reason: policy.ReasonLease}
		}
	}
	leave, instead := s.awaitPost(d)
	if instead != nil {
		return *instead
	}
	defer leave()
	missing := policy.Result{Reason: policy.ReasonEventMissing, Message: "the event is gone from outbox"}
	if d.Event.Key == nil {
		return missing
	}
	if d.Event.Payload == nil {
		payload, err := s.payload(s.Doing, d.EventID)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return missing
		case err != nil:
			s.Failed("load payload", err)
			s.postpone(d, s.Poll) // or only a scan from the front would find it, which may rest for long
			return policy.Result{Reason: policy.ReasonDatabase}
		}
		if payload == nil {
			return policy.BreaksRule(intake.RulePayload)
		}
		d.Event.Payload = payload
	}
	if late := tooLate(d, to); late != nil { // after waiting and loading
		return *late
	}
	message := d.Message()
	if traces := s.Spans; traces != nil {
		d.Span, message.Trace = traces.Start(message, d.Promised, to.URL)
	}
	return to.Deliver(s.Doing, message, s.countFirst(d, to))
}

// tooLate returns why no request of a delivery may begin any more: it could outlast the lease, when
// another relay sends the delivery too, or what its receiver was promised. It returns nil if one
// may.
func tooLate(d *lane.Delivery, to *post.Endpoint) *policy.Result {
	now := time.Now()
	switch {
	case d.TooLate(to, now):
		return &policy.Result{Reason: policy.ReasonLease}
	case d.PromiseEnds.Sub(now) < to.Destination.Timeout:
		return &policy.Result{Reason: policy.ReasonNotAfter, Message: fmt.Sprintf(pastPromise, d.NotAfter.UTC().Format(time.RFC3339), d.EventID)}
	}
	return nil
}

// GiveBackUnsent empties the lanes' queues, such as at a stop. The senders would do it too, but
// only when their POSTs have ended, and until then no other relay could take what waits.
func (s *Senders) GiveBackUnsent(reason policy.Reason) {
	for _, l := range s.Lanes.List() {
		s.GiveBack(l, reason)
	}
}

// GiveBack gives back, for the given reason, what a lane has queued.
func (s *Senders) GiveBack(l *lane.Lane, reason policy.Reason) {
	for _, d := range l.TakeUnsent() {
		s.Settle(d.GivenBack(reason))
	}
}
