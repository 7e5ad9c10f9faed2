package relay

import (
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// A settlement is a decision on its way into the database.
type settlement struct {
	delivery
	policy.Decision
	startedAt time.Time
	duration  time.Duration
	aside     *aside // nil: writing it has not failed so far
}

// newSettlement returns the settlement of a delivery, without the payload, which is not needed any more.
func newSettlement(d delivery, decided policy.Decision, startedAt time.Time, took time.Duration) settlement {
	d.event = post.Event{Key: d.event.Key, OrderingKey: d.event.OrderingKey, CreatedAt: d.event.CreatedAt}
	return settlement{delivery: d, Decision: decided, startedAt: startedAt, duration: took}
}

// held returns the settlement of a delivery of which nothing was sent, and which is given back.
func held(d delivery, reason policy.Reason) settlement {
	return newSettlement(d, policy.Decide(policy.Result{Reason: reason}, policy.Circumstances{}), time.Now(), 0)
}

// since returns how long after a time of the database the given time of this process is; 0 for a time that is unknown. The
// claim dated the promise by both clocks.
func (s *settlement) since(at pgtype.Timestamptz, now time.Time) time.Duration {
	if !at.Valid || at.InfinityModifier != pgtype.Finite {
		return 0
	}
	return max(0, now.Sub(s.promiseEnds.Add(at.Time.Sub(s.notAfter))))
}

// bound reports whether the receiver may know of the promise by which this delivery was sent: a former request, or this
// one, may have told it.
func (s *settlement) bound() bool { return !s.promised || s.Posted && !s.Unreached }

// lookedFor reports whether what was given back is to be found at once. Not so what an open breaker holds, which waits for
// its probes; what stands behind another of its ordering key, which comes with that one; the next of a free key, which is
// found by it; and what cannot be read, which would be claimed again and again.
func (s *settlement) lookedFor() bool {
	return s.Outcome == policy.Hold && !s.Posted && !s.FreesKey &&
		s.Reason != policy.ReasonBreaker && s.Reason != policy.ReasonOrder && s.Reason != policy.ReasonDatabase && s.Reason != policy.ReasonSuspect
}

// aside is the state of a settlement that could not be written.
type aside struct {
	refused error // nil: its row is locked, or was just changed
	tries   int
	again   time.Time // when to try next
}

// noteFailure records why a settlement could not be written. nil and a lock mean that another session is in the way.
func (s *settlement) noteFailure(err error) {
	if pg.HasCode(err, pg.LockNotAvailable) {
		err = nil
	}
	if s.aside == nil {
		s.aside = &aside{}
	}
	s.aside.refused = err
}

// A batch is settlements that are written together.
type batch struct {
	settlements []settlement
	// apart leaves out rows that another session has locked, instead of waiting for them: the settlements have failed as
	// part of a larger batch, or were written before.
	apart bool
}

// outcomes are the settlements of a batch, by the statement that writes them.
type outcomes struct {
	delivered, retried, failed, held []*settlement
	logged                           []*settlement // attempts for the log, of any outcome
}

func (b *batch) byOutcome() (o outcomes) {
	o.delivered = make([]*settlement, 0, len(b.settlements)) // most are
	for i := range b.settlements {
		s := &b.settlements[i]
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
		if s.Logged {
			o.logged = append(o.logged, s)
		}
	}
	return o
}

// parts returns the smaller batches to write in place of one that failed with err: the settlements of each outcome, then
// each settlement alone. It returns none when smaller batches would fail, too: a batch that leaves out locked deliveries and
// still meets a lock needs the row of an alert or a destination, and so does each of its settlements.
func (b *batch) parts(err error) (parts []batch) {
	switch {
	case !b.apart:
		o := b.byOutcome()
		for _, list := range [][]*settlement{o.delivered, o.retried, o.held, o.failed} {
			if len(list) > 0 {
				parts = append(parts, batch{settlements: copySettlements(list), apart: true})
			}
		}
	case len(b.settlements) > 1 && !pg.HasCode(err, pg.LockNotAvailable):
		for i := range b.settlements {
			parts = append(parts, batch{settlements: b.settlements[i : i+1], apart: true})
		}
	}
	return parts
}

// without returns the settlements of a batch except those that were left, which point into it.
func (b *batch) without(left []*settlement) []settlement {
	if len(left) == 0 {
		return b.settlements
	}
	isLeft := make(map[*settlement]bool, len(left))
	for _, s := range left {
		isLeft[s] = true
	}
	var rest []settlement
	for i := range b.settlements {
		if !isLeft[&b.settlements[i]] {
			rest = append(rest, b.settlements[i])
		}
	}
	return rest
}

func copySettlements(list []*settlement) []settlement {
	all := make([]settlement, len(list))
	for i, s := range list {
		all[i] = *s
	}
	return all
}
