package inboxops

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/batch"
)

// MaxLimit is the largest Limit of a [Selection]: the ids of so many events are held in memory.
const MaxLimit = 100_000

// A Bulk counts what a replay or an ignore found and did. It counts events.
type Bulk struct {
	batch.Counts
	// States counts the matched by their state.
	States map[string]int64 `json:"states,omitempty"`
	// NoPayload cannot be replayed: their payload was removed.
	NoPayload int64 `json:"no_payload"`
	// OtherState counts, by state, the events that the selection names by id or key and leaves out
	// for their state.
	OtherState map[string]int64 `json:"other_state,omitempty"`
	// Unknown of the named ids are not in the inbox.
	Unknown int64 `json:"unknown_ids"`
	// UnknownIDs are the first of them.
	UnknownIDs batch.IDs `json:"unknown_inbox_ids,omitempty"`
	// KeysLeft ordering keys could not be released, since others held their lock. Workers release
	// them within half a minute.
	KeysLeft int64 `json:"keys_left,omitempty"`
	// Sample holds the first few of the matched.
	Sample []Sample `json:"sample,omitempty"`
	// LatestID is the largest inbox id that was looked at. What was recorded since is not among the
	// matched.
	LatestID int64 `json:"-"`
}

// A Sample is one of the events that a bulk command would change.
type Sample struct {
	InboxID        int64  `json:"inbox_id,string"`
	Receiver       string `json:"receiver"`
	Source         string `json:"source"`
	EventType      string `json:"event_type"`
	IdempotencyKey string `json:"idempotency_key"`
	State          string `json:"state"`
}

// action is what a bulk command does to the events that it finds.
type action struct {
	name     string
	allowed  []string // states that it can change
	standard []string // those that it changes unless the selection names others
	payload  bool     // it needs the payload
	change   string   // statement
}

func replayAction() action {
	return action{"replay", []string{Pending, Failed, Ignored, Succeeded}, []string{Failed, Ignored}, true, replayEvents}
}

func ignoreAction() action {
	return action{"ignore", []string{Pending, Failed}, []string{Pending, Failed}, false, ignoreEvents}
}

// PreviewReplay counts what Replay would do, up to [batch.CountLimit], and changes nothing.
func (o *Ops) PreviewReplay(ctx context.Context, s Selection) (Bulk, error) {
	return o.preview(ctx, replayAction(), s)
}

// PreviewIgnore counts what Ignore would do, up to [batch.CountLimit], and changes nothing.
func (o *Ops) PreviewIgnore(ctx context.Context, s Selection) (Bulk, error) {
	return o.preview(ctx, ignoreAction(), s)
}

// Replay makes the chosen events pending and due at once, as if they had never been tried: failed
// and ignored ones, or those in the states that the selection names. Naming succeeded runs their
// handlers once more, on top of the effect that is there already. An event of an ordering key takes
// its place in its order: before younger ones, unless one of them is being worked. An event whose
// payload was removed cannot be replayed, and is left alone.
//
// Each batch is its own transaction. progress, which may be nil, follows each. When ctx ends,
// the batch at hand is finished, and the error says why it ended; Bulk is what was done, with any
// error. It can be called again.
func (o *Ops) Replay(ctx context.Context, s Selection, progress func(Bulk)) (Bulk, error) {
	return o.act(ctx, replayAction(), s, progress)
}

// Ignore marks the chosen events, failed or pending ones, as of no concern. What waits behind them
// in their ordering keys continues. It works in batches as Replay does.
func (o *Ops) Ignore(ctx context.Context, s Selection, progress func(Bulk)) (Bulk, error) {
	return o.act(ctx, ignoreAction(), s, progress)
}

// preview counts what act would find.
func (o *Ops) preview(ctx context.Context, a action, s Selection) (b Bulk, err error) {
	err = o.visit(ctx, a, s, &b, func(found []candidate) (bool, error) {
		for _, c := range found[:min(len(found), batch.SampleSize-len(b.Sample))] {
			b.Sample = append(b.Sample, Sample{c.InboxID, c.Receiver, c.Source, c.EventType, c.Key, c.State})
		}
		for _, c := range found {
			batch.Count(&b.States, c.State)
		}
		return b.Found(len(found)), nil
	})
	if err != nil {
		return b, fmt.Errorf("preview %s: %w", a.name, err)
	}
	return b, nil
}

// act changes what it finds, batch by batch, releases the ordering keys and notifies workers.
func (o *Ops) act(ctx context.Context, a action, s Selection, progress func(Bulk)) (b Bulk, err error) {
	lasting := context.WithoutCancel(ctx)
	err = o.visit(ctx, a, s, &b, func(found []candidate) (bool, error) {
		changed, err := o.change(lasting, a.change, found)
		if err != nil {
			return false, err
		}
		done := int64(0)
		for _, c := range changed {
			done += c.Events
		}
		b.Changed(len(found), done)
		left, err := o.release(lasting, changed)
		b.KeysLeft += left
		if err == nil {
			err = o.notify(lasting, changed)
		}
		if progress != nil {
			progress(b)
		}
		return true, err
	})
	if err != nil {
		return b, fmt.Errorf("%s: %w", a.name, err)
	}
	return b, nil
}

// visit shows act what the selection names and the action can change, at most a batch at a time,
// and counts in b what it leaves out.
func (o *Ops) visit(ctx context.Context, a action, s Selection, b *Bulk, act func([]candidate) (bool, error)) error {
	if len(s.States) == 0 {
		s.States = a.standard
	}
	if err := s.check(a.allowed); err != nil {
		return err
	}
	var err error
	if b.LatestID, err = o.latest(ctx, s); err != nil {
		return err
	}
	s.ToID = max(b.LatestID, 1)
	if s.Limit > 0 {
		found, err := o.gather(ctx, s, false, a.payload, min(s.Limit, MaxLimit))
		if err != nil {
			return err
		}
		for part := range slices.Chunk(found, batch.Size) {
			if err := context.Cause(ctx); err != nil {
				return err
			}
			if goOn, err := act(part); err != nil || !goOn {
				return err
			}
		}
		return nil
	}
	known := map[int64]bool{}
	err = o.walk(ctx, s, a.payload, func(list []candidate) (bool, error) {
		if len(s.IDs) > 0 {
			for _, c := range list {
				known[c.InboxID] = true
			}
		}
		found := s.sift(list, b)
		if len(found) == 0 {
			return true, nil
		}
		return act(found)
	})
	if err == nil && len(s.IDs) > 0 {
		b.countUnknown(s.IDs, known)
	}
	return err
}

// sift returns what the selection can change and counts the rest.
func (s Selection) sift(list []candidate, b *Bulk) (found []candidate) {
	for _, c := range list {
		switch {
		case !s.has(c.State):
			if len(s.IDs) > 0 || s.Key != "" {
				batch.Count(&b.OtherState, c.State)
			}
		case !c.HasPayload:
			b.NoPayload++
		default:
			found = append(found, c)
		}
	}
	return found
}

func (b *Bulk) countUnknown(ids []int64, known map[int64]bool) {
	for _, id := range slices.Compact(slices.Sorted(slices.Values(ids))) {
		if !known[id] {
			b.Unknown++
			if len(b.UnknownIDs) < 10 {
				b.UnknownIDs = append(b.UnknownIDs, id)
			}
		}
	}
}

// latest returns the largest inbox id that a command may touch.
func (o *Ops) latest(ctx context.Context, s Selection) (id int64, err error) {
	err = o.read(ctx, func(tx pgx.Tx) error {
		id, err = latestID(ctx, tx)
		return err
	})
	if s.ToID != 0 {
		id = min(id, s.ToID)
	}
	return id, err
}
