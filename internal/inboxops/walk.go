package inboxops

import (
	"cmp"
	"context"
	"math"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/batch"
)

const (
	// lookBatch is how many rows one statement reads at most.
	lookBatch = 10_000
	// firstLook is how many rows the first statement of a way reads, so that a short list costs
	// little.
	firstLook = 500
	// maxReviews is up to how many senders the index of failed and ignored events is read, one
	// sender after the other.
	maxReviews = 100
)

// A candidate is an event that a command looks at.
type candidate struct {
	InboxID    int64
	Receiver   string
	Source     string
	Key        string
	EventType  string
	State      string
	Claim      int64
	HasPayload bool // always true where the command needs no payload
}

// A way leads through events in the order of their inbox ids, a chunk at a time. It visits each at
// most once.
type way struct {
	ids    []int64 // by id: those still to come. nil: by number
	sender *Sender // only the failed and ignored events of this sender, by their own index

	desc     bool
	from, to int64 // bounds that are still to be read, both inclusive
	look     int64 // how many rows the next statement reads
}

// byNumber reports whether the way leads through a range of ids: of all events, or of those for
// review.
func (w *way) byNumber() bool { return w.ids == nil }

// next returns at most limit events that match, and whether there may be more. An event that is
// named by its id is returned in any state.
func (w *way) next(ctx context.Context, tx pgx.Tx, s Selection, needPayload bool, limit int64) (list []candidate, more bool, err error) {
	if !w.byNumber() {
		asked := w.ids[:min(batch.Size, int64(len(w.ids)), limit)]
		w.ids = w.ids[len(asked):]
		list, err = candidatesByID(ctx, tx, s, asked, needPayload)
		return list, len(w.ids) > 0, err
	}
	last, read, err := w.reach(ctx, tx)
	if err != nil || read == 0 {
		return nil, false, err
	}
	if list, err = w.candidates(ctx, tx, s, last, needPayload, limit); err != nil {
		return nil, false, err
	}
	more = read == w.look
	if int64(len(list)) == limit {
		last, more = list[len(list)-1].InboxID, true
	}
	if w.desc {
		w.to = last - 1
	} else {
		w.from = last + 1
	}
	w.look = min(lookBatch, 4*w.look)
	return list, more && w.from <= w.to, nil
}

// ways returns how to reach the events of a selection without reading the others, as far as there
// is an index: for a key, for what is open, for what failed or was ignored. Otherwise all events
// are read by number.
func (o *Ops) ways(ctx context.Context, s Selection, desc bool) (all []*way, err error) {
	err = o.read(ctx, func(tx pgx.Tx) error {
		all, err = s.ways(ctx, tx, desc)
		return err
	})
	return all, err
}

func (s Selection) ways(ctx context.Context, tx pgx.Tx, desc bool) ([]*way, error) {
	latest, err := latestID(ctx, tx)
	if err != nil {
		return nil, err
	}
	first, last := max(s.FromID, 1), latest
	if s.ToID != 0 {
		last = min(latest, s.ToID)
	}
	byID := func(ids []int64) []*way {
		if len(ids) == 0 {
			return nil
		}
		w := &way{ids: slices.Compact(slices.Sorted(slices.Values(ids)))}
		if desc {
			slices.Reverse(w.ids)
		}
		return []*way{w}
	}
	byNumber := func(sender *Sender) *way {
		return &way{sender: sender, desc: desc, from: first, to: last, look: firstLook}
	}
	if len(s.IDs) > 0 {
		return byID(s.IDs), nil
	}
	if s.Key != "" {
		ids, err := idsOfKey(ctx, tx, s)
		return byID(ids), err
	}
	if s.has(Succeeded) || len(s.States) == 0 {
		return []*way{byNumber(nil)}, nil
	}
	list, err := withOpenEvents(ctx, tx, s.Receiver, s.Source)
	if err != nil || len(list) == 0 {
		return nil, err
	}
	var all []*way
	if s.has(Pending, Processing) || s.OrderingKey != "" && !s.has(Ignored) {
		ids, err := openIDs(ctx, tx, list, s, lookBatch+1)
		if err != nil {
			return nil, err
		}
		if len(ids) > lookBatch {
			return []*way{byNumber(nil)}, nil
		}
		all = append(all, byID(ids)...)
		if s.OrderingKey != "" && !s.has(Ignored) {
			return all, nil // what failed is among them
		}
	}
	if s.has(Failed, Ignored) {
		if len(list) > maxReviews {
			return []*way{byNumber(nil)}, nil
		}
		for _, sender := range list {
			all = append(all, byNumber(&sender))
		}
	}
	return all, nil
}

// walk shows visit the events that the selection names, in chunks. No event is shown twice,
// whatever becomes of it meanwhile: otherwise one that is replayed and fails again before the walk
// ends would be replayed for ever.
func (o *Ops) walk(ctx context.Context, s Selection, needPayload bool, visit func([]candidate) (goOn bool, err error)) error {
	ways, err := o.ways(ctx, s, false)
	if err != nil {
		return err
	}
	shown := map[int64]bool{} // by the way that goes by id; the others read indexes that an event can come to
	for _, w := range ways {
		next := func() ([]candidate, bool, error) { return o.next(ctx, w, s, needPayload, math.MaxInt32) }
		for list, err := range batch.Chunks(ctx, next) {
			if err != nil {
				return err
			}
			list = slices.DeleteFunc(list, func(c candidate) bool { return shown[c.InboxID] })
			if !w.byNumber() && len(ways) > 1 {
				for _, c := range list {
					shown[c.InboxID] = true
				}
			}
			for part := range slices.Chunk(list, batch.Size) {
				if err := context.Cause(ctx); err != nil {
					return err
				}
				if goOn, err := visit(part); err != nil || !goOn {
					return err
				}
			}
		}
	}
	return nil
}

// next is [way.next] in its own transaction.
func (o *Ops) next(ctx context.Context, w *way, s Selection, needPayload bool, limit int64) (list []candidate, more bool, err error) {
	err = o.read(ctx, func(tx pgx.Tx) error {
		list, more, err = w.next(ctx, tx, s, needPayload, limit)
		return err
	})
	return list, more, err
}

// gather returns at most limit events of the selection in one of its states, those with the lowest
// ids, or with the highest.
func (o *Ops) gather(ctx context.Context, s Selection, desc, needPayload bool, limit int64) (found []candidate, err error) {
	ways, err := o.ways(ctx, s, desc)
	if err != nil {
		return nil, err
	}
	for _, w := range ways {
		if !w.byNumber() {
			w.ids = slices.DeleteFunc(w.ids, func(id int64) bool { return id < s.FromID || s.ToID != 0 && id > s.ToID })
		}
		taken := int64(0)
		next := func() ([]candidate, bool, error) { return o.next(ctx, w, s, needPayload, max(limit-taken, 1)) }
		for list, err := range batch.Chunks(ctx, next) {
			if err != nil {
				return nil, err
			}
			for _, c := range list {
				if (len(s.States) == 0 || s.has(c.State)) && c.HasPayload {
					found = append(found, c)
					taken++
				}
			}
			if taken >= limit {
				break
			}
		}
	}
	slices.SortFunc(found, func(a, b candidate) int {
		if desc {
			a, b = b, a
		}
		return cmp.Compare(a.InboxID, b.InboxID)
	})
	found = slices.CompactFunc(found, func(a, b candidate) bool { return a.InboxID == b.InboxID })
	return found[:min(int64(len(found)), limit)], nil
}
