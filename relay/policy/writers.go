package policy

import (
	"slices"
	"time"
)

// Writers follows the transactions that have written to outbox and are still open. Two things follow from them: up to which id
// every event can be seen, since ids are handed out in order and an open transaction keeps the lock that its INSERT took;
// and when an event was committed so late that claims have passed its place. It is not safe for
// concurrent use.
type Writers struct {
	Closed  int64 // every event up to this id can be seen by statements from now on, or never will be
	closing int64 // is closed once awaited is empty
	awaited map[string]bool
	open    map[string]writer
	looked  time.Time // the database's, at the last look
	Next    time.Time // when to look again
	owed    bool      // a look is owed to those who wrote just before the relay became idle
}

// A writer is an open transaction.
type writer struct {
	since time.Time // when it was first seen, on this clock
	after time.Time // it began to write after this, on the database's: an idle relay may see it long after that
}

// Overlap is how far behind the newest delivery seen claims look again: transactions commit out of order.
const Overlap = 2 * time.Second

// WritersMost is the longest time between two looks of an idle relay at a transaction that stays open.
const WritersMost = 5 * time.Second

const writersEvery = 250 * time.Millisecond // between two looks of a busy relay

// Observe compares the transactions that are open at the given time with those of the last look. at is the database's time,
// latest the largest id of an event that can be seen. late is since when events may have become due that were committed only
// now; zero: none that a look over the overlap would miss.
func (w *Writers) Observe(now, at time.Time, latest int64, open []string, idle bool) (late time.Time) {
	if !w.looked.IsZero() && at.Sub(w.looked) >= Overlap/2 {
		late = w.looked // a transaction may have begun and ended since
	}
	for id, was := range w.open {
		if slices.Contains(open, id) {
			continue
		}
		delete(w.open, id)
		delete(w.awaited, id)
		if at.Sub(was.after) >= Overlap/2 && (late.IsZero() || was.after.Before(late)) {
			late = was.after
		}
	}
	if len(w.awaited) == 0 {
		w.Closed, w.closing = max(w.Closed, w.closing), latest
		w.awaited = map[string]bool{}
		for _, id := range open {
			w.awaited[id] = true
		}
		if len(open) == 0 {
			w.Closed = max(w.Closed, latest)
		}
	}
	if w.looked.IsZero() { // those that are open now may have begun at any time
		w.looked = time.Unix(0, 0)
	}
	wait := WritersMost
	if !idle || len(open) == 0 {
		wait = writersEvery
	}
	for _, id := range open {
		if _, known := w.open[id]; !known {
			if w.open == nil {
				w.open = map[string]writer{}
			}
			w.open[id] = writer{now, w.looked}
		}
		wait = min(wait, max(writersEvery, now.Sub(w.open[id].since)/100))
	}
	w.Next, w.owed, w.looked = now.Add(wait), false, at
	return late
}

// Passes reports whether a claim of what became due after the given time would never see some of what was committed since claims last
// looked at all that was due, at the time whole: a lane was busy with a burst, or had no room for long. All times are the database's.
func Passes(whole, after, now time.Time) bool {
	return !whole.IsZero() && now.Sub(whole) >= Overlap/2 && after.After(whole.Add(-Overlap/2))
}

// BecameIdle makes the next turn look: a transaction that wrote between the last look and the declaration announces nothing
// when it commits, and would wait for a sweep.
func (w *Writers) BecameIdle() { w.Next, w.owed = time.Time{}, true }

// Woken plans the next look of an idle relay that is notified, and returns the database's time to which its claims must look back; zero: there
// was no look. The claim comes first if no transaction was open at the last look: what has been committed since was begun since, too.
// What is committed between that claim and the next look is found after the look.
func (w *Writers) Woken(now time.Time) (since time.Time) {
	w.Next = now
	if len(w.open) == 0 && !w.looked.IsZero() {
		w.Next = now.Add(writersEvery)
	}
	return w.looked
}

// Pending reports whether the transactions that are known, or one look at all of them, need further looks of an idle relay.
func (w *Writers) Pending() bool { return w.owed || len(w.open) > 0 }

// Wanted reports whether it is time to look. While the relay is idle producers announce what they commit, but those who began
// before do not.
func (w *Writers) Wanted(now time.Time, idle bool) bool {
	return !now.Before(w.Next) && (!idle || w.Pending())
}
