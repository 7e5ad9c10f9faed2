package ops

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgtype"
)

// walk calls visit with everything that the selection names and the action can change, at most a batch at a time, until visit
// returns false. It counts in b what is left out. visit gets no delivery twice, even if its status changes meanwhile:
// otherwise one that is replayed and delivered again before the walk ends would be replayed for ever.
func (o *Outbox) walk(ctx context.Context, a action, s Selection, b *Bulk, visit func([]candidate) (bool, error)) error {
	err := o.walkScans(ctx, a, s, b, visit)
	if err == nil && a.name == "retry" {
		b.Obstacles, err = o.obstacles(ctx, append(b.destinations, s.Destination))
	}
	return err
}

func (o *Outbox) walkScans(ctx context.Context, a action, s Selection, b *Bulk, visit func([]candidate) (bool, error)) error {
	if s.Limit < 0 {
		return nil
	}
	if len(s.Statuses) == 0 {
		s.Statuses = a.standard
	}
	for _, status := range s.Statuses {
		if !slices.Contains(a.allowed, status) {
			return fmt.Errorf("status %q cannot be chosen; choose %s", status, strings.Join(a.allowed, ", "))
		}
	}
	latest, now, err := o.latestEvent(ctx)
	if err != nil {
		return err
	}
	if a.name == "retry" {
		s.waitingAt = now
		if s.begun.IsZero() {
			s.begun = now
		}
	}
	left := s.Limit
	for _, scan := range scansOf(s) {
		scan.limit = a.pace(s).chunk()
		for more := true; more; {
			if err := context.Cause(ctx); err != nil {
				return err
			}
			var list []candidate
			if list, more, err = scan.next(ctx, o.pool, s, a.memory, latest); err != nil {
				return err
			}
			found := sift(list, s, a, b)
			if s.Limit > 0 {
				found = found[:min(int64(len(found)), left)]
				left -= int64(len(found))
			}
			if len(found) > 0 {
				if goOn, err := visit(found); err != nil || !goOn {
					return err
				}
			}
			if s.Limit > 0 && left == 0 {
				return nil
			}
		}
	}
	return nil
}

// scansOf returns the scans that find a selection. Each visits a row once. Two scans may share a selection only if no relay moves
// a row from the status of the second to that of the first.
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
		// What is due stands first, and waits for no attempt.
		first := candidate{Destination: s.Destination, NextAttemptAt: orInfinite(s.waitingAt, pgtype.NegativeInfinity)}
		all = append(all, &scan{statement: candidatesPending, after: first})
	}
	if has("failed") && !s.Parked {
		all = append(all, &scan{statement: candidatesFailed})
	}
	return all
}

// attemptedSince reports whether a delivery was attempted since an operation began that goes on now.
func (s Selection) attemptedSince(c candidate) bool {
	return !s.begun.IsZero() && c.LastAttemptAt != nil && !c.LastAttemptAt.Before(s.begun)
}

// sift returns what the action can change and counts the rest.
func sift(list []candidate, s Selection, a action, b *Bulk) (found []candidate) {
	for _, c := range list {
		if a.name == "retry" && c.Matched && !slices.Contains(b.destinations, c.Destination) {
			b.destinations = append(b.destinations, c.Destination)
		}
		switch {
		case c.Status == "": // a named event without a delivery
			b.Unknown++
			if len(b.UnknownIDs) < 10 {
				b.UnknownIDs = append(b.UnknownIDs, c.EventID)
			}
		case c.Matched && a.name != "discard" && s.attemptedSince(c): // by this operation, or it failed first since
		case c.Matched && c.InFlight && !a.inFlight:
			b.InFlight++
		case c.Matched && a.name == "retry" && (c.LastAttemptAt == nil || !c.NextAttemptAt.Time.After(s.waitingAt)):
			b.NotWaiting++
		case c.Matched && a.name == "replay" && c.CreatedAt == nil:
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
