package settle

import (
	"context"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

// How long a settlement set aside waits until it is tried again: twice as long each time, from
// asideFirst up to a limit.
const (
	asideFirst   = 50 * time.Millisecond
	asideLocked  = time.Second // while another session has locked its row
	asideRefused = time.Minute // while the database refuses it

	// refusedEach is how much longer all that is refused waits for each of it: each is a statement,
	// and all destinations have one settler.
	refusedEach = 10 * time.Millisecond
)

// setAside keeps settlements that could not be written, to try them again. They keep their lane's
// room and their ordering key. A refused one is dropped when its lease has ended: the delivery can
// be claimed again then, and its receiver can bear that. One without a row cannot, and is kept.
func (w *Settler) setAside(left []Settlement) {
	now := time.Now()
	var locked, refused *Settlement // the first new ones
	for i := range left {
		s := &left[i]
		a := s.aside
		a.tries++
		limit, least := asideLocked, time.Duration(0)
		if a.refused != nil {
			limit, least = asideRefused, time.Duration(len(w.aside))*refusedEach
		}
		a.again = now.Add(max(min(limit, asideFirst<<min(a.tries-1, 16)), least))
		switch {
		case s.rowless && s.HasRow(): // another part of its batch has made the row
			a.again = now
		case s.rowless || a.refused == nil:
		case !s.LeaseEnds.After(now):
			w.Dropped(s)
			continue
		case s.LeaseEnds.Before(a.again):
			a.again = s.LeaseEnds
		}
		switch {
		case a.refused != nil && a.tries == 1 && refused == nil:
			refused = s
		case a.refused == nil && a.tries == 2 && locked == nil: // a row that was only just changed has been written by now
			locked = s
		}
		w.aside = append(w.aside, *s)
	}
	if locked != nil {
		w.Log.Warn().Int("deliveries", len(left)).Int64("event_id", locked.EventID).Str("destination", locked.Destination).
			Msg("another session keeps deliveries locked; settling them when it ends")
	}
	if refused != nil {
		w.Log.Error().Err(refused.aside.refused).Int("deliveries", len(left)).Int64("event_id", refused.EventID).
			Str("destination", refused.Destination).Str("outcome", string(refused.Outcome)).Str("hint", pg.Hint(refused.aside.refused)).
			Msg("the database refuses the outcome of deliveries; trying again, those with a row until their lease ends, when they are attempted again")
	}
}

// tryAside writes the settlements that are due.
func (w *Settler) tryAside(ctx context.Context, now time.Time) {
	var due batch
	w.aside = slices.DeleteFunc(w.aside, func(s Settlement) bool {
		if s.aside.again.After(now) {
			return false
		}
		due.settlements = append(due.settlements, s)
		return true
	})
	for _, part := range due.parts(nil) {
		w.setAside(w.write(ctx, part))
	}
}

// nextTry returns when the first settlement set aside is to be tried again.
func (w *Settler) nextTry() time.Time {
	next := slices.MinFunc(w.aside, func(a, b Settlement) int { return a.aside.again.Compare(b.aside.again) })
	return next.aside.again
}

// waitsForLocks reports whether anything set aside can be written once another session ends.
func (w *Settler) waitsForLocks() bool {
	return slices.ContainsFunc(w.aside, func(s Settlement) bool { return s.aside.refused == nil })
}
