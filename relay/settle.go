package relay

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// A settlement is a verdict on its way into the database.
type settlement struct {
	delivery
	verdict
	startedAt time.Time
	duration  time.Duration
	delay     time.Duration // until the next attempt, for Retry
	freesKey  bool          // the next delivery of its ordering key can be claimed
}

// newSettlement turns a verdict into what is written: a Retry gets its delay, or becomes a Fail after the last attempt.
func newSettlement(d delivery, v verdict, policy RetryPolicy, startedAt time.Time, took time.Duration, fraction float64) settlement {
	s := settlement{delivery: d, verdict: v, startedAt: startedAt, duration: took}
	s.event = event{orderingKey: d.event.orderingKey} // the payload is not needed any more
	if v.outcome != Retry {
		return s
	}
	attempt := d.attempts + 1
	// That this relay had to stop says nothing against the delivery: it gets another attempt, though this was the last.
	if attempt >= policy.MaxAttempts && v.reason != ReasonShutdown {
		s.outcome = Fail
		s.message = clip(fmt.Sprintf("attempt %d of %d: %s", attempt, policy.MaxAttempts, v.message))
		return s
	}
	s.delay = policy.delay(attempt, fraction, v.retryAfter)
	return s
}

// bound reports whether the receiver may know of the promise by which this delivery was sent: a former request, or this
// one, may have told it.
func (s *settlement) bound() bool { return !s.promised || s.posted && !s.unreached }

// outcomes is a batch of settlements, by the statement that writes them.
type outcomes struct {
	delivered, retried, failed, held []settlement
	logged                           []settlement // attempts for the log, of any outcome
	size                             int
	skipLocked                       bool // leave out rows that somebody else has locked
}

func (b *outcomes) add(s settlement, logDelivered bool) {
	b.size++
	switch s.outcome {
	case Delivered:
		b.delivered = append(b.delivered, s)
	case Retry:
		b.retried = append(b.retried, s)
	case Fail:
		b.failed = append(b.failed, s)
	case Hold:
		b.held = append(b.held, s)
	}
	if s.posted && (s.outcome != Delivered || logDelivered) {
		b.logged = append(b.logged, s)
	}
}

// lists returns the settlements by statement; together they are the batch.
func (b *outcomes) lists() [][]settlement {
	return [][]settlement{b.delivered, b.retried, b.failed, b.held}
}

// batchOf returns a batch of the given settlements that waits for no lock on their rows.
func (r *Relay) batchOf(settlements []settlement) *outcomes {
	b := &outcomes{skipLocked: true}
	for _, s := range settlements {
		b.add(s, r.config().LogDelivered)
	}
	return b
}

// without returns the batch without some of its settlements, for counting.
func (b *outcomes) without(missed []settlement) *outcomes {
	if len(missed) == 0 {
		return b
	}
	type claim struct {
		eventID     int64
		destination string
		fence       int64
	}
	left := map[claim]bool{}
	for i := range missed {
		left[claim{missed[i].eventID, missed[i].destination, missed[i].fence}] = true
	}
	var rest outcomes
	for _, list := range b.lists() {
		for _, s := range list {
			if !left[claim{s.eventID, s.destination, s.fence}] {
				rest.add(s, false)
			}
		}
	}
	return &rest
}

// A batch is written when it is this old or this large, whichever comes first.
const (
	settleAfter = 5 * time.Millisecond
	settleBatch = 1000
	asideAgain  = time.Second // between two attempts to write what is locked
)

// settle passes a settlement on to the settler. When the settler has given up, at the very end of a stop without a
// database, the settlement is left to the lease.
func (r *Relay) settle(l *lane, s settlement) {
	if s.posted {
		r.logAttempt(&s)
		if hook := r.cfg.Hooks.Attempted; hook != nil {
			hook(Attempt{
				EventID: s.eventID, Destination: s.destination, Number: s.attempts + 1,
				StatusCode: s.statusCode, Outcome: s.outcome, Reason: s.reason, Duration: s.duration,
			})
		}
	}
	select {
	case r.settlements <- s:
	case <-r.settling.Done():
	}
}

// settleAll collects settlements into batches and writes them, until the channel is closed and drained. What somebody
// else has locked is put aside, where it keeps its lane's room but no other settlement, and tried again until it is
// written or the settler has to give up.
func (r *Relay) settleAll() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var aside []settlement
	var again time.Time // when to try those
	for source := r.settlements; source != nil || len(aside) > 0; {
		var due <-chan time.Time
		var end <-chan struct{}
		if len(aside) > 0 {
			due = time.After(time.Until(again))
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
			if missed := r.write(r.collect(first, timer)); len(missed) > 0 {
				r.cfg.Log.Warn().Int("deliveries", len(missed)).Int64("event_id", missed[0].eventID).
					Str("destination", missed[0].destination).Msg("another session keeps deliveries locked; settling them when it ends")
				aside, again = append(aside, missed...), time.Now().Add(asideAgain)
			}
		case <-due:
			aside = r.write(r.batchOf(aside))
			again = time.Now().Add(asideAgain)
		case <-end:
			r.gaveUp(len(aside))
			return
		}
	}
}

// collect makes a batch of what comes until it is old or large enough.
func (r *Relay) collect(first settlement, timer *time.Timer) *outcomes {
	var batch outcomes
	batch.add(first, r.config().LogDelivered)
	timer.Reset(settleAfter)
	for batch.size < settleBatch {
		select {
		case s, open := <-r.settlements:
			if !open {
				return &batch
			}
			batch.add(s, r.config().LogDelivered)
		case <-timer.C:
			return &batch
		}
	}
	return &batch
}

// write repeats a batch until the database has taken it, and returns what it could not write because somebody else has
// it locked. A batch that the database refuses for what stands in it is written one by one, so that one row cannot keep
// the others.
func (r *Relay) write(batch *outcomes) (missed []settlement) {
	failing := newBackoff()
	for repeated := false; ; repeated = true {
		instance, _ := r.session.current()
		missed, stale, err := r.store.settle(r.settling, instance, batch)
		if err == nil {
			if repeated {
				stale = 0 // unknown: when only the acknowledgement was lost, what came first was this very batch
			}
			r.written(batch.without(missed), stale)
			if len(missed) > 0 && !batch.skipLocked {
				return r.write(r.batchOf(missed)) // what had only changed while this waited for it is written now
			}
			return missed
		}
		r.databaseError("settle", err)
		if refused(err) {
			return r.writeSingly(batch)
		}
		if hasCode(err, lockNotAvailable) {
			if batch.skipLocked && len(batch.failed) > 0 {
				return r.writeWithoutFailed(batch)
			}
			batch.skipLocked = true // which does not help against the lock of a whole table: that is waited for
		}
		select {
		case <-time.After(failing.NextBackOff()):
		case <-r.settling.Done():
			r.gaveUp(batch.size)
			return nil
		}
	}
}

func (r *Relay) gaveUp(deliveries int) {
	r.cfg.Log.Warn().Int("deliveries", deliveries).Msg("stopping without having settled; the deliveries will be attempted again")
}

// writeWithoutFailed leaves out what writes more than its own row: the alert's, or the destination's, is locked.
func (r *Relay) writeWithoutFailed(batch *outcomes) (missed []settlement) {
	failed := batch.failed
	if rest := batch.without(failed); rest.size > 0 {
		missed = r.write(r.batchOf(slices.Concat(rest.lists()...)))
	}
	return append(missed, failed...)
}

// writeSingly writes a refused batch row by row. A row that is refused again is left to its lease: it will be attempted
// again, which its receiver can bear.
func (r *Relay) writeSingly(batch *outcomes) (missed []settlement) {
	for _, list := range batch.lists() {
		for i := range list {
			if batch.size == 1 {
				r.cfg.Log.Error().Int64("event_id", list[i].eventID).Str("destination", list[i].destination).
					Msg("the database refuses the outcome of this delivery; it will be attempted again when its lease ends")
				l := r.lane(list[i].destination)
				if list[i].outcome == Fail && list[i].reason == ReasonGone {
					l.pauseWritten() // which it is not, but nothing else would let the lane go on
				}
				l.release(list[i].class, 1)
				return nil
			}
			single := outcomes{skipLocked: batch.skipLocked}
			single.add(list[i], r.config().LogDelivered)
			missed = append(missed, r.write(&single)...)
		}
	}
	return missed
}

// refused reports whether repeating the same statement can only fail again: its data, a constraint or a trigger is
// against it (SQLSTATE classes 22, 23, 44 and P0).
func refused(err error) bool {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || len(pgErr.Code) != 5 {
		return false
	}
	switch pgErr.Code[:2] {
	case "22", "23", "44", "P0":
		return true
	}
	return false
}

// SQLSTATEs that are met with more than another try.
const (
	readOnlyTransaction = "25006"
	lockNotAvailable    = "55P03"
)

// hasCode reports whether err is an error of the database with that SQLSTATE.
func hasCode(err error, code string) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == code
}

// written frees the lanes' room and tells who wants to know.
func (r *Relay) written(batch *outcomes, stale int) {
	if stale > 0 {
		r.cfg.Log.Warn().Int("deliveries", stale).Msg("settled too late: another relay had claimed the deliveries meanwhile")
		if hook := r.cfg.Hooks.StaleSettle; hook != nil {
			hook(stale)
		}
	}
	type label struct {
		destination string
		outcome     Outcome
		reason      Reason
		class       class
	}
	counts := map[label]int{}
	givenBack := false
	for _, list := range batch.lists() {
		for i := range list {
			s := &list[i]
			counts[label{s.delivery.destination, s.outcome, s.reason, s.class}]++
			if s.freesKey {
				r.lane(s.delivery.destination).unblock(*s.event.orderingKey)
			}
			givenBack = givenBack || s.lookedFor()
		}
	}
	now := time.Now()
	for i := range batch.retried {
		r.wake.retries.add(now, batch.retried[i].delay)
	}
	for of, n := range counts {
		l := r.lane(of.destination)
		if of.outcome == Fail && of.reason == ReasonGone {
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
	if len(batch.failed) > 0 {
		signal(r.alerts)
	}
}

// lookedFor reports whether what was given back is to be found at once. Not so what an open breaker holds, which waits for
// its probes; what stands behind another of its ordering key, which comes with that one; the next of a free key, which is
// found by it; and what cannot be read, which would be claimed again and again.
func (s *settlement) lookedFor() bool {
	return s.outcome == Hold && !s.posted && !s.freesKey &&
		s.reason != ReasonBreaker && s.reason != ReasonOrder && s.reason != ReasonDatabase && s.reason != ReasonSuspect
}

// logAttempt writes one line for an attempt that did not deliver; those that did are too many.
func (r *Relay) logAttempt(s *settlement) {
	level := r.cfg.Log.Debug()
	if s.outcome != Delivered {
		level = r.cfg.Log.Info()
	}
	if s.outcome == Fail {
		level = r.cfg.Log.Warn()
	}
	line := level.Int64("event_id", s.eventID).Str("destination", s.delivery.destination).Int("attempt", s.attempts+1).
		Str("outcome", string(s.outcome)).Str("reason", string(s.reason)).Int("status", s.statusCode).
		Int64("duration_ms", s.duration.Milliseconds())
	if s.outcome == Retry {
		line = line.Int64("next_attempt_in_ms", s.delay.Milliseconds())
	}
	if s.message != "" {
		line = line.Str("error", s.message)
	}
	line.Msg("attempt")
}
