package relay

import (
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
)

// newSettler returns what writes the outcomes of deliveries.
func (r *Relay) newSettler() *settle.Settler {
	s := settle.New()
	s.Log, s.Ran, s.Stale = r.cfg.Log, r.cfg.Hooks.SettleRan, r.cfg.Hooks.StaleSettle
	s.RelayID = func() int32 {
		relayID, _ := r.current()
		return relayID
	}
	s.NeedsRoom = func(destination string) bool {
		l := r.lanes.Get(destination)
		return l != nil && !l.HasMuchRoom()
	}
	s.ForOthers = func(destination string) bool {
		l := r.lanes.Get(destination)
		return l == nil || l.TellsOthers(time.Now())
	}
	s.Written, s.Dropped, s.RangeEnded, s.Failed = r.applyWritten, r.applyDropped, r.hands.Remove, r.databaseError
	return s
}

// applyWritten makes room in the lanes for outcomes that the database has taken, and wakes what
// waits for them.
func (r *Relay) applyWritten(settlements []settle.Settlement) {
	type label struct {
		destination string
		outcome     policy.Outcome
		reason      policy.Reason
		class       lane.Class
		pauses      bool
		spilled     bool // an event that breaks a rule, which no lane has
	}
	counts := map[label]int{}
	givenBack, failed := false, false
	now := time.Now()
	for i := range settlements {
		s := &settlements[i]
		r.noteWritten(s, now)
		failed = failed || s.Outcome == policy.Fail
		if s.Outcome == policy.Fail && !s.Posted && s.EventType != nil { // the senders count requests
			r.cfg.History.Attempted(history.Key{Destination: s.Destination, EventType: *s.EventType}, policy.Fail, 0, history.NoLatency)
		}
		if s.Spilled && s.Outcome != policy.Fail {
			continue
		}
		counts[label{s.Destination, s.Outcome, s.Reason, lane.Class(s.Class), s.PausesDestination, s.Spilled}]++
		if s.Outcome == policy.Retry {
			r.mailbox.retries.Add(now, s.Delay)
		}
		givenBack = givenBack || needsScan(s)
	}
	for of, n := range counts {
		l := r.lanes.Get(of.destination)
		if of.pauses {
			r.cfg.Log.Warn().Str("destination", of.destination).Msg("paused: the receiver answered 410 Gone")
			l.PauseWritten()
		}
		if !of.spilled {
			l.Release(of.class, n)
		}
		if hook := r.cfg.Hooks.Settled; hook != nil {
			hook(of.destination, of.outcome, of.reason, n)
		}
	}
	r.mailbox.post(agenda.CauseRoom)
	if givenBack && r.phases.Taking.Err() == nil {
		r.mailbox.post(agenda.CauseSweep) // the lane's cursor is past what was given back
	}
	if failed {
		signal(r.signals.alerts)
	}
}

// needsScan reports whether the claimer must scan at once for what was given back. It need not for
// a delivery that an open breaker holds, since the probes lead to it; for one behind another of its
// ordering key, or the next one of a free key, since the key leads to it; and must not for one that
// cannot be read, or that is suspect, since it would be claimed again and again.
func needsScan(s *settle.Settlement) bool {
	return s.Outcome == policy.Hold && !s.Posted && !s.FreesKey &&
		s.Reason != policy.ReasonBreaker && s.Reason != policy.ReasonOrder && s.Reason != policy.ReasonDatabase && s.Reason != policy.ReasonSuspect
}

// heldAgain is how long after a request that was held its row is read again, if the breaker has not
// opened.
const heldAgain = time.Second

// noteWritten records when a row that was made is due, and that a delivery of an ordering key is
// settled.
func (r *Relay) noteWritten(s *settle.Settlement, now time.Time) {
	l := r.lanes.Get(s.Destination)
	switch {
	case s.Outcome != policy.Hold:
	case s.InHand == nil && s.Posted && l != nil:
		l.NoteHeld(s.DueAt, now.Add(heldAgain))
		r.mailbox.retries.Add(now, heldAgain)
	case s.InHand != nil:
		if wait := s.InHand.UntilDue(now); wait > 0 {
			r.mailbox.retries.Add(now, wait)
		} else if l != nil {
			l.NoteDue(s.DueAt)
		}
	}
	if l != nil {
		l.SettleKey(s, s.FreesKey, s.Blocks)
		r.lanes.Engage(l)
	}
}

// applyDropped gives the room and the ordering key of an outcome back that the database refused
// until its lease ended.
func (r *Relay) applyDropped(s *settle.Settlement) {
	l := r.lanes.Get(s.Destination)
	if l == nil {
		return
	}
	l.SettleKey(s, true, true)
	r.lanes.Engage(l)
	if s.Spilled {
		return
	}
	if s.PausesDestination {
		l.PauseWritten() // which it is not, but nothing else would let the lane send again
	}
	l.Release(lane.Class(s.Class), 1)
	r.mailbox.post(agenda.CauseRoom)
}
