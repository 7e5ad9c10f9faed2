package ops

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/routes"
)

// A NewEvent is an event that an operator inserts.
type NewEvent struct {
	Type             string
	Payload          string // JSON
	IdempotencyKey   string
	OrderingKey      string            // empty: none
	RelatedReference string            // empty: none
	Headers          map[string]string // nil: none
}

// maxTailed is how many new events one look reads, and how many are followed.
const maxTailed = 1_000

// A TailFilter says what a [Tail] reports. Empty fields: any.
type TailFilter struct {
	Destination string // of what happens to a delivery; inserts are left out
	Type        string // a pattern, in which '*' stands for any characters
	Key         string // the idempotency key
}

// A TailMoment is a [Moment] of one event.
type TailMoment struct {
	Moment
	EventID int64  `json:"event_id,string"`
	Type    string `json:"event_type"`
	Key     string `json:"idempotency_key"`
	// Attempt, Reason and Error are of an attempt.
	Attempt int           `json:"attempt,omitempty"`
	Reason  policy.Reason `json:"reason,omitempty"`
	Error   string        `json:"error,omitempty"`
	// Seconds from when the event became due until the delivery ended; below 0: before that.
	Seconds *float64 `json:"seconds,omitempty"`
}

// A Tail follows what happens in an outbox from now on. It is not safe for concurrent use.
type Tail struct {
	o         *Outbox
	filter    TailFilter
	lastEvent int64
	seen      map[int64]bool // of the last events: one with a smaller id may commit later
	attempt   int64
	open      map[int64][]string // events that may have deliveries which have not ended, with the destinations of those that have
}

// tailOverlap is how many ids before the last one are read again: ids are given before a commit.
const tailOverlap = 500

// Tail returns a Tail that begins with what is committed after this call.
func (o *Outbox) Tail(ctx context.Context, filter TailFilter) (*Tail, error) {
	t := &Tail{o: o, filter: filter, seen: map[int64]bool{}, open: map[int64][]string{}}
	err := o.pool.QueryRow(ctx, selectLatest).Scan(&t.lastEvent, &t.attempt)
	if err != nil {
		return nil, fmt.Errorf("find the latest event: %w", err)
	}
	known, err := o.eventsBehind(ctx, t.lastEvent-tailOverlap)
	for _, e := range known {
		t.seen[e.ID] = true
	}
	return t, err
}

// Look returns what has happened since the last look, in the order of time. The text of a moment
// names its event.
func (t *Tail) Look(ctx context.Context) ([]TailMoment, error) {
	var all []TailMoment
	add := func(m TailMoment, at time.Time, destination, what, format string, args ...any) {
		if f := t.filter; f.Destination == "" || f.Destination == destination {
			m.Moment = Moment{at, destination, what, fmt.Sprintf(format, args...)}
			all = append(all, m)
		}
	}
	events, err := t.o.eventsBehind(ctx, t.lastEvent-tailOverlap)
	if err != nil {
		return nil, err
	}
	for _, e := range events {
		t.lastEvent = max(t.lastEvent, e.ID)
		if t.seen[e.ID] {
			continue
		}
		t.seen[e.ID] = true
		if !t.filter.matches(e.Type, e.Key) {
			continue
		}
		add(TailMoment{EventID: e.ID, Type: e.Type, Key: e.Key}, e.CreatedAt, "", "inserted", "event %d: inserted, %s, key %s", e.ID, e.Type, e.Key)
		if len(t.open) < maxTailed {
			t.open[e.ID] = nil
		}
	}
	for id := range t.seen {
		if id < t.lastEvent-2*tailOverlap {
			delete(t.seen, id)
		}
	}
	attempts, err := t.o.attemptsBehind(ctx, t.attempt)
	if err != nil {
		return nil, err
	}
	for _, a := range attempts {
		t.attempt = max(t.attempt, a.ID)
		if a.Outcome != policy.Delivered && t.filter.matches(a.Type, a.Key) {
			m := TailMoment{EventID: a.EventID, Type: a.Type, Key: a.Key, Attempt: a.Attempt, Reason: a.Reason, Error: plain.OrBlank(a.Error)}
			add(m, a.StartedAt, a.Destination, "attempt", "event %d: attempt %d failed: %s", a.EventID, a.Attempt, orReason(plain.OrBlank(a.Error), a.Reason))
		}
	}
	ended, err := t.o.endedOf(ctx, slices.Collect(maps.Keys(t.open)))
	if err != nil {
		return nil, err
	}
	for _, d := range ended {
		if d.Status != "" && !slices.Contains(t.open[d.EventID], d.Destination) {
			t.open[d.EventID] = append(t.open[d.EventID], d.Destination)
			m := TailMoment{EventID: d.EventID, Type: d.Type, Key: d.Key, Seconds: &d.Seconds}
			add(m, d.At, d.Destination, d.Status, "event %d: %s%s", d.EventID, d.Status, labelled(", %s", afterDue(&d.Seconds)))
		}
	}
	for _, d := range ended {
		if d.Last {
			delete(t.open, d.EventID)
		}
	}
	slices.SortStableFunc(all, func(a, b TailMoment) int { return cmp.Or(a.At.Compare(b.At), cmp.Compare(a.Text, b.Text)) })
	return all, nil
}

func (f TailFilter) matches(eventType, key string) bool {
	return (f.Key == "" || f.Key == key) && (f.Type == "" || routes.Route{Event: f.Type}.Matches(eventType))
}
