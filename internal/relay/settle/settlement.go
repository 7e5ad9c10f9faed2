package settle

import (
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// A Settlement is what became of one delivery, on its way into the database.
type Settlement struct {
	policy.Decision
	EventID     int64
	Destination string
	Fence       int64   // of the claim or the range: a row with another one is left as it is
	Attempts    int     // requests before this one
	EventType   *string // nil: the event is gone
	OrderingKey *string
	Joined      int64         // where it stood in its ordering key when it was claimed
	Key         *string       // idempotency key; nil: the event is gone
	NotAfter    time.Time     // what the receiver was promised, by the database's clock
	Promised    bool          // by this claim: no earlier request told the receiver
	LeaseEnds   time.Time     // on this process's clock
	StartedAt   time.Time     // when the request began
	Took        time.Duration // the request
	InHand      *InHand       // of a range; nil: it was claimed, and has a row

	// The settler passes these on.

	Class   int       // of the lane's queues, from which the delivery came
	DueAt   time.Time // by the database's clock
	Spilled bool      // no lane has the delivery: nothing waits for its room

	aside   *aside // nil: writing it has not failed so far
	rowless bool   // it has no row yet: it is written as a part of its range
}

// mayBlock reports whether other deliveries of the ordering key may have to wait for this one of a
// range.
func (s *Settlement) mayBlock() bool {
	return s.Outcome != policy.Delivered && s.InHand.mayBlock()
}

// HasRow reports whether the delivery has a row.
func (s *Settlement) HasRow() bool { return s.InHand == nil || s.InHand.HasRow }

// isBound reports whether the receiver may know the promise of this delivery, from an earlier
// request or from this one.
func (s *Settlement) isBound() bool { return !s.Promised || s.Posted && !s.Unreached }

// aside is the state of a settlement that could not be written.
type aside struct {
	refused error // nil: its row is locked, or was just changed
	tries   int
	again   time.Time // when to try next
}

// noteFailure records why a settlement could not be written. nil and a lock mean that another
// session is in the way.
func (s *Settlement) noteFailure(err error) {
	if pg.HasCode(err, pg.LockNotAvailable) {
		err = nil
	}
	if s.aside == nil {
		s.aside = &aside{}
	}
	s.aside.refused = err
}

// A batch holds the settlements that are written together.
type batch struct {
	settlements []Settlement
	rows        []*InHand        // deliveries in hand that get rows with them
	ended       []*TakenRange    // of which each delivery has a row then
	lost        []*TakenRange    // that are not this relay's any more, as it was found when the batch was written
	missing     []intake.Witness // that the server has lost in a crash, as it was found then
	// apart leaves out rows that another session has locked, instead of waiting for them: the
	// settlements have failed as part of a larger batch, or were written before.
	apart bool
}

// outcomes holds the settlements of a batch by the statement that writes them.
type outcomes struct {
	delivered, retried, failed, held []*Settlement
	logged                           []*Settlement // attempts for the log, of any outcome
	rowless                          []*Settlement // of ranges; failed ones are in failed too
}

func (b *batch) byOutcome() (o outcomes) {
	for i := range b.settlements {
		s := &b.settlements[i]
		if s.Logged {
			o.logged = append(o.logged, s)
		}
		if s.rowless {
			o.rowless = append(o.rowless, s)
			if s.Outcome != policy.Fail { // whose alert is written with the row
				continue
			}
		}
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
	}
	return o
}

// A partOf names what of a batch is written together when the batch has failed.
type partOf struct {
	outcome     policy.Outcome
	destination string
	taken       *TakenRange
	key         ordering.Key
	alone       int
}

// parts returns the smaller batches to write in place of one that failed with err: the settlements
// of each outcome and destination, then each settlement alone. What met a lock is divided by
// ranges, since another session may have locked the row of one. Rows of ranges are divided by
// these, and then by ordering keys. It returns none when smaller batches would fail, too: a batch
// that leaves out locked deliveries and still meets a lock needs the row of an alert, a destination
// or a range, and so does each of its settlements.
func (b *batch) parts(err error) (parts []batch) {
	locked := pg.HasCode(err, pg.LockNotAvailable)
	single := b.apart && !locked
	numbers := map[partOf]int{}
	part := func(of partOf) *batch {
		n, known := numbers[of]
		if !known {
			n = len(parts)
			numbers[of], parts = n, append(parts, batch{apart: true})
		}
		return &parts[n]
	}
	for i := range b.settlements {
		s := &b.settlements[i]
		of := partOf{outcome: s.Outcome, destination: s.Destination}
		switch {
		case single:
			of.alone = i + 1
		case locked && s.rowless:
			of.taken = s.InHand.Range
		}
		p := part(of)
		p.settlements = append(p.settlements, *s)
	}
	if len(b.settlements) == 0 && !(b.apart && locked) { // otherwise the settlements bring the rows along
		for i, d := range b.rows {
			of := partOf{alone: i + 1}
			switch {
			case !b.apart:
				of = partOf{taken: d.Range}
			case d.OrderingKey != nil: // with those of other ranges, without which none is written
				of = partOf{key: ordering.Key{Destination: d.Destination, Key: *d.OrderingKey}}
			}
			p := part(of)
			p.rows = append(p.rows, d)
		}
	}
	if b.apart && len(parts) == 1 { // this batch
		return nil
	}
	return parts
}

// without returns the settlements of a batch except those that were left, which point into it.
func (b *batch) without(left []*Settlement) (rest []Settlement) {
	if len(left) == 0 {
		return b.settlements
	}
	for i := range b.settlements {
		if !slices.Contains(left, &b.settlements[i]) {
			rest = append(rest, b.settlements[i])
		}
	}
	return rest
}

func copies(list []*Settlement) []Settlement {
	all := make([]Settlement, len(list))
	for i, s := range list {
		all[i] = *s
	}
	return all
}
