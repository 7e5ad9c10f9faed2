package relay

import (
	"time"

	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/spans"
)

// A batch is written when it reaches its age or its size, whichever comes first.
const (
	settleSoon  = 5 * time.Millisecond  // the age with a settlement that something waits for; see isAwaited
	settleLater = 20 * time.Millisecond // the age without one, while settlements come at least as often
	settleBatch = 1000
)

// A settler writes what became of the deliveries.
type settler struct {
	*core
	settlements chan settlement
	recent      recentSettlements
	aside       []settlement // could not be written, and are tried again; run owns it
	collected   int          // size of the last batch, and so about that of the next; run owns it
	collectedAt time.Time    // when the last batch was complete; run owns it
}

// settle passes a settlement on to run. If run has given up, at the end of a stop without a database, settle drops the settlement, and
// the delivery is claimed again when its lease ends.
func (w *settler) settle(s settlement) {
	if s.Posted {
		w.logAttempt(&s)
		ended := s.startedAt.Add(s.duration)
		if s.span != nil {
			spans.End(s.span, s.Decision, ended)
			s.span = nil // or it would stay in memory with recentSettlements
		}
		if hook := w.config().Hooks.Attempted; hook != nil {
			hook(Attempt{
				EventID: s.eventID, Destination: s.destination, Number: s.attempts + 1,
				StatusCode: s.StatusCode, Outcome: s.Outcome, Reason: s.Reason, Duration: s.duration, Duplicate: s.Duplicate, Class: classNames[s.class],
				SinceCreated: s.since(s.event.CreatedAt, ended), SinceDue: s.since(s.nextAttemptAt, ended),
			})
		}
	}
	select {
	case w.settlements <- s:
	case <-w.settling.Done():
	}
}

// logAttempt writes one line for an attempt that did not deliver; those that did are too many.
func (w *settler) logAttempt(s *settlement) {
	level := w.config().Log.Debug()
	if s.Outcome != policy.Delivered {
		level = w.config().Log.Info()
	}
	if s.Outcome == policy.Fail {
		level = w.config().Log.Warn()
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

// run writes settlements in batches until the channel is closed and drained. It tries those set aside until they are
// written, too, or the settler has to give up. A stop waits for locked rows, not for rows that the database refuses.
func (w *settler) run() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for source := w.settlements; source != nil || w.waitsForLocks(); {
		var due <-chan time.Time
		var end <-chan struct{}
		if len(w.aside) > 0 {
			due = time.After(time.Until(w.nextTry()))
			if source == nil {
				end = w.settling.Done()
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
			w.logAbandoned(len(w.aside))
			return
		}
	}
	if len(w.aside) > 0 {
		w.logAbandoned(len(w.aside))
	}
}

// collect returns a batch of first and the settlements after it, once the batch is old or large enough.
func (w *settler) collect(first settlement, timer *time.Timer) []settlement {
	collected := append(make([]settlement, 0, min(max(w.collected, len(w.settlements))*5/4+1, settleBatch)), first)
	defer func() { w.collected, w.collectedAt = len(collected), time.Now() }()
	begun := time.Now()
	soon := w.isAwaited(&first) || begun.Sub(w.collectedAt) > settleLater // settlements are rare: waiting would bring no other
	timer.Reset(settleLater)
	if soon {
		timer.Reset(settleSoon)
	}
	for len(collected) < settleBatch {
		select {
		case s, open := <-w.settlements:
			if !open {
				return collected
			}
			collected = append(collected, s)
			if !soon && w.isAwaited(&s) {
				soon = true
				timer.Reset(min(settleSoon, settleLater-time.Since(begun)))
			}
		case <-timer.C:
			return collected
		}
	}
	return collected
}

// isAwaited reports whether something waits until a settlement is written: the next delivery of an ordering key, a retry, an
// operator, or a lane that needs the room.
func (w *settler) isAwaited(s *settlement) bool {
	return s.Outcome != policy.Delivered || s.event.OrderingKey != nil || !w.lanes.get(s.destination).hasMuchRoom()
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
	failing := newBackoff()
	failing.MaxInterval = time.Second // ordering keys must not stand still when the database is back
	repeated, damaged := false, 0
	for ; ; repeated = true {
		if w.settling.Err() != nil {
			w.logAbandoned(len(b.settlements))
			return nil, nil
		}
		instance, _ := w.current()
		begun := time.Now()
		left, stale, err := w.store.settle(w.settling, instance, b)
		if err == nil {
			if hook := w.config().Hooks.SettleRan; hook != nil {
				hook(len(b.settlements), time.Since(begun))
			}
			if repeated {
				stale = 0 // unknown: when only the acknowledgement was lost, this very batch was written before
			}
			w.written(b.without(left), stale)
			missed = copySettlements(left)
			for i := range missed {
				missed[i].noteFailure(nil)
			}
			return missed, nil
		}
		// A first try that meets a locked row is no failure: another relay's claim may hold it for a moment longer. What stays locked is
		// reported when it is set aside.
		if b.apart || !pg.HasCode(err, pg.LockNotAvailable) {
			w.databaseError("settle", err)
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
		case <-w.settling.Done():
		}
	}
}

func (w *settler) logAbandoned(deliveries int) {
	w.config().Log.Warn().Int("deliveries", deliveries).Msg("stopping without having settled; the deliveries will be attempted again")
}

// written frees the lanes' room, remembers what a crash of the server could undo, and calls the hooks.
func (w *settler) written(settlements []settlement, stale int) {
	if stale > 0 {
		w.config().Log.Warn().Int("deliveries", stale).Msg("settled too late: another relay had claimed the deliveries meanwhile")
		if hook := w.config().Hooks.StaleSettle; hook != nil {
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
			w.lanes.get(s.destination).keySettled(*s.event.OrderingKey, s.class, s.FreesKey)
		}
		if s.Outcome == policy.Retry {
			w.wake.retries.Add(now, s.Delay)
		}
		givenBack = givenBack || s.wantsLook()
		failed = failed || s.Outcome == policy.Fail
	}
	for of, n := range counts {
		l := w.lanes.get(of.destination)
		if of.outcome == policy.Fail && of.reason == policy.ReasonGone {
			w.config().Log.Warn().Str("destination", of.destination).Msg("paused: the receiver answered 410 Gone")
			l.pauseWritten()
		}
		l.release(of.class, n)
		if hook := w.config().Hooks.Settled; hook != nil {
			hook(of.destination, of.outcome, of.reason, n)
		}
	}
	signal(w.wake.room)
	if givenBack && w.taking.Err() == nil {
		w.wake.notify(true) // the lane's position is past what was given back
	}
	if failed {
		signal(w.wake.alerts)
		return // all of the batch is on the disk
	}
	w.recent.add(now, settlements)
}
