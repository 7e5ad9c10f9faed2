package ops

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/check"
)

// MaxListed is how many destinations a list shows unless another number is given.
const MaxListed = 100

// A List chooses the destinations that a list shows. The zero value chooses the first [MaxListed].
type List struct {
	// Prefix is the beginning of the names; empty: all names.
	Prefix string
	// After is the destination that the list follows, in its order; empty: the list begins with the
	// first one.
	After string
	// Limit is how many destinations the list shows at most; 0: [MaxListed].
	Limit int
	// ByName is the order by name. Places do not change in it: no page misses a destination or
	// repeats it, and After may have disappeared.
	ByName bool
	// Compare is another order, as of [slices.SortFunc]. If neither is given, the order is by name
	// if all destinations fit in. Otherwise the destinations that the advice names come first, in
	// its order, and then those for which most is pending or failed.
	Compare func(a, b DestinationStatus) int
}

// Listed says what a list does not show.
type Listed struct {
	// DestinationsTotal counts all destinations, whatever the list chooses.
	DestinationsTotal int64 `json:"destinations_total"`
	// DestinationsLeft counts the destinations that the list chooses and that follow the last one
	// shown.
	DestinationsLeft int64 `json:"destinations_left"`
	// Next is After of the next page; empty: this is the last page.
	Next string `json:"next"`
}

// Choose returns the destinations that the list shows, and does not change the status. The error is
// a [check.Problem] of the path after.
func (l List) Choose(s Status) ([]DestinationStatus, Listed, error) {
	listed := Listed{DestinationsTotal: int64(len(s.Destinations))}
	limit := cmp.Or(l.Limit, MaxListed)
	chosen := slices.DeleteFunc(slices.Clone(s.Destinations), func(d DestinationStatus) bool { return !strings.HasPrefix(d.Destination, l.Prefix) })
	byName := func(a, b DestinationStatus) int { return cmp.Compare(a.Destination, b.Destination) }
	slices.SortFunc(chosen, byName)
	compare := l.Compare
	if compare == nil && !l.ByName && (l.After != "" || len(chosen) > limit) {
		compare = compareTrouble(s.Advice)
	}
	var from int
	if compare != nil {
		slices.SortStableFunc(chosen, compare)
		from = 1 + slices.IndexFunc(chosen, func(d DestinationStatus) bool { return d.Destination == l.After })
		if from == 0 && l.After != "" {
			return nil, listed, check.Problem{Path: "after", Text: fmt.Sprintf("no destination %q is in this list; leave it out to begin with the first", l.After)}
		}
	} else if at, known := slices.BinarySearchFunc(chosen, DestinationStatus{Destination: l.After}, byName); known {
		from = at + 1
	} else {
		from = at
	}
	shown, left := Bound(chosen[from:], limit)
	if listed.DestinationsLeft = int64(left); left > 0 {
		listed.Next = shown[limit-1].Destination
	}
	return shown, listed, nil
}

// compareTrouble returns the order in which the destinations that the advice names come first, in
// its order, and then those for which most is pending or failed.
func compareTrouble(advice []Advice) func(a, b DestinationStatus) int {
	place := map[string]int{}
	for i, a := range advice {
		if _, known := place[a.Subject]; !known {
			place[a.Subject] = i - len(advice)
		}
	}
	return func(a, b DestinationStatus) int {
		return cmp.Or(cmp.Compare(place[a.Destination], place[b.Destination]), cmp.Compare(b.Pending+b.Failed, a.Pending+a.Failed))
	}
}

// Bounded returns the status with the destinations that the list chooses, and with at most as many
// of anything else. The error is a [check.Problem] of the path after.
func (s Status) Bounded(l List) (Status, error) {
	var err error
	if s.Destinations, s.Listed, err = l.Choose(s); err != nil {
		return s, err
	}
	limit := cmp.Or(l.Limit, MaxListed)
	s.Alerts, s.AlertsLeft = Bound(s.Alerts, limit)
	s.Advice, s.AdviceLeft = Bound(s.Advice, limit)
	s.Differences, s.DifferencesLeft = Bound(s.Differences, limit)
	s.Refusals, s.RefusalsLeft = Bound(s.Refusals, limit)
	s.Relays = slices.Clone(s.Relays)
	for i, r := range s.Relays {
		s.Relays[i] = r.Bounded(limit)
	}
	return s, nil
}

// Bounded returns the relay with at most so many destinations.
func (r RelayStatus) Bounded(limit int) RelayStatus {
	r.Destinations, r.DestinationsLeft = Bound(r.Destinations, limit)
	r.RefusedBy, r.RefusedByLeft = Bound(r.RefusedBy, limit)
	return r
}

// Bound returns the first items, at most limit of them, and how many follow them.
func Bound[T any](all []T, limit int) (first []T, left int) {
	left = max(0, len(all)-limit)
	return all[:len(all)-left], left
}
