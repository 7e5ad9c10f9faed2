package take

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// RescueRanges takes over the ranges that no relay has in hand: of relays that died, and of this
// one if the answer of a take was lost. Their deliveries become pending rows, which need only the
// sizes of payloads. Once a payload or a row cannot be read, or not in time, none is.
func (t *Taker) RescueRanges(ctx context.Context, now time.Time, relayID int32) error {
	inline := 0
	if now.Before(t.blindUntil) {
		inline = intake.Blind
	}
	for {
		r, found, err := intake.RescueRange(ctx, t.DB, relayID, t.Hands.fences(), inline)
		if inline != intake.Blind && pg.ClassifyError(err) == pg.ErrorDamaged {
			inline = intake.Blind
			continue
		}
		t.noteSlow(err)
		if err != nil {
			return err
		}
		if !found {
			t.Agenda.At(agenda.CauseRescue, now.Add(rescueIntervals*t.PollInterval))
			return nil
		}
		t.Hands.add(r.Ref())
		waits, err := t.giveBackRescued(ctx, relayID, &r, t.awaitedKeys())
		if err != nil {
			t.Hands.Remove(r.Ref())
			return err
		}
		if len(waits) > 0 {
			t.keepWaiting(awaitingRange{relayID: relayID, seq: r.Seq, rescued: &r, keys: waits})
		}
	}
}

// giveBackRescued makes what is left of a range that was taken over pending. While another relay
// has some of its ordering keys in hand, or some are among awaiting, those of ranges that wait in
// this relay, it returns all keys of the range, and is to be called again.
func (t *Taker) giveBackRescued(ctx context.Context, relayID int32, r *intake.Range, awaiting map[ordering.Key]bool) (waits []ordering.Key, err error) {
	if err := t.refresh(ctx, relayID, r); err != nil {
		return nil, err
	}
	inHand, left := t.spread(t.newTargets(), relayID, r, time.Now())
	var keyed []lane.Delivery
	keys := map[ordering.Key]bool{} // also of what joins its key later: until it has a row, nothing may pass it
	for _, d := range left {
		if d.Event.OrderingKey == nil {
			continue
		}
		keys[d.OrderingKey()] = true
		if d.Given.Scheduled.IsZero() {
			keyed = append(keyed, d)
		}
	}
	var blocked map[ordering.Key]intake.Blocked
	if len(keyed) > 0 {
		waitingKeys := maps.Clone(awaiting)
		if waitingKeys == nil {
			waitingKeys = map[ordering.Key]bool{}
		}
		t.findArrivals(keyed, waitingKeys)
		blocked, err = t.findBlocked(ctx, relayID, inHand.Ref(), keyed)
		if errors.Is(err, intake.ErrLost) { // it is found again
			t.Hands.Remove(r.Ref())
			t.Agenda.At(agenda.CauseRescue|agenda.CauseTakeAgain, time.Now())
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		for key, why := range blocked {
			if why.InHand || waitingKeys[key] {
				return slices.Collect(maps.Keys(keys)), nil
			}
		}
	}
	if len(left) == 0 {
		return nil, t.endRange(ctx, inHand)
	}
	for i := range left {
		d := &left[i]
		d.Promised = false // by an earlier request, perhaps
		if d.Destination == "" || !d.Given.Scheduled.IsZero() {
			continue
		}
		d.Given.Rescues = 1 // the relay may have died of it
		if promised := r.TakenAt.Add(r.Promised); r.Promised > 0 && (d.Given.NotAfter.IsZero() || promised.Before(d.Given.NotAfter)) {
			d.Given.NotAfter = promised
		}
	}
	t.followDue(keyed, blocked, nil) // it cannot join before the range: other events of the range may have rows, or were sent
	t.Settler.Track(inHand)
	for _, d := range left { // through the settler, which makes rows of what this relay has in hand of their keys
		t.spill(d, policy.ReasonShutdown)
	}
	return nil, nil
}
