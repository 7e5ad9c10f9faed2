package ordering

import (
	"cmp"
	"math"
)

// Floors remember, for each ordering key, up to which event every delivery is settled, so that a
// claim need not read them again: while a long transaction blocks vacuum, the index keeps an entry
// of every delivery that was ever pending.
//
// An event may be committed after later ones of its key. So floors count only until another relay
// takes a range, the relay drops those of the keys that it takes itself, and it learns none while a
// key is in an open range. When settled deliveries become pending again, the destination's
// reordered number grows, and its floors no longer count. A forgotten floor costs one read of the
// key's history. The zero value knows none. They are not safe for concurrent use.
type Floors struct {
	// Range is the last range that was taken when they were learnt, or that this relay has taken
	// since.
	Range int64

	recent, older map[Key]Floor // at most floorsKept each; the older half is dropped when the recent one is full
}

// An Key is one of a destination.
type Key struct{ Destination, Key string }

// A Place is that of a delivery within its ordering key.
type Place struct {
	Joined int64 // 0: it was due when it was taken; otherwise it, or one before it, joined the key when it became due
	Event  int64
}

// Compare returns -1, 0 or 1, as p is before other, the same, or behind it.
func (p Place) Compare(other Place) int {
	return cmp.Or(cmp.Compare(p.Joined, other.Joined), cmp.Compare(p.Event, other.Event))
}

// A Floor is up to which event the deliveries of an ordering key are settled.
type Floor struct {
	Event      int64 // its id; of those that did not join the key later
	Reordered  int64 // the destination's number when this was learnt
	SkipFailed bool  // whether failed ones counted as settled
}

const floorsKept = 32 << 10

// LookUp returns the floor of a key, or the lowest one if none is known that was learnt under the
// given conditions.
func (f *Floors) LookUp(key Key, reordered int64, skipFailed bool) Floor {
	known, found := f.recent[key]
	if !found {
		if known, found = f.older[key]; found {
			f.Set(key, known)
		}
	}
	if !found || known.Reordered != reordered || known.SkipFailed != skipFailed {
		return Floor{Event: math.MinInt64}
	}
	return known
}

// Forget drops the floor of a key if a delivery that is not settled was found at or below it.
func (f *Floors) Forget(key Key, eventID int64) {
	if known, found := f.recent[key]; found && eventID <= known.Event {
		delete(f.recent, key)
	}
	if known, found := f.older[key]; found && eventID <= known.Event {
		delete(f.older, key)
	}
}

// Set remembers the floor of a key.
func (f *Floors) Set(key Key, to Floor) {
	if f.recent == nil || len(f.recent) >= floorsKept {
		f.recent, f.older = make(map[Key]Floor), f.recent
	}
	f.recent[key] = to
}
