package take

import (
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
)

// spread makes the deliveries of a range, and returns those that have no row.
func (t *Taker) spread(targets *targets, relayID int32, r *intake.Range, begun time.Time) (*settle.TakenRange, []lane.Delivery) {
	s := spreader{
		targets: targets, r: r, begun: begun, leaseEnds: begun.Add(t.Lease), window: r.TakenAt.Add(-lane.LiveWindow),
		inHand: &settle.TakenRange{Seq: r.Seq, Fence: r.Fence, RelayID: relayID, Begun: begun, Taken: time.Now()}, schedule: schedule{},
	}
	destinations := make([][]string, len(r.Events))
	n := 0
	for i := range r.Events {
		destinations[i] = t.route(&r.Events[i])
		n += len(destinations[i])
	}
	// Neither grows: what is in hand is pointed at.
	s.inHand.Deliveries = make([]settle.InHand, 0, n)
	s.deliveries = make([]lane.Delivery, 0, n)
	for i := range r.Events {
		s.add(&r.Events[i], destinations[i])
	}
	if t.Spread != nil {
		t.Spread(s.inHand)
	}
	return s.inHand, s.deliveries
}

// A spreader makes the deliveries of a range.
type spreader struct {
	targets    *targets
	r          *intake.Range
	begun      time.Time
	leaseEnds  time.Time
	window     time.Time // what became due since is live
	schedule   schedule
	inHand     *settle.TakenRange
	deliveries []lane.Delivery
}

// add makes the deliveries of one event.
func (s *spreader) add(e *intake.Event, destinations []string) {
	event, bytes := e.Event, e.PayloadBytes
	if bytes == 0 { // it was not read
		bytes = lane.InlinePayload + 1
	}
	rule := intake.BrokenRule(e)
	if !e.MayHoldKey() {
		event.OrderingKey = nil
	}
	due, wait := e.Due()
	if rule != "" {
		due, wait = e.CreatedAt, 0 // it fails now, whatever time it asks for
	}
	firstDue := due
	var scheduled time.Time
	if event.OrderingKey != nil && rule == "" {
		if scheduled = s.schedule.joinsAt(*event.OrderingKey, due.Time, e.CreatedAt.Time, wait); !scheduled.IsZero() {
			due.Time = scheduled
		}
	}
	for _, to := range destinations {
		s.inHand.Deliveries = append(s.inHand.Deliveries, settle.InHand{
			Range: s.inHand, EventID: e.ID, Destination: to, OrderingKey: event.OrderingKey, PayloadBytes: bytes, Wait: wait, LeaseEnds: s.leaseEnds,
			Scheduled: scheduled,
		})
		g := &s.inHand.Deliveries[len(s.inHand.Deliveries)-1]
		if slices.Contains(e.Settled, to) {
			g.HasRow = true
			continue
		}
		s.deliveries = append(s.deliveries, lane.Delivery{
			EventID: e.ID, Destination: to, Fence: s.r.Fence, NextAttemptAt: due, FirstDue: firstDue, PayloadBytes: bytes, LeaseEnds: s.leaseEnds,
			Given: g, Event: event,
		})
		d := &s.deliveries[len(s.deliveries)-1]
		if to != "" {
			d.Rule = rule
		}
		d.Class = d.ClassAt(s.window)
		if t := s.targets.of(to); t.lane != nil {
			d.NotAfter, d.PromiseEnds, d.Promised = s.r.TakenAt.Add(t.promise), s.begun.Add(t.promise), true
			g.NotAfter = d.NotAfter
		}
	}
}
