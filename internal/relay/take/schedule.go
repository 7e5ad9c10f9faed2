package take

import "time"

// LateAfter is how long after its insert an event must become due, at least, to join its key by its
// time if no relay took it before. Producers whose clock runs ahead set available_at some
// milliseconds into the future of the database.
const LateAfter = 100 * time.Millisecond

// A schedule finds out which events of a range join their ordering keys later, by their time: those
// that are not due, and those whose time came after their insert but before the take. Events of the
// same key that were inserted after that time follow these.
type schedule map[string]*keySchedule

type keySchedule struct {
	first time.Time // when the first event became due that joins its key only now
	last  time.Time // when the last event that follows it was due; zero: none does
}

// joinsAt returns when an event joins its key. due is when it is due, inserted when its transaction
// began, wait how long it is until it is due. Zero: it joins with its range.
func (s schedule) joinsAt(key string, due, inserted time.Time, wait time.Duration) time.Time {
	of := s[key]
	switch {
	case wait > 0:
		return due
	case due.Sub(inserted) >= LateAfter:
		if of == nil {
			s[key] = &keySchedule{first: due}
		} else if due.Before(of.first) {
			of.first = due
		}
		return due
	case of == nil || of.last.IsZero() && due.Before(of.first):
		return time.Time{}
	}
	if due.After(of.last) { // the order of ids is kept: transactions may begin in another one
		of.last = due
	}
	return of.last
}
