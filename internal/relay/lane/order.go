package lane

import (
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
)

// A delivery with an ordering key may be sent only when no earlier one of its key and destination
// is pending, parked, or failed (unless the destination skips those). A claim brings the head of a
// key together with the deliveries that follow it, as a run, and one sender sends a run in
// sequence.

// orderingKeys are the keys of a lane that have work in this relay.
type orderingKeys struct {
	spilling map[string]int  // deliveries of each that are about to become pending
	blocked  map[string]bool // of which one has become pending since the claimer last asked about rows
	arriving map[string]arrival
	ready    []ReadyKey // the next delivery of each may be claimed; in the order in which they were found
	isReady  map[string]bool
	inFlight map[string]keyInFlight
}

// An arrival is that of rows which join an ordering key when they are due, and which are about to
// be written.
type arrival struct {
	rows int
	due  time.Time // the first of them
}

func (k *orderingKeys) arrive(key string, due time.Time) {
	if k.arriving == nil {
		k.arriving = map[string]arrival{}
	}
	a := k.arriving[key]
	if a.rows++; a.rows == 1 || due.Before(a.due) {
		a.due = due
	}
	k.arriving[key] = a
}

func (k *orderingKeys) arrived(key string) {
	a := k.arriving[key]
	if a.rows--; a.rows > 0 {
		k.arriving[key] = a
		return
	}
	delete(k.arriving, key)
}

// A keyInFlight is an ordering key of which deliveries were claimed and are not yet settled.
type keyInFlight struct {
	deliveries int
	replayed   bool           // its run is one of replays
	freed      bool           // by one that was settled, or that commits before the last: the key is ready once the rest is settled, too
	last       ordering.Place // of the last of them

	ranged  bool       // they came with a range
	active  bool       // a sender has some of them, or will have
	stopped bool       // one of them was not delivered: nothing of the key may be sent until it is settled
	behind  []Delivery // of ranges: the sender takes them after its run
}

// makeReady notes a key of which the given event was found, so that its next delivery may be
// claimed. A key in flight becomes ready when that is settled: if the settlement frees it, or if
// the event is earlier than the last one in flight, for whose retry it must not wait.
func (k *orderingKeys) makeReady(key string, found ordering.Place, c Class) {
	if inFlight, is := k.inFlight[key]; is && (found.Compare(inFlight.last) < 0 || inFlight.ranged) {
		inFlight.freed = true
		k.inFlight[key] = inFlight
	}
	if k.inFlight[key].deliveries > 0 || k.isReady[key] {
		return
	}
	if k.isReady == nil {
		k.isReady = map[string]bool{}
	}
	k.isReady[key] = true
	k.ready = append(k.ready, ReadyKey{Key: key, Class: c, Found: found})
}

// activate notes that a run of a key is queued.
func (k *orderingKeys) activate(key string, replayed bool) {
	if inFlight, known := k.inFlight[key]; known {
		inFlight.active, inFlight.replayed = true, inFlight.replayed || replayed
		k.inFlight[key] = inFlight
	}
}

// clearReplayed notes that the run of a key in flight is no longer one of replays.
func (k *orderingKeys) clearReplayed(key string) {
	if inFlight, known := k.inFlight[key]; known {
		inFlight.replayed = false
		k.inFlight[key] = inFlight
	}
}

// MaxReady bounds how many ready keys of one class a lane has: with more, no others are looked for.
const MaxReady = 10_000

// take returns ready keys for which their class has room, each once, and of which classes there are
// too many others.
func (k *orderingKeys) take(free [Classes]int) (keys []ReadyKey, crowded [Classes]bool) {
	left := k.ready[:0]
	var waiting [Classes]int
	for _, key := range k.ready {
		if free[key.Class] <= 0 {
			left = append(left, key)
			waiting[key.Class]++
			continue
		}
		free[key.Class]--
		delete(k.isReady, key.Key)
		keys = append(keys, key)
	}
	clear(k.ready[len(left):])
	k.ready = left
	for c, n := range waiting {
		crowded[c] = n >= MaxReady
	}
	return keys, crowded
}

// claimed counts n deliveries of a key that are on their way, up to the given place.
func (k *orderingKeys) claimed(key string, n int, last ordering.Place) {
	if k.inFlight == nil {
		k.inFlight = map[string]keyInFlight{}
	}
	inFlight := k.inFlight[key]
	inFlight.deliveries += n
	if last.Compare(inFlight.last) > 0 {
		inFlight.last = last
	}
	k.inFlight[key] = inFlight
}

// give counts a delivery of a range, and reports whether a run begins with it. refused: it must
// become pending, since one before it is, or is about to be.
func (k *orderingKeys) give(d Delivery) (begins, refused bool) {
	key := *d.Event.OrderingKey
	if inFlight := k.inFlight[key]; inFlight.stopped || k.blocked[key] || k.spilling[key] > 0 {
		return false, true
	}
	k.claimed(key, 1, d.PlaceInKey())
	inFlight := k.inFlight[key]
	begins = !inFlight.active
	inFlight.ranged, inFlight.active = true, true
	if !begins {
		inFlight.behind = append(inFlight.behind, d)
	}
	k.inFlight[key] = inFlight
	return begins, false
}

// next returns what a sender sends after a run of a key that was delivered; nothing: the key is
// free.
func (k *orderingKeys) next(key string) []Delivery {
	inFlight, is := k.inFlight[key]
	if !is {
		return nil
	}
	n := min(len(inFlight.behind), MaxRun)
	run := inFlight.behind[:n:n]
	inFlight.behind = inFlight.behind[n:]
	inFlight.active = n > 0
	k.inFlight[key] = inFlight
	return run
}

// stop keeps anything of a key from being sent until one that was not delivered is settled, and
// returns what waits behind it.
func (k *orderingKeys) stop(key string) (behind []Delivery) {
	if inFlight, is := k.inFlight[key]; is {
		behind = inFlight.behind
		inFlight.behind, inFlight.active, inFlight.stopped = nil, false, true
		k.inFlight[key] = inFlight
	}
	return behind
}

func (k *orderingKeys) block(key string) {
	if k.blocked == nil {
		k.blocked = map[string]bool{}
	}
	k.blocked[key] = true
}

func (k *orderingKeys) spill(key string, n int) {
	if k.spilling == nil {
		k.spilling = map[string]int{}
	}
	if k.spilling[key] += n; k.spilling[key] <= 0 {
		delete(k.spilling, key)
	}
}

// settled counts a delivery of a key that was settled, and makes the key ready if that, or one
// settled before, frees it: settlements that had to be set aside are written later than those
// behind them.
func (k *orderingKeys) settled(key string, c Class, frees, blocks bool) {
	if blocks {
		k.block(key)
	}
	rest := k.inFlight[key]
	rest.deliveries--
	rest.freed = rest.freed || frees
	if rest.deliveries > 0 {
		k.inFlight[key] = rest
		return
	}
	delete(k.inFlight, key)
	if rest.freed {
		k.makeReady(key, ordering.Place{}, c)
	}
}
