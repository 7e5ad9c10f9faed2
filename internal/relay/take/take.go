package take

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/join"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
)

const (
	maxRangeEvents = 2000        // of one range
	minRangeEvents = 500         // for which a fast lane must have room
	blindFor       = time.Minute // no payload is read by a take after one could not be, or not in time: they are loaded one by one

	rescueIntervals = 6 // poll intervals between two searches for ranges that no relay has in hand, if nothing asks for one

	checkAgain = 2 * time.Millisecond // between two questions whether another relay still has keys in hand

	unreadableAgain = 5 * time.Second // after which time a key is asked about again whose rows could not be read
)

// A Taker takes new events, routes them and hands them out. It belongs to the claimer's goroutine.
type Taker struct {
	DB           pg.Pool
	Log          zerolog.Logger
	Lease        time.Duration
	PollInterval time.Duration
	MaxInFlight  func() int

	Lanes   *lane.Lanes
	Hands   *Hands
	Agenda  *agenda.Agenda
	Pace    *agenda.Pace
	Clock   *pg.Clock
	Joins   *join.Keys
	Settler *settle.Settler
	Start   func(*lane.Lane) // a sender

	// Spread follows when the deliveries of a range are known, before any of them is given away;
	// nil: nothing does.
	Spread   func(*settle.TakenRange)
	Reparked func() // follows when events were parked by routes that had changed
	Failed   func(operation string, err error)
	// What follows what happens; nil: nothing does.
	Handed func(destination string, deliveries int)
	Ran    func(events int, took time.Duration)

	taken
	awaiting   []awaitingRange // in their order
	unanswered bool            // a take brought an error: it may commit until another one comes to an end
}

// taken is what a taker knows of the server's events.
type taken struct {
	cut        bool      // the last range was cut: its difference has further events
	passedAt   time.Time // when events beyond a cut were searched for last
	blindUntil time.Time // payloads are not read until then
	Complete   time.Time // by the database: what had been committed then has been taken
	slow       bool      // the last take or rescue took too long
	unreadable map[ordering.Key]unreadableKey

	routes   *intake.Routes
	routesAt int64           // what the take said with which they were read
	parked   bool            // an event was parked by these routes
	closed   map[string]bool // destinations of which this relay may send nothing
	closedAt int64
}

// Forget forgets what may not be so on another server.
func (t *Taker) Forget() { t.taken = taken{} }

// TakeEvents takes a range of new events, and gives it to the lanes. polling says that it is time
// to poll.
func (t *Taker) TakeEvents(ctx context.Context, relayID int32, polling bool) error {
	begun := time.Now()
	size := t.Lanes.RangeSize(begun, t.Lease, maxRangeEvents)
	r := intake.Range{Found: intake.Busy} // while a lane has no room
	if size >= minRangeEvents {
		var err error
		if r, err = t.takeRange(ctx, relayID, size, begun); err != nil {
			return err
		}
	}
	if r.Found == intake.Busy || r.Found == intake.Beaten {
		t.Agenda.At(agenda.CauseTakeAgain, begun)
		if polling {
			t.Pace.Full(begun)
		}
		return nil
	}
	if t.cut = r.More; r.More {
		t.Agenda.At(agenda.CauseCutRange, begun)
	}
	if len(r.Events) > 0 {
		t.Clock.Set(r.TakenAt)
		if err := t.give(ctx, relayID, &r, begun); err != nil {
			t.Agenda.At(agenda.CauseRescue, begun) // no relay has it in hand
			return err
		}
	}
	switch now := time.Now(); {
	case polling:
		t.Pace.Polled(now, len(r.Events), now.Sub(begun))
	case len(r.Events) > 0:
		t.Pace.Worked(now)
	}
	return nil
}

// takeRange takes a range of at most so many events.
func (t *Taker) takeRange(ctx context.Context, relayID int32, size int, begun time.Time) (intake.Range, error) {
	terms := intake.Terms{Events: size, Inline: lane.InlinePayload, Promised: t.Lanes.ShortestPromise()}
	if begun.Before(t.blindUntil) {
		terms.Inline = intake.Blind
	}
	r, err := intake.TakeRange(ctx, t.DB, relayID, terms, t.cut)
	if pg.IsOfRows(err) && pg.ClassifyError(err) == pg.ErrorDamaged && terms.Inline != intake.Blind {
		t.Failed("take", err)
		t.blindUntil, terms.Inline = begun.Add(blindFor), intake.Blind
		r, err = intake.TakeRange(ctx, t.DB, relayID, terms, t.cut)
	}
	if err != nil {
		t.noteSlow(err)
		t.unanswered = true
		t.Agenda.At(agenda.CauseRescue, begun) // it may have been taken
		return r, err
	}
	if r.Found == intake.Missing {
		return r, intake.ErrNoIntake
	}
	t.slow = false
	if t.unanswered && (r.Found == intake.Taken || r.Found == intake.Nothing) {
		t.unanswered = false
		t.Agenda.At(agenda.CauseRescue, begun) // it has committed by now, or never will
	}
	if r.Found == intake.Nothing || r.Whole {
		t.Complete = r.TakenAt
	}
	if t.Ran != nil {
		t.Ran(len(r.Events), time.Since(begun))
	}
	return r, nil
}

// noteSlow reads no payloads for a while after the second of two statements in a row that took too
// long: the first may have met a database that stood still.
func (t *Taker) noteSlow(err error) {
	slow := pg.TookTooLong(err)
	if slow && t.slow {
		t.blindUntil = time.Now().Add(blindFor)
	}
	t.slow = slow
}

// CheckOrigin makes sure that the transaction ids of the events are this server's, and begins again
// where they are not.
func (t *Taker) CheckOrigin(ctx context.Context) error {
	err := intake.CheckOrigin(ctx, t.DB)
	foreign, found := errors.AsType[*intake.ForeignError](err)
	switch {
	case !found:
		return err
	case foreign.IsFailover():
		t.Log.Info().Int32("timeline", foreign.Found.Timeline).Msg("the database server was promoted")
		return intake.AcceptTimeline(ctx, t.DB, foreign)
	}
	t.Log.Warn().Err(foreign).Msg("every event that may not be settled becomes pending again")
	n, err := intake.Rebase(ctx, t.DB, foreign.Found, 10_000)
	if err == nil {
		t.Log.Warn().Int64("deliveries", n).Msg("made pending deliveries of the events from another server")
	}
	return err
}

// refresh reads the routes and the states of destinations again if they have changed since.
func (t *Taker) refresh(ctx context.Context, relayID int32, r *intake.Range) (err error) {
	if t.routes == nil || r.Routes != t.routesAt {
		list, err := t.readRoutes(ctx)
		if err != nil {
			return err
		}
		t.routes, t.routesAt = intake.NewRoutes(list), r.Routes
		if t.parked { // perhaps after the search for what has a route now
			t.parked = false
			t.Reparked()
		}
	}
	if t.closed == nil || r.Destinations != t.closedAt {
		if t.closed, err = t.readClosedDestinations(ctx, relayID); err != nil {
			return err
		}
		t.closedAt = r.Destinations
	}
	return nil
}

// give routes the events of a range and gives them to the lanes. What these cannot send soon
// becomes pending.
func (t *Taker) give(ctx context.Context, relayID int32, r *intake.Range, begun time.Time) error {
	if err := t.refresh(ctx, relayID, r); err != nil {
		return err
	}
	targets := t.newTargets()
	inHand, deliveries := t.spread(targets, relayID, r, begun)
	t.Hands.add(inHand.Ref())
	if len(deliveries) == 0 {
		return t.endRange(ctx, inHand)
	}
	t.Settler.Track(inHand)
	var keyed []lane.Delivery
	parts := map[string][]lane.Delivery{}
	for i := range deliveries {
		d := &deliveries[i]
		if d.Rule != "" {
			t.fail(d)
			continue
		}
		if !d.Given.Scheduled.IsZero() {
			t.spill(*d, policy.ReasonEarly)
			continue
		}
		if d.Event.OrderingKey != nil && d.Destination != "" {
			d.Given.Awaits.Store(true)
			keyed = append(keyed, *d)
			continue
		}
		reason := targets.of(d.Destination).whyNot(d)
		if reason == "" && r.Unsure { // a row that it has wins over the one that is written now
			reason = policy.ReasonDatabase
		}
		if reason != "" {
			t.spill(*d, reason)
			continue
		}
		part := parts[d.Destination]
		if part == nil {
			part = make([]lane.Delivery, 0, len(deliveries)/len(targets.all)+1)
		}
		parts[d.Destination] = append(part, *d)
	}
	t.handOutGiven(parts)
	if len(keyed) == 0 {
		return nil
	}
	a := awaitingRange{relayID: relayID, seq: inHand.Seq, inHand: inHand, deliveries: keyed}
	rest, err := t.giveKeyed(ctx, a, t.awaitedKeys())
	if err != nil {
		rest = a
	}
	t.keepWaiting(rest)
	return err
}

// endRange ends a range of which each delivery has a row.
func (t *Taker) endRange(ctx context.Context, inHand *settle.TakenRange) error {
	of := []intake.RangeRef{inHand.Ref()}
	_, err := intake.SettleRanges(ctx, t.DB, intake.NewRows{Relay: inHand.RelayID, Ranges: of, Ended: of})
	t.Hands.Remove(inHand.Ref())
	return err
}

// route returns the destinations of an event.
func (t *Taker) route(e *intake.Event) (destinations []string) {
	if e.EventType != nil {
		destinations = t.routes.Destinations(*e.EventType)
	}
	if len(destinations) == 0 {
		t.parked = true
		return parked
	}
	return destinations
}

// parked are the destinations of an event without a route.
var parked = []string{""}

// spill makes a delivery pending that no lane has.
func (t *Taker) spill(d lane.Delivery, reason policy.Reason) {
	t.settleSpilled(d.GivenBack(reason))
}

// settleSpilled settles a delivery that no lane has. What follows in its key waits until its row is
// written.
func (t *Taker) settleSpilled(s settle.Settlement) {
	s.Spilled = true
	if l := t.Lanes.Get(s.Destination); l != nil && s.OrderingKey != nil {
		if s.InHand.Scheduled.IsZero() {
			l.BeginSpill(*s.OrderingKey)
		} else {
			l.BeginArrival(*s.OrderingKey, s.InHand.Scheduled)
		}
	}
	t.Settler.Settle(s)
}

// fail settles an event that breaks a rule.
func (t *Taker) fail(d *lane.Delivery) {
	about := policy.Circumstances{Ordered: d.Event.OrderingKey != nil}
	if l := t.Lanes.Get(d.Destination); l != nil {
		about.OnFailure = l.Current().Destination.OnFailure
	}
	s := d.Settlement(policy.Decide(policy.BreaksRule(d.Rule), about), time.Now(), 0)
	t.settleSpilled(s)
}

// handOutGiven queues deliveries of a range, and starts senders for them.
func (t *Taker) handOutGiven(parts map[string][]lane.Delivery) {
	if len(parts) == 0 {
		return
	}
	for name := range parts {
		t.Lanes.Engage(t.Lanes.Get(name))
	}
	shares := t.Lanes.Divide(t.MaxInFlight(), parts)
	for name, deliveries := range parts {
		if t.Handed != nil {
			t.Handed(name, len(deliveries))
		}
		l := t.Lanes.Get(name)
		l.SetShare(shares, true) // before it starts senders: all lanes together may have MaxInFlight
		start, refused := l.Give(deliveries)
		for range start {
			t.Start(l)
		}
		for _, d := range refused {
			t.spill(d, policy.ReasonOrder)
		}
	}
}

// Hands are the ranges that this relay has in hand. It is safe for concurrent use.
type Hands struct{ ranges sync.Map }

func (h *Hands) add(r intake.RangeRef) { h.ranges.Store(r, true) }

// Remove notes that a range has ended, or is another relay's. One that has got its number since
// stays in hand.
func (h *Hands) Remove(r intake.RangeRef) { h.ranges.Delete(r) }

// fences returns those of the ranges. It is not nil: to the database that would be an unknown list.
func (h *Hands) fences() []int64 {
	list := []int64{}
	for r := range h.ranges.Range {
		list = append(list, r.(intake.RangeRef).Fence)
	}
	return list
}
