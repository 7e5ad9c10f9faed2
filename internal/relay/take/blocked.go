package take

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// An unreadableKey is an ordering key of which the database cannot read all rows, or cannot join
// them. What is taken of it becomes pending, and joins the key once that works again: behind the
// rows, whatever they are.
type unreadableKey struct {
	again time.Time // when to ask again
	last  time.Time // when the last delivery joins that was taken: those after it follow it
}

// findBlocked asks about the keys of deliveries, each once. What the lanes have written before, it
// sees.
func (t *Taker) findBlocked(ctx context.Context, relayID int32, ref intake.RangeRef, of []lane.Delivery) (map[ordering.Key]intake.Blocked, error) {
	now := time.Now()
	found := make(map[ordering.Key]intake.Blocked, len(of))
	var keys []intake.Key
	var unknown []ordering.Key
	index := make(map[ordering.Key]int, len(of))
	for i := range of {
		d := &of[i]
		key := d.OrderingKey()
		if found[key].Unknown {
			continue
		}
		if now.Before(t.unreadable[key].again) {
			found[key] = intake.Blocked{Unknown: true}
			unknown = append(unknown, key)
			continue
		}
		due := t.follows(d)
		if n, known := index[key]; known {
			if due.After(keys[n].Due) {
				keys[n].Due = due
			}
			continue
		}
		index[key] = len(keys)
		skips := false
		if l := t.Lanes.Get(d.Destination); l != nil {
			l.ForgetBlocked()
			skips = l.Current().Destination.OnFailure == policy.SkipFailed
		}
		keys = append(keys, intake.Key{Key: key.Key, Destination: key.Destination, SkipsFailed: skips, Due: due})
	}
	err := pg.Apart(keys, func(part []intake.Key) error {
		blocked, err := intake.FindBlockedKeys(ctx, t.DB, relayID, ref, t.Hands.fences(), part)
		for i := range blocked {
			key := part[i].OrderingKey()
			found[key] = blocked[i]
		}
		return err
	}, func(k intake.Key, err error) {
		unknown = append(unknown, k.OrderingKey())
		t.noteUnreadable(k, err)
	})
	if err != nil || len(unknown) == 0 {
		return found, err
	}
	// Ranges can be read: what an earlier one has of the key would follow what is taken of it now.
	names := make([]string, len(unknown))
	for i, key := range unknown {
		names[i] = key.Key
	}
	blocked, err := intake.FindKeysInHand(ctx, t.DB, relayID, ref, t.Hands.fences(), names)
	for i := range blocked {
		found[unknown[i]] = blocked[i]
	}
	return found, err
}

// follows returns when a delivery would join its key: not before what was taken of the key while
// its rows could not be read. These may have begun later.
func (t *Taker) follows(d *lane.Delivery) time.Time {
	at := d.NextAttemptAt.Time
	if last := t.unreadable[d.OrderingKey()].last; last.After(at) {
		return last
	}
	return at
}

// noteUnreadable notes a key whose rows could not be read or joined.
func (t *Taker) noteUnreadable(k intake.Key, err error) {
	t.Failed("find blocked keys", err)
	if t.unreadable == nil || len(t.unreadable) >= lane.MaxReady {
		t.unreadable = map[ordering.Key]unreadableKey{}
	}
	of := t.unreadable[k.OrderingKey()]
	of.again = time.Now().Add(unreadableAgain)
	t.unreadable[k.OrderingKey()] = of
}

// followDue makes deliveries of a range join their keys by their time, too, if a row became due
// between the first one of the key in the range and them: they follow it. So do those of keys whose
// rows are unknown. waitingKeys are the keys that wait anyway.
func (t *Taker) followDue(of []lane.Delivery, blocked map[ordering.Key]intake.Blocked, waitingKeys map[ordering.Key]bool) {
	last := map[ordering.Key]time.Time{}
	for i := range of {
		key, at := of[i].OrderingKey(), of[i].NextAttemptAt.Time
		why := blocked[key]
		if waitingKeys[key] || why.InHand {
			continue
		}
		follows := last[key]
		unreadable := t.unreadable[key]
		if why.Unknown {
			follows = unreadable.last
		}
		if follows.IsZero() && !why.Unknown && (why.Due.IsZero() || why.Due.After(at)) {
			continue
		}
		if follows.After(at) { // the order of ids is kept
			at = follows
		}
		last[key], of[i].Given.Scheduled = at, at
		if why.Unknown {
			unreadable.last = at
			t.unreadable[key] = unreadable
		}
	}
}
