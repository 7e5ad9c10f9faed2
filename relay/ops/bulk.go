package ops

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// DefaultReceiverMemory is how long a receiver that keeps the recommended retention remembers what it has processed.
const DefaultReceiverMemory = 2160 * time.Hour

const (
	// bulkBatch is how many deliveries one transaction of a bulk command changes at most, and looks at.
	bulkBatch = 1000
	// bulkSample is how many deliveries a preview shows.
	bulkSample = 5
	// CountLimit is up to how many deliveries a preview counts.
	CountLimit = 1_000_000
)

// A Selection names deliveries. Its conditions narrow each other; the zero value names every delivery, which is why
// callers should refuse it: see Empty.
type Selection struct {
	// EventIDs of whose deliveries others are left alone. Empty: those of any event.
	EventIDs []int64
	// Destination by name. Empty: any, also none (parked).
	Destination string
	// Parked deliveries only: those that match no route.
	Parked bool
	// Statuses they may have. Replay knows failed (the default), delivered and discarded; Discard knows pending and
	// failed (both by default).
	Statuses []string
	// Type is a pattern of event types, in which '*' stands for any characters. Empty: any.
	Type string
	// Since and Until bound when the event was created: Since <= created_at < Until. Zero: no bound.
	Since, Until time.Time
	// Reason of the last attempt, as in [Delivery]. Empty: any.
	Reason string
	// OrderingKey of the event. Empty: any, also none.
	OrderingKey string
	// Limit of how many are changed. 0: no limit.
	Limit int64
}

// Empty reports whether nothing narrows the selection: not even a status was named.
func (s Selection) Empty() bool {
	return len(s.EventIDs) == 0 && len(s.Statuses) == 0 && !s.Parked && s.Since.IsZero() && s.Until.IsZero() &&
		s.Destination+s.Type+s.Reason+s.OrderingKey == ""
}

// A Bulk counts what a replay or a discard found and did. It counts deliveries.
type Bulk struct {
	// Matched by the selection, and free to be changed.
	Matched int64 `json:"matched"`
	// More of them exist than were counted.
	More bool `json:"more,omitempty"`
	// Done of the matched were changed.
	Done int64 `json:"done"`
	// InFlight ones were left alone: a relay is sending them.
	InFlight int64 `json:"in_flight"`
	// Missed were changed or locked by another session in the meantime, and left alone.
	Missed int64 `json:"missed"`
	// TooOld to be replayed: their receivers may have forgotten that they processed them.
	TooOld int64 `json:"too_old"`
	// EventMissing cannot be replayed: their event is gone.
	EventMissing int64 `json:"event_missing"`
	// OtherStatus counts, by status, the deliveries of named events that the selection leaves out for their status.
	OtherStatus map[string]int64 `json:"other_status,omitempty"`
	// Unknown of the named events have no delivery here.
	Unknown int64 `json:"unknown_events"`
	// UnknownIDs are the first of them.
	UnknownIDs []int64 `json:"unknown_event_ids,omitempty"`
	// Sample holds the first few of the matched.
	Sample []Sample `json:"sample,omitempty"`
}

// Sample is one of the deliveries that a bulk command would change.
type Sample struct {
	EventID        int64      `json:"event_id,string"`
	EventType      string     `json:"event_type"`
	IdempotencyKey string     `json:"idempotency_key"`
	CreatedAt      *time.Time `json:"created_at"`
	Destination    string     `json:"destination"` // empty: parked
	Status         string     `json:"status"`
}

// bulkAction is what a bulk command does to the deliveries that it finds.
type bulkAction struct {
	name     string
	allowed  []string // statuses that it can change
	standard []string // those that it changes unless told otherwise
	memory   time.Duration
	change   string // statement
}

func replayAction(memory time.Duration) bulkAction {
	return bulkAction{"replay", []string{"failed", "delivered", "discarded"}, []string{"failed"}, memory, replayDeliveries}
}

func discardAction() bulkAction {
	return bulkAction{"discard", []string{"pending", "failed"}, []string{"pending", "failed"}, 0, discardDeliveries}
}

// PreviewReplay counts what Replay would do, up to [CountLimit], and changes nothing.
func (o *Outbox) PreviewReplay(ctx context.Context, selection Selection, memory time.Duration) (Bulk, error) {
	return o.preview(ctx, replayAction(memory), selection)
}

// PreviewDiscard counts what Discard would do, up to [CountLimit], and changes nothing.
func (o *Outbox) PreviewDiscard(ctx context.Context, selection Selection) (Bulk, error) {
	return o.preview(ctx, discardAction(), selection)
}

// Replay makes deliveries pending again: due now, with all their attempts before them, behind everything that is not a
// replay. Pending ones are left alone, and so are events created longer ago than memory: the receiver may have
// forgotten that it processed them, and would do so twice. 0: it never forgets.
//
// Each batch is a transaction of its own. progress, which may be nil, follows each. When ctx ends, the batch at hand is
// finished, and the error says why it ended; Bulk is what was done, with any error. Replaying again never does harm: a
// delivery is found at most once by each call, and not while it is pending.
func (o *Outbox) Replay(ctx context.Context, selection Selection, memory time.Duration, progress func(Bulk)) (Bulk, error) {
	return o.act(ctx, replayAction(memory), selection, progress)
}

// Discard gives pending, parked and failed deliveries up for good, unless they are in flight. It works in batches as
// Replay does.
func (o *Outbox) Discard(ctx context.Context, selection Selection, progress func(Bulk)) (Bulk, error) {
	return o.act(ctx, discardAction(), selection, progress)
}

// preview counts what act would find.
func (o *Outbox) preview(ctx context.Context, action bulkAction, selection Selection) (b Bulk, err error) {
	err = o.walk(ctx, action, selection, &b, func(found []candidate) (bool, error) {
		for _, c := range found[:min(len(found), bulkSample-len(b.Sample))] {
			b.Sample = append(b.Sample, Sample{c.EventID, c.EventType, c.IdempotencyKey, c.CreatedAt, c.Destination, c.Status})
		}
		b.Matched += int64(len(found))
		b.More = b.Matched >= CountLimit
		return !b.More, nil
	})
	if err != nil {
		return b, fmt.Errorf("preview %s: %w", action.name, err)
	}
	return b, nil
}

// act changes what it finds, batch by batch, and tells relays.
func (o *Outbox) act(ctx context.Context, action bulkAction, selection Selection, progress func(Bulk)) (b Bulk, err error) {
	err = o.walk(ctx, action, selection, &b, func(found []candidate) (bool, error) {
		b.Matched += int64(len(found))
		done, err := changeDeliveries(context.WithoutCancel(ctx), o.pool, action.change, found)
		if err != nil {
			b.Matched -= int64(len(found))
			return false, err
		}
		b.Done += done
		b.Missed += int64(len(found)) - done
		if progress != nil {
			progress(b)
		}
		return true, nil
	})
	if b.Done > 0 {
		// Also after an error: what was done shall not wait for a relay's own sweep.
		if tellErr := o.tellRelays(context.WithoutCancel(ctx)); err == nil {
			err = tellErr
		}
	}
	if err != nil {
		return b, fmt.Errorf("%s: %w", action.name, err)
	}
	return b, nil
}

// tellRelays makes relays look behind their positions at once.
func (o *Outbox) tellRelays(ctx context.Context) error {
	if err := notifySweep(ctx, o.pool); err != nil {
		return fmt.Errorf("notify relays, which find it by themselves within their poll interval: %w", err)
	}
	return nil
}

// walk shows visit everything that the selection names and the action can change, at most a batch at a time, and counts
// in b what is left out. No delivery is shown twice, whatever becomes of it meanwhile: otherwise one that is replayed
// and delivered again before the walk ends would be replayed for ever.
func (o *Outbox) walk(ctx context.Context, action bulkAction, s Selection, b *Bulk, visit func([]candidate) (bool, error)) error {
	if len(s.Statuses) == 0 {
		s.Statuses = action.standard
	}
	for _, status := range s.Statuses {
		if !slices.Contains(action.allowed, status) {
			return fmt.Errorf("status %q cannot be chosen; choose %s", status, strings.Join(action.allowed, ", "))
		}
	}
	latest, err := latestEvent(ctx, o.pool)
	if err != nil {
		return err
	}
	left := s.Limit
	for _, way := range ways(s) {
		for {
			if err := context.Cause(ctx); err != nil {
				return err
			}
			list, more, err := way.next(ctx, o.pool, s, action.memory, latest)
			if err != nil {
				return err
			}
			found := sift(list, s, action, b)
			if s.Limit > 0 {
				found = found[:min(int64(len(found)), left)]
				left -= int64(len(found))
			}
			goOn := true
			if len(found) > 0 {
				if goOn, err = visit(found); err != nil {
					return err
				}
			}
			if !goOn || s.Limit > 0 && left == 0 {
				return nil
			}
			if !more {
				break
			}
		}
	}
	return nil
}

// ways returns how to go through the table for a selection. Each visits a row once; only statuses that none but an
// operator leaves, or that nothing leads back to, may be spread over several.
func ways(s Selection) (all []*way) {
	has := func(status string) bool { return slices.Contains(s.Statuses, status) }
	switch {
	case len(s.EventIDs) > 0:
		ids := slices.Compact(slices.Sorted(slices.Values(s.EventIDs)))
		return []*way{{statement: candidatesByID, ids: ids}}
	case has("delivered"), has("discarded"):
		return []*way{{statement: candidatesOfAll}}
	}
	if has("pending") {
		all = append(all, &way{statement: candidatesPending})
	}
	if has("failed") && !s.Parked {
		all = append(all, &way{statement: candidatesFailed})
	}
	return all
}

// sift returns what the action can change and counts the rest.
func sift(list []candidate, s Selection, action bulkAction, b *Bulk) (found []candidate) {
	for _, c := range list {
		switch {
		case c.Status == "": // a named event without a delivery
			b.Unknown++
			if len(b.UnknownIDs) < 10 {
				b.UnknownIDs = append(b.UnknownIDs, c.EventID)
			}
		case c.Matched && c.InFlight:
			b.InFlight++
		case c.Matched && action.name == "replay" && c.CreatedAt == nil:
			b.EventMissing++
		case c.Matched && c.TooOld:
			b.TooOld++
		case c.Matched:
			found = append(found, c)
		case c.OtherStatus && len(s.EventIDs) > 0:
			if b.OtherStatus == nil {
				b.OtherStatus = map[string]int64{}
			}
			b.OtherStatus[c.Status]++
		}
	}
	return found
}
