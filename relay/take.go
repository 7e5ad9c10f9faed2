package relay

import (
	"context"
	"errors"
	"slices"
	"time"

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

// A taker is what the claimer knows about new events. They are taken as ranges: see package intake.
type taker struct {
	cut        bool      // the last range was cut: its difference has further events
	passedAt   time.Time // when events beyond a cut were searched for last
	blindUntil time.Time // payloads are not read until then
	complete   time.Time // by the database: what had been committed then has been taken

	routes   *intake.Routes
	routesAt int64           // what the take said with which they were read
	parked   bool            // an event was parked by these routes
	held     map[string]bool // destinations of which this relay may send nothing
	heldAt   int64

	awaiting []awaitingRange // in their order
}

// takeEvents takes a range of new events, and gives it to the lanes. polling says that it is time to poll.
func (c *claimer) takeEvents(ctx context.Context, instance int32, polling bool) error {
	begun := time.Now()
	size := c.lanes.rangeSize(begun, c.config().Lease)
	r := intake.Range{Found: intake.Busy} // while a lane has no room
	if size >= minRangeEvents {
		var err error
		if r, err = c.takeRange(ctx, instance, size, begun); err != nil {
			return err
		}
	}
	if r.Found == intake.Busy || r.Found == intake.Beaten {
		c.agenda.At(agenda.CauseTakeAgain, begun)
		if polling {
			c.pace.Full(begun)
		}
		return nil
	}
	if c.taker.cut = r.More; r.More {
		c.agenda.At(agenda.CauseCutRange, begun)
	}
	if len(r.Events) > 0 {
		c.clock.set(r.TakenAt)
		if err := c.give(ctx, instance, &r, begun); err != nil {
			c.agenda.At(agenda.CauseRescue, begun) // no relay has it in hand
			return err
		}
	}
	switch now := time.Now(); {
	case polling:
		c.pace.Polled(now, len(r.Events), now.Sub(begun))
	case len(r.Events) > 0:
		c.pace.Worked(now)
	}
	return nil
}

// takeRange takes a range of at most so many events.
func (c *claimer) takeRange(ctx context.Context, instance int32, size int, begun time.Time) (intake.Range, error) {
	t := &c.taker
	terms := intake.Terms{Events: size, Bytes: maxRangeBytes, Promised: c.lanes.shortestPromise()}
	if begun.Before(t.blindUntil) {
		terms.Bytes = 0
	}
	r, err := intake.TakeRange(ctx, c.store.pool, instance, terms, t.cut)
	if err != nil {
		c.agenda.At(agenda.CauseRescue, begun) // it may have been taken
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
	if hook := c.config().Hooks.ClaimRan; hook != nil {
		hook(len(r.Events), time.Since(begun))
	}
	return r, nil
}

// checkOrigin makes sure that the transaction ids of the events are this server's, and begins again where they are not.
func (c *claimer) checkOrigin(ctx context.Context) error {
	err := intake.CheckOrigin(ctx, c.store.pool)
	foreign, found := errors.AsType[*intake.ForeignError](err)
	switch {
	case !found:
		return err
	case foreign.IsFailover():
		c.config().Log.Info().Int32("timeline", foreign.Found.Timeline).Msg("the database server was promoted")
		return intake.AcceptTimeline(ctx, c.store.pool, foreign)
	}
	c.config().Log.Warn().Err(foreign).Msg("every event that may not be settled becomes pending again")
	n, err := intake.Rebase(ctx, c.store.pool, foreign.Found, 10_000)
	if err == nil {
		c.config().Log.Warn().Int64("deliveries", n).Msg("made pending deliveries of the events from another server")
	}
	return err
}

// refresh reads the routes and the states of destinations again if they have changed since.
func (c *claimer) refresh(ctx context.Context, instance int32, r *intake.Range) (err error) {
	t := &c.taker
	if t.routes == nil || r.Routes != t.routesAt {
		list, err := c.store.routes(ctx)
		if err != nil {
			return err
		}
		t.routes, t.routesAt = intake.NewRoutes(list), r.Routes
		if t.parked { // perhaps after the search for what has a route now
			t.parked = false
			signal(c.wake.reparked)
		}
	}
	if t.held == nil || r.Destinations != t.heldAt {
		if t.held, err = c.store.heldDestinations(ctx, instance); err != nil {
			return err
		}
		t.heldAt = r.Destinations
	}
	return nil
}

// give routes the events of a range and gives them to the lanes. What these cannot send soon becomes pending.
func (c *claimer) give(ctx context.Context, instance int32, r *intake.Range, begun time.Time) error {
	if err := c.refresh(ctx, instance, r); err != nil {
		return err
	}
	targets := targets{c: c}
	inHand, deliveries := c.spread(&targets, instance, r, begun)
	c.hands.add(inHand.Seq)
	if len(deliveries) == 0 {
		return c.endRange(ctx, inHand)
	}
	c.settler.Track(inHand)
	var keyed []delivery
	parts := map[string][]delivery{}
	for i := range deliveries {
		d := &deliveries[i]
		if d.rule != "" {
			c.fail(d)
			continue
		}
		if !d.given.Scheduled.IsZero() {
			c.spill(*d, policy.ReasonEarly)
			continue
		}
		if d.event.OrderingKey != nil && d.destination != "" {
			d.given.Awaits.Store(true)
			keyed = append(keyed, *d)
			continue
		}
		if reason := targets.of(d.destination).whyNot(d); reason != "" {
			c.spill(*d, reason)
			continue
		}
		part := parts[d.destination]
		if part == nil {
			part = make([]delivery, 0, len(deliveries)/len(targets.all)+1)
		}
		parts[d.destination] = append(part, *d)
	}
	c.handOutGiven(parts)
	if len(keyed) == 0 {
		return nil
	}
	a := awaitingRange{instance: instance, seq: inHand.Seq, inHand: inHand, deliveries: keyed}
	rest, err := c.giveKeyed(ctx, a, c.taker.awaitedKeys())
	if err != nil {
		rest = a
	}
	c.keepWaiting(rest)
	return err
}

// endRange ends a range of which each delivery has a row.
func (c *claimer) endRange(ctx context.Context, inHand *settle.Range) error {
	hold := inHand.Held()
	hold.Ended = true
	_, err := intake.SettleRanges(ctx, c.store.pool, intake.Settlement{Relay: inHand.Instance, Ranges: []intake.Hold{hold}})
	c.hands.remove(inHand.Seq)
	return err
}

// spread makes the deliveries of a range, and returns those that have no row.
func (c *claimer) spread(targets *targets, instance int32, r *intake.Range, begun time.Time) (*settle.Range, []delivery) {
	s := spreader{
		claimer: c, targets: targets, r: r, begun: begun, leaseEnds: begun.Add(c.config().Lease), window: r.TakenAt.Add(-liveWindow),
		inHand: &settle.Range{Seq: r.Seq, Fence: r.Fence, Instance: instance, Begun: begun, Taken: time.Now()}, schedule: schedule{},
	}
	destinations := make([][]string, len(r.Events))
	n := 0
	for i := range r.Events {
		destinations[i] = c.route(&r.Events[i])
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
func (c *claimer) route(e *intake.Event) (destinations []string) {
	if e.EventType != nil {
		destinations = c.taker.routes.Destinations(*e.EventType)
	}
	if len(destinations) == 0 {
		c.taker.parked = true
		return parked
	}
	return destinations
}

// A spreader makes the deliveries of a range.
type spreader struct {
	*claimer
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
	c   *claimer
	all map[string]*target
}

func (ts *targets) of(destination string) *target {
	if t, known := ts.all[destination]; known {
		return t
	}
	t := &target{lane: ts.c.lanes.get(destination)}
	switch {
	case t.lane == nil:
		t.reason = policy.ReasonRemoved
	case ts.c.taker.held[destination]:
		t.reason = policy.ReasonPaused
	default:
		ts.c.lanes.engage(t.lane)
		t.reason, t.room = t.lane.stopReason(), t.lane.roomForRange(ts.c.config().Lease)
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
func (c *claimer) spill(d delivery, reason policy.Reason) {
	c.settleSpilled(held(d, reason))
}

// settleSpilled settles a delivery that no lane has. What follows in its key waits until its row is written.
func (c *claimer) settleSpilled(s settle.Settlement) {
	s.Spilled = true
	if l := c.lanes.get(s.Destination); l != nil && s.OrderingKey != nil {
		if s.InHand.Scheduled.IsZero() {
			l.beginSpill(*s.OrderingKey)
		} else {
			l.beginArrival(*s.OrderingKey, s.InHand.Scheduled)
		}
	}
	c.settler.Settle(s)
}

// fail settles an event that breaks a rule.
func (c *claimer) fail(d *delivery) {
	v := policy.Result{Reason: policy.ReasonInvalidEvent, Message: "the event breaks the rule " + d.rule}
	about := policy.Circumstances{Ordered: d.event.OrderingKey != nil}
	if l := c.lanes.get(d.destination); l != nil {
		about.OnFailure = l.current().Destination.OnFailure
	}
	s := newSettlement(d, policy.Decide(v, about), time.Now(), 0)
	c.settleSpilled(s)
}

// findBlocked asks about the keys of deliveries, each once. What the lanes have written before, it sees.
func (c *claimer) findBlocked(ctx context.Context, instance int32, hold intake.Hold, of []delivery) (map[ordering.Key]intake.Blocked, error) {
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
		if l := c.lanes.get(d.destination); l != nil {
			l.forgetBlocked()
			skips = l.current().Destination.OnFailure == policy.SkipFailed
		}
		keys = append(keys, intake.Key{Key: key.Key, Destination: key.Destination, SkipsFailed: skips, Due: d.nextAttemptAt.Time})
	}
	blocked, err := intake.FindBlockedKeys(ctx, c.store.pool, instance, hold, keys)
	if err != nil {
		return nil, err
	}
	for i, k := range keys {
		found[ordering.Key{Destination: k.Destination, Key: k.Key}] = blocked[i]
	}
	return found, nil
}

// handOutGiven queues deliveries of a range, and starts senders for them.
func (c *claimer) handOutGiven(parts map[string][]delivery) {
	if len(parts) == 0 {
		return
	}
	for name := range parts {
		c.lanes.engage(c.lanes.get(name))
	}
	shares := c.lanes.divide(c.config().MaxInFlight, parts)
	for name, deliveries := range parts {
		if c.config().Hooks.Claimed != nil {
			c.config().Hooks.Claimed(name, len(deliveries))
		}
		l := c.lanes.get(name)
		l.setShare(shares, true) // before it starts senders: all lanes together may have MaxInFlight
		start, refused := l.give(deliveries)
		for range start {
			c.senders.start(l)
		}
		for _, d := range refused {
			c.spill(d, policy.ReasonOrder)
		}
	}
}
