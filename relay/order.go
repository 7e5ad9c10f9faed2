package relay

import (
	"cmp"
	"slices"
)

// Order of one ordering key: a delivery is claimable only when no earlier one of its key and destination is pending (or
// failed, unless the destination skips those). A claim brings the head of a key together with what follows it, as a run,
// which one sender sends in sequence.

// runs makes runs of what a claim brought, in the order of their heads. What does not follow its predecessor without a
// gap, because somebody else had locked what stands between, is returned apart, to be given back.
func runs(claimed []delivery) (all [][]delivery, broken []delivery) {
	type key struct{ destination, ordering string }
	of := map[key]int{} // index of the run in all
	for _, d := range claimed {
		if d.after == 0 {
			if d.event.orderingKey != nil {
				of[key{d.destination, *d.event.orderingKey}] = len(all)
			}
			all = append(all, []delivery{d})
		}
	}
	followers := slices.DeleteFunc(slices.Clone(claimed), func(d delivery) bool { return d.after == 0 })
	slices.SortFunc(followers, func(a, b delivery) int { return cmp.Compare(a.eventID, b.eventID) })
	for _, d := range followers {
		if d.event.orderingKey != nil {
			if i, known := of[key{d.destination, *d.event.orderingKey}]; known && all[i][len(all[i])-1].eventID == d.after {
				all[i] = append(all[i], d)
				continue
			}
		}
		broken = append(broken, d)
	}
	for _, run := range all {
		run[len(run)-1].lastOfRun = true
	}
	return all, broken
}

// blocks reports whether a settled delivery keeps the later ones of its ordering key from being sent.
func (s *settlement) blocks(onFailure FailurePolicy) bool {
	return s.outcome != Delivered && !(s.outcome == Fail && onFailure == SkipFailed)
}

// FailurePolicy says what becomes of an ordering key whose delivery failed for good.
type FailurePolicy string

const (
	// BlockFailed keeps the later deliveries of the key waiting until an operator replays or discards the failed one.
	BlockFailed FailurePolicy = "block"
	// SkipFailed goes on with the next delivery of the key.
	SkipFailed FailurePolicy = "skip"
)
