package compare

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/reconcile"
)

// clockTolerance is by how much the clocks of sender and receiver may differ before an event that
// the receiver has forgotten counts as lost: that of the receiver itself.
const clockTolerance = 5 * time.Minute

// listed is how many rows the first question about a range lists, so that little is read beyond its
// end. Later ones list twice as many each, up to [reconcile.MaxKeys].
const listed = 250

// drilled matches the keys of package drill. One check of it sends them in upper case.
var drilled = regexp.MustCompile(`^(?i:drill-[a-z2-7]{10}-)`)

// isDrilled reports whether a key is of a drill: none of these has an event.
func isDrilled(key string, events []sent) bool { return len(events) == 0 && drilled.MatchString(key) }

// A cursor reads rows in the order of their keys.
type cursor[T any] struct {
	key   func(T) string
	fetch func(after string, limit int) ([]T, error)
	after string
	limit int // of the last page
	page  []T
	done  bool
}

// peek returns the next row without continuing; false: there is none.
func (c *cursor[T]) peek() (row T, ok bool, err error) {
	if len(c.page) == 0 && !c.done {
		c.limit = min(max(listed, 2*c.limit), reconcile.MaxKeys)
		if c.page, err = c.fetch(c.after, c.limit); err != nil {
			return row, false, err
		}
		for i, row := range c.page {
			if c.key(row) < c.after || i == 0 && c.after != "" && c.key(row) == c.after {
				return row, false, fmt.Errorf("a list of keys does not ascend: %q follows %q", plain.Clip(c.key(row)), plain.Clip(c.after))
			}
			c.after = c.key(row)
		}
		c.done = len(c.page) < c.limit
	}
	if len(c.page) == 0 {
		return row, false, nil
	}
	return c.page[0], true, nil
}

// candidates are findings that are checked again before they are named.
type candidates struct{ lost, strangers []string }

func (f *candidates) full(limit int) bool { return len(f.lost) >= limit || len(f.strangers) >= limit }

// name compares the ranges that differ key by key.
func (c *comparison) name(ctx context.Context) error {
	for _, n := range c.received.Counts {
		c.report.Received += n
	}
	var found candidates
	for _, s := range c.differing() {
		if found.full(c.Limit) {
			c.report.Complete = false
			break
		}
		if err := c.walk(ctx, s, &found); err != nil {
			return err
		}
	}
	return c.nameAgain(ctx, found)
}

// walk merges the keys of both sides in a span.
func (c *comparison) walk(ctx context.Context, s span, found *candidates) error {
	here := &cursor[sent]{after: s.above, key: func(e sent) string { return e.Key }, fetch: func(key string, limit int) ([]sent, error) {
		list, err := after(ctx, c.db, key, c.destinations, limit)
		c.report.RowsRead += int64(len(list))
		return list, err
	}}
	there := &cursor[reconcile.Held]{after: s.above, key: func(h reconcile.Held) string { return h.Key }, fetch: func(key string, limit int) ([]reconcile.Held, error) {
		a, err := c.ask(ctx, reconcile.Request{Ask: reconcile.AskList, After: key, Limit: limit})
		c.report.RowsRead += int64(len(a.Held))
		return a.Held, err
	}}
	for !found.full(c.Limit) {
		e, has, err := here.peek()
		if err != nil {
			return err
		}
		has = has && s.has(e.Key)
		h, held, err := there.peek()
		if err != nil {
			return err
		}
		held = held && s.has(h.Key)
		switch {
		case !has && !held:
			return nil
		case has && (!held || e.Key < h.Key):
			if here.page = here.page[1:]; c.isSettled(e) {
				found.lost = append(found.lost, e.Key)
			}
		case !has || h.Key < e.Key:
			switch there.page = there.page[1:]; {
			case !h.ReceivedAt.Before(c.receiverUntil):
			case h.ReceivedAt.Before(c.receiverSince): // its event may have been dropped
				if c.report.SinceReason != "since" && !drilled.MatchString(h.Key) {
					c.report.Forgotten++
				}
			case drilled.MatchString(h.Key):
				c.report.Drilled++
				c.report.Received-- // the digest has it
			default:
				found.strangers = append(found.strangers, h.Key)
			}
		default: // both have it. The archive may have another event of the key
			for has && e.Key == h.Key {
				here.page = here.page[1:]
				if e, has, err = here.peek(); err != nil {
					return err
				}
			}
			there.page = there.page[1:]
		}
	}
	c.report.Complete = false
	return nil
}

// isSettled reports whether a receiver must have had the event in the window.
func (c *comparison) isSettled(e sent) bool {
	return e.DeliveredAt != nil && e.DeliveredAt.Before(c.until) && !e.DeliveredAt.Before(c.since)
}

// nameAgain asks both sides once more for each candidate, and names what is still so. An event that
// was replayed, archived or forgotten in the meantime is none.
func (c *comparison) nameAgain(ctx context.Context, found candidates) error {
	events, err := c.events(ctx, slices.Concat(found.lost, found.strangers))
	if err != nil {
		return err
	}
	held, err := c.held(ctx, slices.Concat(found.lost, found.strangers))
	if err != nil {
		return err
	}
	for _, key := range found.lost {
		if _, arrived := held[key]; arrived {
			continue
		}
		i := slices.IndexFunc(events[key], c.isSettled)
		switch {
		case i < 0:
		case !c.remembersSince.IsZero() && events[key][i].CreatedAt.Before(c.remembersSince.Add(clockTolerance)):
			c.report.Forgotten++
		default:
			c.report.NeverArrived = append(c.report.NeverArrived, finding(key, &events[key][i], nil))
		}
	}
	for _, key := range found.strangers {
		h, there := held[key]
		switch {
		case !there || len(events[key]) > 0:
		case h.EventID > 0 && h.EventID < c.oldestID: // delivered long after it was created, and dropped
			c.report.Forgotten++
		default:
			c.report.Strangers = append(c.report.Strangers, finding(key, nil, &h))
		}
	}
	return nil
}

// nameUnfinished names what has arrived at least a settling time ago, and is neither done nor given
// up.
func (c *comparison) nameUnfinished(ctx context.Context) error {
	a, err := c.ask(ctx, reconcile.Request{Ask: reconcile.AskUnfinished, Since: c.receiverSince, Until: c.receiverUntil, Limit: c.Limit})
	if err != nil {
		return err
	}
	unfinished := map[string]bool{}
	for _, h := range slices.Concat(a.Held, c.doubtful) {
		unfinished[h.Key] = true
	}
	keys := slices.Sorted(maps.Keys(unfinished))
	if len(a.Held) >= c.Limit || len(keys) > c.Limit {
		c.report.Complete = false
		keys = keys[:min(len(keys), c.Limit)]
	}
	events, err := c.events(ctx, keys)
	if err != nil {
		return err
	}
	held, err := c.held(ctx, keys)
	if err != nil {
		return err
	}
	for _, key := range keys {
		if h, there := held[key]; there && !isDrilled(key, events[key]) && !h.Finished() && !h.ReceivedAt.Before(c.receiverSince) {
			c.report.NoEffect = append(c.report.NoEffect, finding(key, first(events[key]), &h))
		}
	}
	return nil
}

// nameDoubled names what the receiver counts more than one effect of.
func (c *comparison) nameDoubled(ctx context.Context) error {
	return c.nameByEffects(ctx, reconcile.AskDoubled, &c.report.Doubled)
}

// nameMissing names what the receiver has processed, and counts no effect of.
func (c *comparison) nameMissing(ctx context.Context) error {
	return c.nameByEffects(ctx, reconcile.AskMissing, &c.report.Missing)
}

// nameByEffects names what the receiver answers, twice, to a question about effects. What has no
// event is among the strangers.
func (c *comparison) nameByEffects(ctx context.Context, ask string, findings *[]Finding) error {
	if !c.report.CountsEffects {
		return nil
	}
	q := reconcile.Request{Ask: ask, Since: c.receiverSince, Until: c.receiverUntil, Limit: c.Limit}
	a, err := c.ask(ctx, q)
	if err != nil || len(a.Held) == 0 {
		return err
	}
	c.report.Complete = c.report.Complete && len(a.Held) < c.Limit
	for _, h := range a.Held {
		q.Keys = append(q.Keys, h.Key)
	}
	events, err := c.events(ctx, q.Keys)
	if err != nil {
		return err
	}
	if a, err = c.ask(ctx, q); err != nil { // once more: a handler may commit its effects later
		return err
	}
	for _, h := range a.Held {
		if e := first(events[h.Key]); e != nil {
			*findings = append(*findings, finding(h.Key, e, &h))
		}
	}
	return nil
}

// events returns the sender's events of the keys.
func (c *comparison) events(ctx context.Context, keys []string) (map[string][]sent, error) {
	events := map[string][]sent{}
	for some := range slices.Chunk(keys, reconcile.MaxKeys) {
		list, err := withKeys(ctx, c.db, some, c.destinations)
		if err != nil {
			return nil, err
		}
		for _, e := range list {
			events[e.Key] = append(events[e.Key], e)
		}
		c.report.RowsRead += int64(len(list))
	}
	return events, nil
}

// held returns what the receiver has of the keys.
func (c *comparison) held(ctx context.Context, keys []string) (map[string]reconcile.Held, error) {
	held := map[string]reconcile.Held{}
	for some := range slices.Chunk(keys, reconcile.MaxKeys) {
		a, err := c.ask(ctx, reconcile.Request{Ask: reconcile.AskFind, Keys: some})
		if err != nil {
			return nil, err
		}
		for _, h := range a.Held {
			held[h.Key] = h
		}
		c.report.RowsRead += int64(len(a.Held))
	}
	return held, nil
}

func first(events []sent) *sent {
	if len(events) == 0 {
		return nil
	}
	return &events[0]
}

// finding returns what is known of a key. Either side may know nothing.
func finding(key string, e *sent, h *reconcile.Held) Finding {
	f := Finding{Key: key}
	if e != nil {
		f.EventID, f.EventType, f.Archived, f.CreatedAt, f.DeliveredAt = e.ID, e.Type, e.Archived, &e.CreatedAt, e.DeliveredAt
		if e.Destination != nil {
			f.Destination = *e.Destination
		}
	}
	if h != nil {
		f.EventID = cmp.Or(f.EventID, h.EventID)
		f.State, f.Effects = h.State, h.Effects
		if !h.ReceivedAt.IsZero() {
			f.ReceivedAt = &h.ReceivedAt
		}
	}
	return f
}
