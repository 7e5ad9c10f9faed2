package ops

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outbox-relay/outbox-relay/internal/batch"
)

// walk calls visit with everything that the selection names and the action can change, at most a
// batch at a time, until visit returns false. It counts in b what is left out. visit gets no
// delivery twice, even if its status changes meanwhile: otherwise one that is replayed and
// delivered again before the walk ends would be replayed for ever. Behind a chunk with something to
// visit comes one of so many deliveries, behind one without a large one.
func (o *Outbox) walk(ctx context.Context, a action, s Selection, chunk int, b *Bulk, visit func([]candidate) (bool, error)) error {
	err := o.walkScans(ctx, a, s, chunk, b, visit)
	if err == nil && (a.name == "retry" || a.name == "replay") {
		b.Obstacles, err = o.obstacles(ctx, append(b.destinations, s.Destination))
	}
	if err == nil && a.name == "retry" && len(s.EventIDs) <= explainedTo {
		err = o.addHeads(ctx, s, b)
	}
	if err == nil {
		err = o.countNotRouted(ctx, a, s, b)
	}
	return err
}

// explainedTo is for how many named events a retry says which event of their ordering key comes
// before them.
const explainedTo = 10

// addHeads adds to the obstacles what the named events wait behind in their ordering keys.
func (o *Outbox) addHeads(ctx context.Context, s Selection, b *Bulk) error {
	for _, id := range s.EventIDs {
		list, err := o.waiting(ctx, id)
		if err != nil {
			return err
		}
		for _, w := range list {
			for _, reason := range w.reasons(id) {
				if reason.Cause == "behind" && (s.Destination == "" || s.Destination == w.Destination) {
					b.Obstacles = append(b.Obstacles, fmt.Sprintf("event %d waits at %q %s", id, w.Destination, reason.Text))
				}
			}
		}
	}
	return nil
}

// countNotRouted counts the events of a selection that have no deliveries yet.
func (o *Outbox) countNotRouted(ctx context.Context, a action, s Selection, b *Bulk) error {
	switch {
	case len(s.EventIDs) == 0 && a.name == "discard":
		left, err := o.Untaken(ctx)
		if left.OldestSeconds > 1 {
			b.NotRouted = left.Events
		}
		return err
	case b.Unknown > 0:
		n, which, err := o.notRouted(ctx, s.EventIDs, b.UnknownIDs)
		b.NotRouted = n
		b.Unknown = max(0, b.Unknown-n)
		b.UnknownIDs = slices.DeleteFunc(b.UnknownIDs, func(id int64) bool { return slices.Contains(which, id) })
		return err
	}
	return nil
}

func (o *Outbox) walkScans(ctx context.Context, a action, s Selection, chunk int, b *Bulk, visit func([]candidate) (bool, error)) error {
	if s.Limit < 0 {
		return nil
	}
	if len(s.Statuses) == 0 {
		s.Statuses = a.standard
	}
	if err := batch.CheckChosen("status", s.Statuses, a.allowed); err != nil {
		return err
	}
	now, err := o.seen(ctx, s)
	if err != nil {
		return err
	}
	if s.SeenAt.IsZero() {
		s = now
	}
	if a.name == "retry" {
		s.waitingAt = now.SeenAt
	}
	left := s.Limit
	scans := scansOf(s)
	for i := 0; i < len(scans); i++ {
		scan, done := scans[i], b.Done
		scan.limit = batch.Size
		if i > 1 && scan.statement == candidatesDue { // once more
			b.InFlight = 0
		}
		next := func() ([]candidate, bool, error) { return scan.next(ctx, o.pool, s, a.memory) }
		for list, err := range batch.Chunks(ctx, next) {
			if err != nil {
				return err
			}
			found := sift(list, s, a, b)
			if s.Limit > 0 {
				found = found[:min(int64(len(found)), left)]
				left -= int64(len(found))
			}
			scan.limit = batch.Size
			if len(found) > 0 {
				scan.limit = chunk
				if goOn, err := visit(found); err != nil || !goOn {
					return err
				}
			}
			if s.Limit > 0 && left == 0 {
				return nil
			}
		}
		if b.Done > done && (scan.statement == candidatesDue || scan.statement == candidatesWaiting && i > 0) && a.ends {
			scans = slices.Insert(scans, i+1, other(scan, s))
		}
	}
	return nil
}

// other returns the scan that finds what relays have moved while a scan of pending deliveries went
// on and changed some: they make deliveries wait, and release them. The walk ends when it has found
// nothing more.
func other(of *scan, s Selection) *scan {
	if of.statement == candidatesDue {
		return scansOfPending(s)[0]
	}
	return scansOfPending(s)[1]
}

// scansOf returns the scans that find a selection. Each visits a row once. Two scans may share a
// selection only if no relay moves a row from the status of the second to that of the first. Relays
// move pending ones between what waits and what is due: see other.
func scansOf(s Selection) (all []*scan) {
	has := func(status string) bool { return slices.Contains(s.Statuses, status) }
	switch {
	case len(s.EventIDs) > 0:
		ids := slices.Compact(slices.Sorted(slices.Values(s.EventIDs)))
		return []*scan{{statement: candidatesByID, ids: ids}}
	case has("delivered"), has("discarded"):
		return []*scan{{statement: candidatesOfAll}}
	}
	if has("pending") {
		all = scansOfPending(s)
	}
	if has("failed") && !s.Parked {
		all = append(all, &scan{statement: candidatesFailed})
	}
	return all
}

// scansOfPending returns the scans that find pending deliveries.
func scansOfPending(s Selection) (all []*scan) {
	if s.waitingAt.IsZero() { // first: a discard moves the next delivery of a key from what waits to what is due
		all = append(all, &scan{statement: candidatesWaiting, after: candidate{Destination: s.Destination}})
	}
	// What is due stands first, and waits for no attempt.
	first := candidate{Destination: s.Destination, NextAttemptAt: orInfinite(s.waitingAt, pgtype.NegativeInfinity)}
	return append(all, &scan{statement: candidatesDue, after: first})
}

// changedSince reports whether a delivery was attempted, or delivered, since the order was given.
func (s Selection) changedSince(c candidate) bool {
	return c.ChangedAt != nil && !c.ChangedAt.Before(s.SeenAt)
}

// waits reports whether a delivery waits for its next attempt, or for its first only because the
// clock was put back since its row was written.
func (s Selection) waits(c candidate) bool {
	return c.NextAttemptAt.Time.After(s.waitingAt) && !c.Scheduled
}

// sift returns what the action can change and counts the rest.
func sift(list []candidate, s Selection, a action, b *Bulk) (found []candidate) {
	for _, c := range list {
		if c.Matched && !slices.Contains(b.destinations, c.Destination) {
			b.destinations = append(b.destinations, c.Destination)
		}
		switch {
		case c.Status == "": // a named event without a delivery
			b.Unknown++
			if len(b.UnknownIDs) < 10 {
				b.UnknownIDs = append(b.UnknownIDs, c.EventID)
			}
		case c.Matched && (a.name != "discard" || c.Status == "failed") && s.changedSince(c): // by this operation, or it failed first since
		case c.Matched && c.InFlight && !a.inFlight:
			b.InFlight++
		case c.Matched && a.name == "retry" && !s.waits(c):
			b.NotWaiting++
		case c.Matched && a.name == "replay" && c.CreatedAt == nil:
			b.EventMissing++
		case c.Matched && a.name == "replay" && c.BreaksRule:
			b.BreaksRule++
		case c.Matched && c.TooOld:
			b.TooOld++
		case c.Matched:
			found = append(found, c)
		case c.OtherStatus && len(s.EventIDs) > 0:
			batch.Count(&b.OtherStatus, c.Status)
		}
	}
	return found
}
