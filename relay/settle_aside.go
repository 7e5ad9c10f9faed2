package relay

import (
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// How long a settlement set aside waits until it is tried again: twice as long each time, from asideFirst up to a limit.
const (
	asideFirst   = 50 * time.Millisecond
	asideLocked  = time.Second // while another session has locked its row
	asideRefused = time.Minute // while the database refuses it
)

// setAside keeps settlements that could not be written, to try them again. They keep their lane's room. A refused one is
// dropped when its lease has ended: the delivery can be claimed again then, and its receiver can bear that.
func (w *settler) setAside(left []settlement) {
	now := time.Now()
	var locked, refused *settlement // the first new ones
	for i := range left {
		s := &left[i]
		a := s.aside
		a.tries++
		limit := asideLocked
		if a.refused != nil {
			limit = asideRefused
		}
		a.again = now.Add(min(limit, asideFirst<<min(a.tries-1, 16)))
		switch {
		case a.refused != nil && !s.leaseEnds.After(now):
			w.drop(s)
			continue
		case a.refused != nil && s.leaseEnds.Before(a.again):
			a.again = s.leaseEnds
		}
		switch {
		case a.refused != nil && a.tries == 1 && refused == nil:
			refused = s
		case a.refused == nil && a.tries == 2 && locked == nil: // a row that was only just changed has been written by now
			locked = s
		}
		w.aside = append(w.aside, *s)
	}
	log := w.config().Log
	if locked != nil {
		log.Warn().Int("deliveries", len(left)).Int64("event_id", locked.eventID).Str("destination", locked.destination).
			Msg("another session keeps deliveries locked; settling them when it ends")
	}
	if refused != nil {
		log.Error().Err(refused.aside.refused).Int("deliveries", len(left)).Int64("event_id", refused.eventID).
			Str("destination", refused.destination).Str("outcome", string(refused.Outcome)).Str("hint", pg.Hint(refused.aside.refused)).
			Msg("the database refuses the outcome of deliveries; trying again until their lease ends, then they are attempted again")
	}
}

// drop leaves a delivery to be attempted again, and gives its room and its ordering key back.
func (w *settler) drop(s *settlement) {
	l := w.lanes.get(s.destination)
	if s.event.OrderingKey != nil {
		l.keySettled(*s.event.OrderingKey, s.class, true)
	}
	if s.Outcome == policy.Fail && s.Reason == policy.ReasonGone {
		l.pauseWritten() // which it is not, but nothing else would let the lane go on
	}
	l.release(s.class, 1)
	signal(w.wake.room)
}

// tryAside writes the settlements whose turn has come.
func (w *settler) tryAside(now time.Time) {
	var due batch
	w.aside = slices.DeleteFunc(w.aside, func(s settlement) bool {
		if s.aside.again.After(now) {
			return false
		}
		due.settlements = append(due.settlements, s)
		return true
	})
	for _, part := range due.parts(nil) {
		w.setAside(w.write(part))
	}
}

// nextTry returns when the first settlement set aside is to be tried again.
func (w *settler) nextTry() time.Time {
	next := slices.MinFunc(w.aside, func(a, b settlement) int { return a.aside.again.Compare(b.aside.again) })
	return next.aside.again
}

// waitsForLocks reports whether anything set aside can be written once another session ends.
func (w *settler) waitsForLocks() bool {
	return slices.ContainsFunc(w.aside, func(s settlement) bool { return s.aside.refused == nil })
}
