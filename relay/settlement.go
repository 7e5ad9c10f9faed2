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

// held returns the settlement that gives a delivery back of which nothing was sent.
func held(d delivery, reason policy.Reason) settlement {
	return newSettlement(d, policy.Decide(policy.Result{Reason: reason}, policy.Circumstances{}), time.Now(), 0)
}

// since returns the time from at, by the database's clock, to now, by this process's; 0 if at is unknown. The claim dated the
// promise by both clocks, which shows how they differ.
func (s *settlement) since(at pgtype.Timestamptz, now time.Time) time.Duration {
	if !at.Valid || at.InfinityModifier != pgtype.Finite {
		return 0
	}
	return max(0, now.Sub(s.promiseEnds.Add(at.Time.Sub(s.notAfter))))
}

// bound reports whether the receiver may know the promise of this delivery, from an earlier request or from this one.
func (s *settlement) bound() bool { return !s.promised || s.Posted && !s.Unreached }

// wantsLook reports whether the claimer must look at once for what was given back. It need not for a delivery that an open breaker
// holds, since the probes lead to it; for one behind another of its ordering key, or the next one of a free key, since the key leads to
// it; and must not for one that cannot be read, or that is suspect, since it would be claimed again and again.
func (s *settlement) wantsLook() bool {
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

// A batch holds the settlements that are written together.
type batch struct {
	settlements []settlement
	// apart leaves out rows that another session has locked, instead of waiting for them: the settlements have failed as
	// part of a larger batch, or were written before.
	apart bool
}

// outcomes holds the settlements of a batch by the statement that writes them.
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
