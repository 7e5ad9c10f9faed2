package intake

import (
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outbox-relay/outbox-relay/internal/relay/post"
)

// Found is what a relay found when it looked for events.
type Found string

// What TakeRange finds.
const (
	Taken   Found = ""        // a range, which may have no events
	Nothing Found = "none"    // nothing is new
	Busy    Found = "busy"    // another relay has ordering keys in hand and takes the next ones too; take again when it may have stopped
	Beaten  Found = "beaten"  // another relay was faster; take again
	Missing Found = "missing" // outbox_range is empty

	mustCut Found = "cut"
)

// A Range is what one relay has taken: events that were visible at the take and are in no range
// before it.
type Range struct {
	Found Found
	Seq   int64
	Fence int64
	// More says that the difference has further events: the next TakeRange should cut.
	More bool
	// Whole says that the range is the whole difference: each event that was committed before
	// TakenAt is in this range or one before it. The same holds when Found is Nothing.
	Whole   bool
	TakenAt time.Time // when the statement began, by the database
	// Promised is how long after TakenAt a receiver may have been told that nothing comes any more,
	// at the earliest; of a range that was taken over.
	Promised time.Duration
	// Routes and Destinations have grown since an earlier range if routes, or the states of
	// destinations, have changed since.
	Routes, Destinations int64
	// Unsure says that events may have rows that were not read. They must get theirs before they
	// are sent.
	Unsure bool
	// Events in the order of their ids. A range without events is ended already.
	Events []Event
}

// An Event is an event as it was taken.
type Event struct {
	post.Event
	ID          int64              // of its row
	AvailableAt pgtype.Timestamptz // as the producer wrote it, which may be infinite
	// PayloadBytes is the size of the payload, also of one that was not read; 0: not known.
	PayloadBytes int
	// Wait is how long after the take the event becomes available; not positive: it is.
	Wait time.Duration
	// Settled names the destinations that have a row of the event already: of a range that was
	// taken over, or beyond a cut.
	Settled []string
}

// Due returns when an event is due: when it is available, but not before its transaction began; and
// how long after the take that is.
//
// An event that asks for no later time is due although its transaction may have begun after the
// statement that takes it: on a loaded server a statement gets its snapshot some time after its
// begin.
func (e *Event) Due() (at pgtype.Timestamptz, wait time.Duration) {
	switch at = e.AvailableAt; {
	case at.InfinityModifier != pgtype.Finite:
		return e.CreatedAt, 0
	case at.Time.After(e.CreatedAt.Time):
		return at, e.Wait
	}
	return e.CreatedAt, min(e.Wait+e.CreatedAt.Time.Sub(at.Time), 0)
}
