package take

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
)

// An awaitingRange has deliveries whose ordering keys another relay has in hand.
type awaitingRange struct {
	relayID    int32 // under which this relay has it
	inHand     *settle.TakenRange
	deliveries []lane.Delivery
	seq        int64
	rescued    *intake.Range  // of a relay that died: its deliveries get rows
	keys       []ordering.Key // of what was rescued
}

// abandon leaves the deliveries to the settler, which finds out that their range is lost.
func (a *awaitingRange) abandon() {
	for i := range a.deliveries {
		a.deliveries[i].Given.Awaits.Store(false)
	}
}

// keepWaiting makes the claimer ask again for a range.
func (t *Taker) keepWaiting(a awaitingRange) {
	if len(a.deliveries) == 0 && a.rescued == nil {
		return
	}
	t.awaiting = append(t.awaiting, a)
	slices.SortStableFunc(t.awaiting, func(a, b awaitingRange) int { return cmp.Compare(a.seq, b.seq) })
	t.Agenda.At(agenda.CauseAwaitedKeys, time.Now().Add(checkAgain))
}

// awaitedKeys returns the ordering keys for which anything waits.
func (t *Taker) awaitedKeys() map[ordering.Key]bool {
	keys := map[ordering.Key]bool{}
	for _, a := range t.awaiting {
		for _, key := range a.keys {
			keys[key] = true
		}
		for i := range a.deliveries {
			keys[a.deliveries[i].OrderingKey()] = true
		}
	}
	return keys
}

// RecheckAwaiting gives the lanes what no other relay has in hand any more. A range that waits for
// long has got rows: then its deliveries are given back, and claimed by their keys.
func (t *Taker) RecheckAwaiting(ctx context.Context, relayID int32) error {
	if len(t.awaiting) == 0 {
		return nil
	}
	list := t.awaiting
	t.awaiting = nil
	waitingKeys := map[ordering.Key]bool{}
	for n, a := range list {
		if a.relayID != relayID { // this relay was taken for dead, and with it what it had in hand
			if a.rescued != nil {
				t.Hands.Remove(a.rescued.Ref())
			}
			a.abandon()
			continue
		}
		if a.rescued != nil {
			waits, err := t.giveBackRescued(ctx, relayID, a.rescued, waitingKeys)
			if err != nil {
				t.awaiting = append(t.awaiting, list[n:]...)
				return err
			}
			if len(waits) > 0 {
				t.awaiting = append(t.awaiting, a)
				for _, key := range a.keys { // what follows waits, too
					waitingKeys[key] = true
				}
			}
			continue
		}
		rest, err := t.giveKeyed(ctx, a, waitingKeys)
		if err != nil {
			t.awaiting = append(t.awaiting, list[n:]...)
			return err
		}
		if len(rest.deliveries) > 0 {
			t.awaiting = append(t.awaiting, rest)
		}
	}
	if len(t.awaiting) > 0 {
		t.Agenda.At(agenda.CauseAwaitedKeys, time.Now().Add(checkAgain))
	}
	return nil
}

// giveKeyed gives the deliveries of a range with ordering keys to their lanes, in their order,
// unless something of the key comes first: a row, or what another relay has in hand. What has
// become due joins the key first. It returns what has to wait for that. waitingKeys are the keys
// for which earlier ranges wait; it adds those of this one.
func (t *Taker) giveKeyed(ctx context.Context, a awaitingRange, waitingKeys map[ordering.Key]bool) (rest awaitingRange, err error) {
	t.findArrivals(a.deliveries, waitingKeys) // first: what is written afterwards, the database shows
	blocked, err := t.findBlocked(ctx, a.relayID, a.inHand.Ref(), a.deliveries)
	if errors.Is(err, intake.ErrLost) { // the next take finds the events again
		a.abandon()
		t.Agenda.At(agenda.CauseTakeAgain, time.Now())
		return rest, nil
	}
	if err != nil {
		return rest, err
	}
	if err := t.joinFirst(ctx, a.seq, a.deliveries, blocked, waitingKeys); err != nil {
		return rest, err
	}
	t.followDue(a.deliveries, blocked, waitingKeys)
	old := time.Since(a.inHand.Begun) > settle.RowsAfter*3/4
	rest = awaitingRange{relayID: a.relayID, seq: a.seq, inHand: a.inHand}
	parts := map[string][]lane.Delivery{}
	targets := t.newTargets()
	for _, d := range a.deliveries {
		key := d.OrderingKey()
		if blocked[key].InHand || waitingKeys[key] {
			waitingKeys[key] = true
			rest.deliveries = append(rest.deliveries, d)
			continue
		}
		d.Given.Awaits.Store(false)
		if !d.Given.Scheduled.IsZero() {
			t.spill(d, policy.ReasonEarly)
			continue
		}
		reason := policy.ReasonOrder
		if !blocked[key].ByRow && !old {
			reason = targets.of(d.Destination).whyNot(&d)
		}
		if reason == "" {
			parts[d.Destination] = append(parts[d.Destination], d)
			continue
		}
		blocked[key] = intake.Blocked{ByRow: true} // for what follows it
		t.spill(d, reason)
	}
	t.handOutGiven(parts)
	return rest, nil
}

// findArrivals adds the keys of deliveries to waitingKeys for which this relay is about to write
// rows that come first.
func (t *Taker) findArrivals(of []lane.Delivery, waitingKeys map[ordering.Key]bool) {
	for i := range of {
		key := of[i].OrderingKey()
		if l := t.Lanes.Get(key.Destination); l != nil && l.AwaitsArrival(key.Key, t.follows(&of[i])) {
			waitingKeys[key] = true
		}
	}
}

// joinFirst joins to the keys of a range what became due before their first deliveries in it,
// unless these wait for something else, and adds the keys to waitingKeys: the caller asks again
// about them.
func (t *Taker) joinFirst(ctx context.Context, seq int64, of []lane.Delivery, blocked map[ordering.Key]intake.Blocked, waitingKeys map[ordering.Key]bool) error {
	var due []intake.Key
	asked := map[ordering.Key]bool{}
	for i := range of {
		key, first := of[i].OrderingKey(), t.follows(&of[i])
		if asked[key] {
			continue
		}
		asked[key] = true
		why := blocked[key]
		if why.Due.IsZero() && !why.Unknown && !waitingKeys[key] { // all have joined
			delete(t.unreadable, key)
		}
		if !why.Due.IsZero() && !why.Due.After(first) && !why.InHand && !waitingKeys[key] {
			due = append(due, intake.Key{Key: key.Key, Destination: key.Destination, Due: first})
		}
	}
	for _, k := range due {
		waitingKeys[k.OrderingKey()] = true
	}
	return t.Joins.Before(ctx, seq, due, t.noteUnreadable)
}
