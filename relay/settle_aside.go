package relay

import (
	"slices"
	"time"
)

// aside is the state of a settlement that could not be written.
type aside struct {
	refused  error // nil: its row is locked, or was just changed
	tries    int
	again    time.Time // when to try next
	roomless bool      // its lane has its room back
}

// How long a settlement set aside waits until it is tried again: twice as long each time, from asideFirst up to a limit.
const (
	asideFirst   = 50 * time.Millisecond
	asideLocked  = time.Second // while another session has locked its row
	asideRefused = time.Minute // while the database refuses it
	// asideMost bounds how many refused settlements are kept once the lease of their claim has ended.
	asideMost = 10_000
)

// refuse notes why a settlement could not be written.
func (s *settlement) refuse(err error) {
	if s.aside == nil {
		s.aside = &aside{}
	}
	s.aside.refused = err
	if hasCode(err, lockNotAvailable) {
		s.aside.refused = nil
	}
}

// setAside keeps settlements that could not be written, to try them again. They keep their lane's room until they are
// written. A refused one keeps it only until its lease ends: then the delivery can be claimed again, and its receiver can
// bear that.
func (w *settler) setAside(left []settlement) {
	now := time.Now()
	var locked, refused *settlement // the first new ones
	for i := range left {
		s := &left[i]
		if s.aside == nil {
			s.aside = &aside{}
		}
		if s.aside.tries++; s.aside.tries == 2 && s.aside.refused == nil && locked == nil {
			locked = s // a row that was only just changed has been written by now
		}
		if s.aside.tries == 1 && s.aside.refused != nil && refused == nil {
			refused = s
		}
		w.schedule(s, now)
	}
	w.aside = append(w.aside, left...)
	log := w.relay.cfg.Log
	if locked != nil {
		log.Warn().Int("deliveries", len(left)).Int64("event_id", locked.eventID).Str("destination", locked.destination).
			Msg("another session keeps deliveries locked; settling them when it ends")
	}
	if refused != nil {
		log.Error().Err(refused.aside.refused).Int("deliveries", len(left)).Int64("event_id", refused.eventID).Str("destination", refused.destination).
			Str("outcome", string(refused.outcome)).Str("hint", hintFor(refused.aside.refused)).
			Msg("the database refuses the outcome of deliveries: it is tried again, and after their lease they are attempted again; see docs/operations.md, The database refuses an outcome")
	}
	if len(w.aside) > asideMost {
		w.forgetOldest()
	}
}

// schedule sets when a settlement is tried next, and gives the room of a refused one back when its lease has ended.
func (w *settler) schedule(s *settlement, now time.Time) {
	a := s.aside
	limit := asideLocked
	if a.refused != nil {
		limit = asideRefused
	}
	delay := limit
	if a.tries < 16 {
		delay = min(limit, asideFirst<<(a.tries-1))
	}
	a.again = now.Add(delay)
	if a.refused == nil || a.roomless {
		return
	}
	if s.leaseEnds.After(now) {
		a.again = earlier(a.again, s.leaseEnds)
		return
	}
	a.roomless = true
	l := w.relay.lane(s.destination)
	if s.outcome == Fail && s.reason == ReasonGone {
		l.pauseWritten() // which it is not, but nothing else would let the lane go on
	}
	l.release(s.class, 1)
	signal(w.relay.wake.room)
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// forgetOldest drops the oldest settlements that are refused and keep no room: their deliveries are attempted again.
func (w *settler) forgetOldest() {
	surplus := len(w.aside) - asideMost
	w.aside = slices.DeleteFunc(w.aside, func(s settlement) bool {
		surplus--
		return surplus >= 0 && s.aside.roomless
	})
}

// tryAside writes the settlements whose turn has come.
func (w *settler) tryAside(now time.Time) {
	var due []settlement
	w.aside = slices.DeleteFunc(w.aside, func(s settlement) bool {
		if s.aside.again.After(now) {
			return false
		}
		due = append(due, s)
		return true
	})
	whole := batch{settlements: due}
	for _, part := range whole.parts(nil) {
		w.setAside(w.write(part))
	}
}

// nextTry returns when the first settlement set aside is to be tried again.
func (w *settler) nextTry() (at time.Time) {
	at = w.aside[0].aside.again
	for i := range w.aside {
		at = earlier(at, w.aside[i].aside.again)
	}
	return at
}

// waitsForLocks reports whether anything set aside can be written once another session ends.
func (w *settler) waitsForLocks() bool {
	return slices.ContainsFunc(w.aside, func(s settlement) bool { return s.aside.refused == nil })
}
