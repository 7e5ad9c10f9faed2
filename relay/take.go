package relay

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
)

const (
	maxRangeEvents = 2000        // of one range
	minRangeEvents = 500         // for which a fast lane must have room
	maxRangeBytes  = 16 << 20    // of their payloads
	blindFor       = time.Minute // payloads are not read by a take after one could not be: they are loaded one by one

	rescueIntervals = 6 // poll intervals between two searches for ranges that no relay has in hand, if nothing asks for one

	checkAgain = 2 * time.Millisecond // between two questions whether another relay still has keys in hand
)

// A taker takes new events, routes them and hands them out. It belongs to the claimer's goroutine.
type taker struct {
	db           pg.Pool
	log          zerolog.Logger
	lease        time.Duration
	pollInterval time.Duration
	maxInFlight  func() int

	lanes   *lanes
	hands   *hands
	agenda  *agenda.Agenda
	pace    *agenda.Pace
	clock   *pg.Clock
	joins   *joins
	settler *settle.Settler
	start   func(*lane) // a sender

	reparked func() // follows when events were parked by routes that had changed
	// What follows what happens; nil: nothing does.
	handed func(destination string, deliveries int)
	ran    func(events int, took time.Duration)

	taken
	awaiting []awaitingRange // in their order
}

// taken is what a taker knows of the server's events.
type taken struct {
	cut        bool      // the last range was cut: its difference has further events
	passedAt   time.Time // when events beyond a cut were searched for last
	blindUntil time.Time // payloads are not read until then
	complete   time.Time // by the database: what had been committed then has been taken

	routes   *intake.Routes
	routesAt int64           // what the take said with which they were read
	parked   bool            // an event was parked by these routes
	held     map[string]bool // destinations of which this relay may send nothing
	heldAt   int64
}

// forget forgets what may not be so on another server.
func (t *taker) forget() { t.taken = taken{} }

// takeEvents takes a range of new events, and gives it to the lanes. polling says that it is time to poll.
func (t *taker) takeEvents(ctx context.Context, instance int32, polling bool) error {
	begun := time.Now()
	size := t.lanes.rangeSize(begun, t.lease)
	r := intake.Range{Found: intake.Busy} // while a lane has no room
	if size >= minRangeEvents {
		var err error
		if r, err = t.takeRange(ctx, instance, size, begun); err != nil {
			return err
		}
	}
	if r.Found == intake.Busy || r.Found == intake.Beaten {
		t.agenda.At(agenda.CauseTakeAgain, begun)
		if polling {
			t.pace.Full(begun)
		}
		return nil
	}
	if t.cut = r.More; r.More {
		t.agenda.At(agenda.CauseCutRange, begun)
	}
	if len(r.Events) > 0 {
		t.clock.Set(r.TakenAt)
		if err := t.give(ctx, instance, &r, begun); err != nil {
			t.agenda.At(agenda.CauseRescue, begun) // no relay has it in hand
			return err
		}
	}
	switch now := time.Now(); {
	case polling:
		t.pace.Polled(now, len(r.Events), now.Sub(begun))
	case len(r.Events) > 0:
		t.pace.Worked(now)
	}
	return nil
}

// takeRange takes a range of at most so many events.
func (t *taker) takeRange(ctx context.Context, instance int32, size int, begun time.Time) (intake.Range, error) {
	terms := intake.Terms{Events: size, Bytes: maxRangeBytes, Promised: t.lanes.shortestPromise()}
	if begun.Before(t.blindUntil) {
		terms.Bytes = 0
	}
	r, err := intake.TakeRange(ctx, t.db, instance, terms, t.cut)
	if err != nil {
		t.agenda.At(agenda.CauseRescue, begun) // it may have been taken
		if pg.ClassifyError(err) == pg.ErrorDamaged {
			t.blindUntil = begun.Add(blindFor)
		}
		return r, err
	}
	if r.Found == intake.Missing {
		return r, intake.ErrNoIntake
	}
	if r.Found == intake.Nothing || r.Whole {
		t.complete = r.TakenAt
	}
	if t.ran != nil {
		t.ran(len(r.Events), time.Since(begun))
	}
	return r, nil
}

// checkOrigin makes sure that the transaction ids of the events are this server's, and begins again where they are not.
func (t *taker) checkOrigin(ctx context.Context) error {
	err := intake.CheckOrigin(ctx, t.db)
	foreign, found := errors.AsType[*intake.ForeignError](err)
	switch {
	case !found:
		return err
	case foreign.IsFailover():
		t.log.Info().Int32("timeline", foreign.Found.Timeline).Msg("the database server was promoted")
		return intake.AcceptTimeline(ctx, t.db, foreign)
	}
	t.log.Warn().Err(foreign).Msg("every event that may not be settled becomes pending again")
	n, err := intake.Rebase(ctx, t.db, foreign.Found, 10_000)
	if err == nil {
		t.log.Warn().Int64("deliveries", n).Msg("made pending deliveries of the events from another server")
	}
	return err
}

// refresh reads the routes and the states of destinations again if they have changed since.
func (t *taker) refresh(ctx context.Context, instance int32, r *intake.Range) (err error) {
	if t.routes == nil || r.Routes != t.routesAt {
		list, err := t.readRoutes(ctx)
		if err != nil {
			return err
		}
		t.routes, t.routesAt = intake.NewRoutes(list), r.Routes
		if t.parked { // perhaps after the search for what has a route now
			t.parked = false
			t.reparked()
		}
	}
	if t.held == nil || r.Destinations != t.heldAt {
		if t.held, err = t.readHeldDestinations(ctx, instance); err != nil {
			return err
		}
		t.heldAt = r.Destinations
	}
	return nil
}

// give routes the events of a range and gives them to the lanes. What these cannot send soon becomes pending.
func (t *taker) give(ctx context.Context, instance int32, r *intake.Range, begun time.Time) error {
	if err := t.refresh(ctx, instance, r); err != nil {
		return err
	}
	targets := targets{taker: t}
	inHand, deliveries := t.spread(&targets, instance, r, begun)
	t.hands.add(inHand.Seq)
	if len(deliveries) == 0 {
		return t.endRange(ctx, inHand)
	}
	t.settler.Track(inHand)
	var keyed []delivery
	parts := map[string][]delivery{}
	for i := range deliveries {
		d := &deliveries[i]
		if d.rule != "" {
			t.fail(d)
			continue
		}
		if !d.given.Scheduled.IsZero() {
			t.spill(*d, policy.ReasonEarly)
			continue
		}
		if d.event.OrderingKey != nil && d.destination != "" {
			d.given.Awaits.Store(true)
			keyed = append(keyed, *d)
			continue
		}
		if reason := targets.of(d.destination).whyNot(d); reason != "" {
			t.spill(*d, reason)
			continue
		}
		part := parts[d.destination]
		if part == nil {
			part = make([]delivery, 0, len(deliveries)/len(targets.all)+1)
		}
		parts[d.destination] = append(part, *d)
	}
	t.handOutGiven(parts)
	if len(keyed) == 0 {
		return nil
	}
	a := awaitingRange{instance: instance, seq: inHand.Seq, inHand: inHand, deliveries: keyed}
	rest, err := t.giveKeyed(ctx, a, t.awaitedKeys())
	if err != nil {
		rest = a
	}
	t.keepWaiting(rest)
	return err
}

// endRange ends a range of which each delivery has a row.
func (t *taker) endRange(ctx context.Context, inHand *settle.Range) error {
	hold := inHand.Held()
	hold.Ended = true
	_, err := intake.SettleRanges(ctx, t.db, intake.Settlement{Relay: inHand.Instance, Ranges: []intake.Hold{hold}})
	t.hands.remove(inHand.Seq)
	return err
}

// spread makes the deliveries of a range, and returns those that have no row.
func (t *taker) spread(targets *targets, instance int32, r *intake.Range, begun time.Time) (*settle.Range, []delivery) {
	s := spreader{
		taker: t, targets: targets, r: r, begun: begun, leaseEnds: begun.Add(t.lease), window: r.TakenAt.Add(-liveWindow),
		inHand: &settle.Range{Seq: r.Seq, Fence: r.Fence, Instance: instance, Begun: begun, Taken: time.Now()}, schedule: schedule{},
	}
	destinations := make([][]string, len(r.Events))
	n := 0
	for i := range r.Events {
		destinations[i] = t.route(&r.Events[i])
		n += len(destinations[i])
	}
	// Neither grows: what is in hand is pointed at.
	s.inHand.Deliveries = make([]settle.InHand, 0, n)
	s.deliveries = make([]delivery, 0, n)
	for i := range r.Events {
		s.add(&r.Events[i], destinations[i])
	}
	return s.inHand, s.deliveries
}

// route returns the destinations of an event.
func (t *taker) route(e *intake.Event) (destinations []string) {
	if e.EventType != nil {
		destinations = t.routes.Destinations(*e.EventType)
	}
	if len(destinations) == 0 {
		t.parked = true
		return parked
	}
	return destinations
}

// A spreader makes the deliveries of a range.
type spreader struct {
	*taker
	targets    *targets
	r          *intake.Range
	begun      time.Time
	leaseEnds  time.Time
	window     time.Time // what became due since is live
	schedule   schedule
	inHand     *settle.Range
	deliveries []delivery
}

// add makes the deliveries of one event.
func (s *spreader) add(e *intake.Event, destinations []string) {
	event, bytes := e.Event, len(e.Payload)
	switch {
	case e.Payload == nil: // it was not read
		bytes = inlinePayload + 1
	case bytes > inlinePayload:
		event.Payload = nil // loaded again when its turn comes
	}
	rule := intake.BrokenRule(e)
	due, wait := e.Due()
	if rule != "" {
		due, wait = e.CreatedAt, 0 // it fails now, whatever time it asks for
	}
	var scheduled time.Time
	if e.OrderingKey != nil && rule == "" {
		if scheduled = s.schedule.joinsAt(*e.OrderingKey, due.Time, e.CreatedAt.Time, wait); !scheduled.IsZero() {
			due.Time = scheduled
		}
	}
	for _, to := range destinations {
		s.inHand.Deliveries = append(s.inHand.Deliveries, settle.InHand{
			Range: s.inHand, EventID: e.ID, Destination: to, OrderingKey: e.OrderingKey, PayloadBytes: bytes, Wait: wait, LeaseEnds: s.leaseEnds,
			Scheduled: scheduled,
		})
		g := &s.inHand.Deliveries[len(s.inHand.Deliveries)-1]
		if slices.Contains(e.Settled, to) {
			g.HasRow = true
			continue
		}
		s.deliveries = append(s.deliveries, delivery{
			eventID: e.ID, destination: to, fence: s.r.Fence, nextAttemptAt: due, payloadBytes: bytes, leaseEnds: s.leaseEnds, given: g, event: event,
		})
		d := &s.deliveries[len(s.deliveries)-1]
		if to != "" {
			d.rule = rule
		}
		d.class = d.classAt(s.window)
		if t := s.targets.of(to); t.lane != nil {
			d.notAfter, d.promiseEnds, d.promised = s.r.TakenAt.Add(t.promise), s.begun.Add(t.promise), true
			g.NotAfter = d.notAfter
		}
	}
}

// parked are the destinations of an event without a route.
var parked = []string{""}

// A target is a destination as the claimer finds it when it hands out a range.
type target struct {
	lane    *lane         // nil: this relay does not serve it
	reason  policy.Reason // why nothing may be sent there now; empty: it may
	promise time.Duration
	room    int // how many deliveries the lane may still get
}

// whyNot returns why a delivery must become pending at once. Otherwise it counts the delivery, and returns nothing.
func (t *target) whyNot(d *delivery) policy.Reason {
	switch {
	case t.reason != "":
		return t.reason
	case d.given.UntilDue(time.Now()) > 0:
		return policy.ReasonEarly
	case t.room == 0:
		return policy.ReasonFull
	}
	t.room--
	return ""
}

// targets are those of a range.
type targets struct {
	*taker
	all map[string]*target
}

func (ts *targets) of(destination string) *target {
	if t, known := ts.all[destination]; known {
		return t
	}
	t := &target{lane: ts.lanes.get(destination)}
	switch {
	case t.lane == nil:
		t.reason = policy.ReasonRemoved
	case ts.held[destination]:
		t.reason = policy.ReasonPaused
	default:
		ts.lanes.engage(t.lane)
		t.reason, t.room = t.lane.stopReason(), t.lane.roomForRange(ts.lease)
	}
	if t.lane != nil {
		t.promise = t.lane.current().Destination.Retry.NotAfter
	}
	if ts.all == nil {
		ts.all = map[string]*target{}
	}
	ts.all[destination] = t
	return t
}

// spill makes a delivery pending that no lane has.
func (t *taker) spill(d delivery, reason policy.Reason) {
	t.settleSpilled(d.held(reason))
}

// settleSpilled settles a delivery that no lane has. What follows in its key waits until its row is written.
func (t *taker) settleSpilled(s settle.Settlement) {
	s.Spilled = true
	if l := t.lanes.get(s.Destination); l != nil && s.OrderingKey != nil {
		if s.InHand.Scheduled.IsZero() {
			l.beginSpill(*s.OrderingKey)
		} else {
			l.beginArrival(*s.OrderingKey, s.InHand.Scheduled)
		}
	}
	t.settler.Settle(s)
}

// fail settles an event that breaks a rule.
func (t *taker) fail(d *delivery) {
	v := policy.Result{Reason: policy.ReasonInvalidEvent, Message: "the event breaks the rule " + d.rule}
	about := policy.Circumstances{Ordered: d.event.OrderingKey != nil}
	if l := t.lanes.get(d.destination); l != nil {
		about.OnFailure = l.current().Destination.OnFailure
	}
	s := d.settlement(policy.Decide(v, about), time.Now(), 0)
	t.settleSpilled(s)
}

// findBlocked asks about the keys of deliveries, each once. What the lanes have written before, it sees.
func (t *taker) findBlocked(ctx context.Context, instance int32, hold intake.Hold, of []delivery) (map[ordering.Key]intake.Blocked, error) {
	found := make(map[ordering.Key]intake.Blocked, len(of))
	var keys []intake.Key
	index := make(map[ordering.Key]int, len(of))
	for i := range of {
		d := &of[i]
		key := d.orderingKey()
		if n, known := index[key]; known {
			if due := d.nextAttemptAt.Time; due.After(keys[n].Due) {
				keys[n].Due = due
			}
			continue
		}
		index[key] = len(keys)
		skips := false
		if l := t.lanes.get(d.destination); l != nil {
			l.forgetBlocked()
			skips = l.current().Destination.OnFailure == policy.SkipFailed
		}
		keys = append(keys, intake.Key{Key: key.Key, Destination: key.Destination, SkipsFailed: skips, Due: d.nextAttemptAt.Time})
	}
	blocked, err := intake.FindBlockedKeys(ctx, t.db, instance, hold, keys)
	if err != nil {
		return nil, err
	}
	for i, k := range keys {
		found[ordering.Key{Destination: k.Destination, Key: k.Key}] = blocked[i]
	}
	return found, nil
}

// handOutGiven queues deliveries of a range, and starts senders for them.
func (t *taker) handOutGiven(parts map[string][]delivery) {
	if len(parts) == 0 {
		return
	}
	for name := range parts {
		t.lanes.engage(t.lanes.get(name))
	}
	shares := t.lanes.divide(t.maxInFlight(), parts)
	for name, deliveries := range parts {
		if t.handed != nil {
			t.handed(name, len(deliveries))
		}
		l := t.lanes.get(name)
		l.setShare(shares, true) // before it starts senders: all lanes together may have MaxInFlight
		start, refused := l.give(deliveries)
		for range start {
			t.start(l)
		}
		for _, d := range refused {
			t.spill(d, policy.ReasonOrder)
		}
	}
}

// hands are the ranges that this relay has in hand, by their numbers. It is safe for concurrent use.
type hands struct{ seqs sync.Map }

func (h *hands) add(seq int64) { h.seqs.Store(seq, true) }

func (h *hands) remove(seq int64) { h.seqs.Delete(seq) }

// list is not nil: to the database that would be an unknown list.
func (h *hands) list() []int64 {
	list := []int64{}
	for seq := range h.seqs.Range {
		list = append(list, seq.(int64))
	}
	return list
}
