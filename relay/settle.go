package relay

import (
	"time"

	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// A settlement is a decision on its way into the database.
type settlement struct {
	delivery
	policy.Decision
	startedAt time.Time
	duration  time.Duration
	aside     *aside // nil: writing it has not failed so far
}

// newSettlement returns the settlement of a delivery, without the payload, which is not needed any more.
func newSettlement(d delivery, decided policy.Decision, startedAt time.Time, took time.Duration) settlement {
	d.event = post.Event{Key: d.event.Key, OrderingKey: d.event.OrderingKey}
	return settlement{delivery: d, Decision: decided, startedAt: startedAt, duration: took}
}

// held returns the settlement of a delivery of which nothing was sent, and which is given back.
func held(d delivery, reason policy.Reason) settlement {
	return newSettlement(d, policy.Decide(policy.Result{Reason: reason}, policy.Circumstances{}), time.Now(), 0)
}

// bound reports whether the receiver may know of the promise by which this delivery was sent: a former request, or this
// one, may have told it.
func (s *settlement) bound() bool { return !s.promised || s.Posted && !s.Unreached }

// A batch is settlements that are written together.
type batch struct {
	settlements []settlement
	// apart leaves out rows that another session has locked, instead of waiting for them: the settlements have failed as
	// part of a larger batch, or were written before.
	apart bool
}

// outcomes are the settlements of a batch, by the statement that writes them.
type outcomes struct {
	delivered, retried, failed, held []*settlement
	logged                           []*settlement // attempts for the log, of any outcome
}

func (b *batch) byOutcome() (o outcomes) {
	for i := range b.settlements {
		s := &b.settlements[i]
		switch s.Outcome {
		case policy.Delivered:
			o.delivered = append(o.delivered, s)
		case policy.Retry:
			o.retried = append(o.retried, s)
		case policy.Fail:
			o.failed = append(o.failed, s)
		case policy.Hold:
			o.held = append(o.held, s)
		}
		if s.Logged {
			o.logged = append(o.logged, s)
		}
	}
	return o
}

// parts returns the smaller batches to write in place of one that failed with err: the settlements of each outcome, then
// each settlement alone. It returns none when smaller batches would fail, too: a batch that leaves out locked deliveries and
// still meets a lock needs the row of an alert or a destination, and so does each of its settlements.
func (b *batch) parts(err error) (parts []batch) {
	switch {
	case !b.apart:
		o := b.byOutcome()
		for _, list := range [][]*settlement{o.delivered, o.retried, o.held, o.failed} {
			if len(list) > 0 {
				parts = append(parts, batch{settlements: copySettlements(list), apart: true})
			}
		}
	case len(b.settlements) > 1 && !pg.HasCode(err, pg.LockNotAvailable):
		for i := range b.settlements {
			parts = append(parts, batch{settlements: b.settlements[i : i+1], apart: true})
		}
	}
	return parts
}

func copySettlements(list []*settlement) []settlement {
	all := make([]settlement, len(list))
	for i, s := range list {
		all[i] = *s
	}
	return all
}

// A batch is written when it is this old or this large, whichever comes first.
const (
	settleAfter = 5 * time.Millisecond
	settleBatch = 1000
)

// settle passes a settlement on to the settler. When the settler has given up, at the very end of a stop without a
// database, the settlement is left to the lease.
func (r *Relay) settle(l *lane, s settlement) {
	if s.Posted {
		r.logAttempt(&s)
		if hook := r.cfg.Hooks.Attempted; hook != nil {
			hook(Attempt{
				EventID: s.eventID, Destination: s.destination, Number: s.attempts + 1,
				StatusCode: s.StatusCode, Outcome: s.Outcome, Reason: s.Reason, Duration: s.duration,
			})
		}
	}
	select {
	case r.settlements <- s:
	case <-r.settling.Done():
	}
}

// A settler writes what the senders pass on. One goroutine owns its fields.
type settler struct {
	relay *Relay
	aside []settlement // could not be written, and are tried again
}

// settleAll writes settlements in batches until the channel is closed and drained. It tries those set aside until they are
// written, too, or the settler has to give up. A stop waits for locked rows, not for rows that the database refuses.
func (r *Relay) settleAll() {
	w := settler{relay: r}
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for source := r.settlements; source != nil || w.waitsForLocks(); {
		var due <-chan time.Time
		var end <-chan struct{}
		if len(w.aside) > 0 {
			due = time.After(time.Until(w.nextTry()))
			if source == nil {
				end = r.settling.Done()
			}
		}
		select {
		case first, open := <-source:
			if !open {
				source = nil
				continue
			}
			w.setAside(w.write(batch{settlements: w.collect(first, timer)}))
		case <-due:
			w.tryAside(time.Now())
		case <-end:
			r.gaveUp(len(w.aside))
			return
		}
	}
	if len(w.aside) > 0 {
		r.gaveUp(len(w.aside))
	}
}

// collect makes a batch of what comes until it is old or large enough.
func (w *settler) collect(first settlement, timer *time.Timer) []settlement {
	collected := []settlement{first}
	timer.Reset(settleAfter)
	for len(collected) < settleBatch {
		select {
		case s, open := <-w.relay.settlements:
			if !open {
				return collected
			}
			collected = append(collected, s)
		case <-timer.C:
			return collected
		}
	}
	return collected
}

// write writes a batch, and returns the settlements that it could not write. It tries a failed batch in parts, so that one row
// cannot keep the others from being written.
func (w *settler) write(b batch) (left []settlement) {
	missed, err := w.try(&b)
	if err == nil {
		return missed
	}
	parts := b.parts(err)
	for i := range parts {
		left = append(left, w.write(parts[i])...)
	}
	if len(parts) == 0 {
		left = b.settlements
		for i := range left {
			left[i].noteFailure(err)
		}
	}
	return left
}

// settleTries is how often a batch is tried that meets damaged data, since some such errors pass.
const settleTries = 3

// try writes a batch, and repeats it while waiting can help: for ever, when the database is away. It returns the
// settlements of rows that are locked or have just been changed.
func (w *settler) try(b *batch) (missed []settlement, err error) {
	r := w.relay
	failing := newBackoff()
	failing.MaxInterval = time.Second // ordering keys must not stand still when the database is back
	repeated, damaged := false, 0
	for ; ; repeated = true {
		if r.settling.Err() != nil {
			r.gaveUp(len(b.settlements))
			return nil, nil
		}
		instance, _ := r.session.current()
		left, stale, err := r.store.settle(r.settling, instance, b)
		if err == nil {
			if repeated {
				stale = 0 // unknown: when only the acknowledgement was lost, this very batch was written before
			}
			r.written(b.without(left), stale)
			missed = copySettlements(left)
			for i := range missed {
				missed[i].noteFailure(nil)
			}
			return missed, nil
		}
		// A first try that meets a locked row is no failure: another relay's claim may hold it for a moment longer. What stays locked is
		// reported when it is set aside.
		if b.apart || !pg.HasCode(err, pg.LockNotAvailable) {
			r.databaseError("settle", err)
		}
		switch pg.ClassifyError(err) {
		case pg.ErrorRefused:
			return nil, err
		case pg.ErrorDamaged:
			if damaged++; b.apart || damaged == settleTries {
				return nil, err
			}
		}
		select {
		case <-time.After(failing.NextBackOff()):
		case <-r.settling.Done():
		}
	}
}

// without returns the settlements of a batch except those that were left, which point into it.
func (b *batch) without(left []*settlement) []settlement {
	if len(left) == 0 {
		return b.settlements
	}
	isLeft := make(map[*settlement]bool, len(left))
	for _, s := range left {
		isLeft[s] = true
	}
	var rest []settlement
	for i := range b.settlements {
		if !isLeft[&b.settlements[i]] {
			rest = append(rest, b.settlements[i])
		}
	}
	return rest
}

func (r *Relay) gaveUp(deliveries int) {
	r.cfg.Log.Warn().Int("deliveries", deliveries).Msg("stopping without having settled; the deliveries will be attempted again")
}

// written frees the lanes' room, remembers what a crash of the server could undo, and calls the hooks.
func (r *Relay) written(settlements []settlement, stale int) {
	if stale > 0 {
		r.cfg.Log.Warn().Int("deliveries", stale).Msg("settled too late: another relay had claimed the deliveries meanwhile")
		if hook := r.cfg.Hooks.StaleSettle; hook != nil {
			hook(stale)
		}
	}
	type label struct {
		destination string
		outcome     policy.Outcome
		reason      policy.Reason
		class       class
	}
	counts := map[label]int{}
	givenBack, failed := false, false
	now := time.Now()
	for i := range settlements {
		s := &settlements[i]
		counts[label{s.destination, s.Outcome, s.Reason, s.class}]++
		if s.event.OrderingKey != nil {
			r.lane(s.destination).keySettled(s)
		}
		if s.Outcome == policy.Retry {
			r.wake.retries.add(now, s.Delay)
		}
		givenBack = givenBack || s.lookedFor()
		failed = failed || s.Outcome == policy.Fail
	}
	for of, n := range counts {
		l := r.lane(of.destination)
		if of.outcome == policy.Fail && of.reason == policy.ReasonGone {
			r.cfg.Log.Warn().Str("destination", of.destination).Msg("paused: the receiver answered 410 Gone")
			l.pauseWritten()
		}
		l.release(of.class, n)
		if hook := r.cfg.Hooks.Settled; hook != nil {
			hook(of.destination, of.outcome, of.reason, n)
		}
	}
	signal(r.wake.room)
	if givenBack && r.taking.Err() == nil {
		r.wake.notify(true) // what was given back lies before the lane's position
	}
	if failed {
		signal(r.alerts)
		return // all of the batch is on the disk
	}
	r.recent.add(now, settlements)
}

// lookedFor reports whether what was given back is to be found at once. Not so what an open breaker holds, which waits for
// its probes; what stands behind another of its ordering key, which comes with that one; the next of a free key, which is
// found by it; and what cannot be read, which would be claimed again and again.
func (s *settlement) lookedFor() bool {
	return s.Outcome == policy.Hold && !s.Posted && !s.FreesKey &&
		s.Reason != policy.ReasonBreaker && s.Reason != policy.ReasonOrder && s.Reason != policy.ReasonDatabase && s.Reason != policy.ReasonSuspect
}

// logAttempt writes one line for an attempt that did not deliver; those that did are too many.
func (r *Relay) logAttempt(s *settlement) {
	level := r.cfg.Log.Debug()
	if s.Outcome != policy.Delivered {
		level = r.cfg.Log.Info()
	}
	if s.Outcome == policy.Fail {
		level = r.cfg.Log.Warn()
	}
	line := level.Int64("event_id", s.eventID).Str("destination", s.delivery.destination).Int("attempt", s.attempts+1).
		Str("outcome", string(s.Outcome)).Str("reason", string(s.Reason)).Int("status", s.StatusCode).
		Int64("duration_ms", s.duration.Milliseconds())
	if s.Outcome == policy.Retry {
		line = line.Int64("next_attempt_in_ms", s.Delay.Milliseconds())
	}
	if s.Message != "" {
		line = line.Str("error", s.Message)
	}
	line.Msg("attempt")
}
