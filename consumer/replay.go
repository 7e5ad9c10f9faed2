package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Filter chooses events of an inbox: those to which everything that is set applies. What the middleware or [Once] has
// processed is never among them. The zero Filter is refused, because nobody means all events.
type Filter struct {
	// FromID and ToID bound the number that an event got when it was recorded (inbox_events.inbox_id), both
	// inclusive. 0: no bound.
	FromID, ToID int64

	// Type is an event type; '*' in it stands for any characters, as in routes. Empty: any type.
	Type string

	// States are the states to choose from. Empty: those that the operation is meant for.
	States []State

	// Since and Until bound the time at which an event was recorded, by the database's clock: from Since on, and before
	// Until. Zero: no bound.
	Since, Until time.Time

	// Key is one idempotency key. Empty: any.
	Key string

	// OrderingKey is one ordering key. Empty: any, and none.
	OrderingKey string

	// Limit is how many events to choose at most, those with the lowest numbers. 0: no limit.
	Limit int64
}

// replayable and ignorable are what the operations are meant for, and may be told to include.
var (
	replayed    = []State{StateFailed, StateIgnored}
	replayable  = []State{StatePending, StateFailed, StateIgnored, StateSucceeded}
	ignorable   = []State{StatePending, StateFailed}
	everyState  = []State{StatePending, StateProcessing, StateSucceeded, StateIgnored, StateFailed}
	forPersons  = []State{StateFailed, StateIgnored}
	errNoFilter = errors.New("consumer: an empty Filter would choose every event: set FromID, Type, States, Since, Key or another of its fields")
)

// complete checks a filter, and says which states it chooses from: byDefault unless it names some, all of them allowed.
func (f Filter) complete(byDefault, allowed []State) (Filter, error) {
	if f.FromID == 0 && f.ToID == 0 && f.Type == "" && len(f.States) == 0 && f.Since.IsZero() && f.Until.IsZero() && f.Key == "" && f.OrderingKey == "" {
		return f, errNoFilter
	}
	switch {
	case f.FromID < 0 || f.ToID < 0:
		return f, fmt.Errorf("consumer: Filter.FromID and ToID are %d and %d: numbers begin at 1", f.FromID, f.ToID)
	case f.ToID != 0 && f.FromID > f.ToID:
		return f, fmt.Errorf("consumer: Filter.FromID %d is above ToID %d", f.FromID, f.ToID)
	case !f.Since.IsZero() && !f.Until.IsZero() && !f.Since.Before(f.Until):
		return f, fmt.Errorf("consumer: Filter.Since %s is not before Until %s", f.Since.Format(time.RFC3339), f.Until.Format(time.RFC3339))
	case f.Limit < 0:
		return f, fmt.Errorf("consumer: Filter.Limit is negative: %d", f.Limit)
	}
	for _, state := range f.States {
		if !slices.Contains(everyState, state) {
			return f, fmt.Errorf("consumer: Filter.States: %q is no state of an event", state)
		}
		if !slices.Contains(allowed, state) {
			return f, fmt.Errorf("consumer: Filter.States: this cannot be done to events that are %s", state)
		}
	}
	if len(f.States) == 0 {
		f.States = byDefault
	}
	return f, nil
}

// like is the pattern of Type for LIKE.
func (f Filter) like() string {
	return strings.NewReplacer(`\`, `\\`, `%`, `\%`, `_`, `\_`, `*`, `%`).Replace(f.Type)
}

// Replay makes the chosen events pending and due at once, as if they had never been tried, and returns how many: failed
// and ignored ones, or those in the States that the filter names. Naming StateSucceeded runs their handlers once more, on
// top of the effect that is there already. An event of an ordering key takes its place in its order: before younger ones,
// unless one of them is being worked. One whose payload somebody has removed cannot be replayed, and is passed over.
//
// It goes through any number of events in short transactions. When it fails, or ctx ends, the events that it has counted
// are replayed and the others are not: it can be called again.
func (in *Inbox) Replay(ctx context.Context, f Filter) (events int64, err error) {
	f, err = f.complete(replayed, replayable)
	if err != nil {
		return 0, err
	}
	events, err = in.change(ctx, f, replaySQL)
	if events > 0 && !in.wakeHere() {
		in.wakeOthers(ctx)
	}
	return events, err
}

// Ignore marks the chosen events, failed or pending ones, as of no concern, and returns how many. What waits behind them in
// their ordering keys goes on. Otherwise it is as [Inbox.Replay].
func (in *Inbox) Ignore(ctx context.Context, f Filter) (events int64, err error) {
	f, err = f.complete(ignorable, ignorable)
	if err != nil {
		return 0, err
	}
	events, err = in.change(ctx, f, ignoreSQL)
	if events > 0 && !in.wakeHere() {
		in.wakeOthers(ctx)
	}
	return events, err
}

// Count returns how many events the filter chooses, in any state unless it names some. It reads all that the filter's
// numbers, States or Key do not exclude.
func (in *Inbox) Count(ctx context.Context, f Filter) (events int64, err error) {
	f, err = f.complete(everyState, everyState)
	if err != nil {
		return 0, err
	}
	return in.count(ctx, f)
}

// change applies a statement to the chosen events, batch by batch, and lets go what waits in their ordering keys.
func (in *Inbox) change(ctx context.Context, f Filter, query string) (events int64, err error) {
	for after := int64(0); ; {
		limit := int64(changeBatch)
		if f.Limit > 0 {
			limit = min(limit, f.Limit-events)
		}
		if limit == 0 {
			return events, nil
		}
		changed, err := in.changeSome(ctx, f, query, after, limit)
		if err != nil {
			return events, err
		}
		events += changed.events
		for _, key := range changed.orderingKeys {
			if _, err := in.release(ctx, key); err != nil {
				return events, err // the key goes on when Run next sweeps
			}
		}
		if changed.last == 0 {
			return events, nil
		}
		after = changed.last
	}
}
