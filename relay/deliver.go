package relay

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/capacity"
	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relay/spans"
)

// pastPromise is what operators read of a delivery whose promise has ended.
const pastPromise = "not sent again: its receiver was promised that nothing comes after %s (retry.not_after), may have processed it unseen, " +
	"and may forget it from then on; find out what became of it there, then discard it or, with a new promise, replay it: outbox-relay replay %d"

// senders send what the lanes hold: one goroutine each, as many as its lane may have, and only while it has something to send.
type senders struct {
	*phases
	lanes   *lanes
	db      pg.Pool
	log     zerolog.Logger
	poll    time.Duration     // how long a delivery is put off whose payload could not be loaded
	spans   *spans.Spans      // nil: there are none
	history *history.Recorder // nil: nothing is counted
	settle  func(settle.Settlement)
	// logDelivered reports whether the attempt log holds what was delivered.
	logDelivered func() bool
	// attempted follows every POST, before its outcome is settled; nil: nothing does.
	attempted func(Attempt)
	// post makes the claimer take a turn.
	post func(agenda.Cause)
	// retry notes that a delivery is due again after the given time.
	retry  func(now time.Time, after time.Duration)
	failed func(operation string, err error) // a statement, which will be repeated

	alone   capacity.Solitude
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
			for next := false; len(run) > 0; next = true {
				if !s.sendRun(l, run, next) || run[0].event.OrderingKey == nil {
					break
				}
				run = l.nextOfKey(*run[0].event.OrderingKey)
			}
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

// sendRun sends the deliveries of a run in sequence; next says that it follows another one. Those behind one that was not delivered are
// given back: their turn comes after its next attempt. It reports whether what follows may be sent.
func (s *senders) sendRun(l *lane, run []delivery, next bool) (free bool) {
	key := run[0].event.OrderingKey
	for i := range run {
		d := &run[i]
		begun := time.Now()
		started := begun
		v := policy.Result{Reason: policy.ReasonLease}
		ready := true
		if i > 0 {
			l.stepRun(d.class, 1)
		}
		if i > 0 || next {
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
			Paused: v.Gone() && !l.pause(), LogDelivered: s.logDelivered(),
		}
		var changed bool
		if about.AtFault, changed = l.recordResult(ended, d.eventID, &v, took, ended.Sub(begun)); changed {
			s.post(agenda.CauseBreaker)
		}
		decided := policy.Decide(v, about)
		var behind []delivery
		if decided.Blocks && key != nil { // before the settlement, which ends that
			behind = l.stopKey(*key)
		}
		if decided.Posted {
			s.recordAttempt(d, &decided, started, took)
		}
		s.settle(d.settlement(decided, started, took))
		d.event.Payload = nil // of a long run, only what is being sent is kept in memory
		if decided.Blocks {
			l.stepRun(d.class, len(run)-i-1)
			for _, d := range slices.Concat(run[i+1:], behind) {
				s.settle(d.held(policy.ReasonOrder))
			}
			return false
		}
	}
	return true
}

// recordAttempt ends the trace of an attempt, logs it, and calls the hook.
func (s *senders) recordAttempt(d *delivery, decided *policy.Decision, started time.Time, took time.Duration) {
	level := zerolog.InfoLevel
	switch decided.Outcome {
	case policy.Delivered: // too many
		level = zerolog.DebugLevel
	case policy.Fail:
		level = zerolog.WarnLevel
	}
	line := s.log.WithLevel(level).Int64("event_id", d.eventID).Str("destination", d.destination).Int("attempt", d.attempts+1).
		Str("outcome", string(decided.Outcome)).Str("reason", string(decided.Reason)).Int("status", decided.StatusCode).
		Int64("duration_ms", took.Milliseconds())
	if decided.Outcome == policy.Retry {
		line = line.Int64("next_attempt_in_ms", decided.Delay.Milliseconds())
	}
	if decided.Message != "" {
		line = line.Str("error", decided.Message)
	}
	line.Msg("attempt")
	ended := started.Add(took)
	if d.span != nil {
		spans.End(d.span, *decided, ended)
	}
	sinceCreated := d.since(d.event.CreatedAt, ended)
	if d.event.EventType != nil { // else the event is gone
		s.history.Attempted(history.Key{Destination: d.destination, EventType: *d.event.EventType}, decided.Outcome, took, sinceCreated)
	}
	if hook := s.attempted; hook != nil {
		hook(Attempt{
			EventID: d.eventID, Destination: d.destination, Number: d.attempts + 1, StatusCode: decided.StatusCode, Outcome: decided.Outcome,
			Reason: decided.Reason, Duration: took, Duplicate: decided.Duplicate, DroppedHeaders: decided.DroppedHeaders,
			Class:        classNames[d.class],
			SinceCreated: sinceCreated, SinceDue: d.since(d.nextAttemptAt, ended),
		})
	}
}

// since returns the time from at, by the database's clock, to now, by this process's; 0 if at is unknown. The claim dated the
// promise by both clocks, which shows how they differ.
func (d *delivery) since(at pgtype.Timestamptz, now time.Time) time.Duration {
	if !at.Valid || at.InfinityModifier != pgtype.Finite {
		return 0
	}
	return max(0, now.Sub(d.promiseEnds.Add(at.Time.Sub(d.notAfter))))
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
		s.settle(d.held(reason))
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
	missing := policy.Result{Reason: policy.ReasonEventMissing, Message: "the event is gone from outbox"}
	if d.event.Key == nil {
		return missing
	}
	if d.event.Payload == nil {
		payload, err := s.payload(s.doing, d.eventID)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return missing
		case err != nil:
			s.failed("load payload", err)
			s.postpone(d, s.poll) // or only a walk would find it, which may rest for long
			return policy.Result{Reason: policy.ReasonDatabase}
		}
		d.event.Payload = payload
	}
	message := d.message()
	if traces := s.spans; traces != nil {
		d.span, message.Trace = traces.Start(message, d.promised, to.URL)
	}
	var ready func() *policy.Result
	if d.alone { // if the relay dies of it, nothing can be written afterwards
		ready = func() *policy.Result {
			if err := s.countAlone(s.settling, d); err != nil {
				s.failed("count suspect", err)
				return &policy.Result{Reason: policy.ReasonDatabase}
			}
			return nil
		}
	}
	return to.Deliver(s.doing, message, ready)
}
