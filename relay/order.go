package relay

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// A delivery with an ordering key may be sent only when no earlier one of its key and destination is pending, parked, or
// failed (unless the destination skips those). A claim brings the head of a key together with the deliveries that follow it,
// as a run, and one sender sends a run in sequence.

// runs makes runs of claimed deliveries, in the order of their heads. A delivery whose predecessor was not claimed with it,
// because another session had locked that, is returned in broken, to be given back.
func runs(claimed []delivery) (all [][]delivery, broken []delivery) {
	type key struct{ destination, ordering string }
	of := map[key]int{} // index of the run in all
	for _, d := range claimed {
		if d.after == 0 {
			if d.event.OrderingKey != nil {
				of[key{d.destination, *d.event.OrderingKey}] = len(all)
			}
			all = append(all, []delivery{d})
		}
	}
	followers := slices.DeleteFunc(slices.Clone(claimed), func(d delivery) bool { return d.after == 0 })
	slices.SortFunc(followers, func(a, b delivery) int { return cmp.Compare(a.eventID, b.eventID) })
	for _, d := range followers {
		if d.event.OrderingKey != nil {
			if i, known := of[key{d.destination, *d.event.OrderingKey}]; known && all[i][len(all[i])-1].eventID == d.after {
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

// runBounds returns how many deliveries of one ordering key a claim may bring together, so that they can be sent one after
// the other within half of what a lease leaves. followers is how many may come behind the heads of all keys: they take no
// room from other keys, so another number must bound what the lane holds in memory.
func (l *lane) runBounds(lease time.Duration) (longest, followers int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	longest = maxRun
	if l.perPost > 0 {
		longest = int(max(1, min(maxRun, l.ahead(lease)/l.perPost)))
	}
	if perSecond := l.flow.Paced(); perSecond > 0 {
		longest = min(longest, 1+int(perSecond*l.ahead(lease).Seconds()))
	}
	followers = maxBehind
	for i := range l.queues {
		followers -= l.queues[i].behind
	}
	return longest, max(followers, 0)
}

// step records that n deliveries of a run no longer wait for the one before them.
func (l *lane) step(c class, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queues[c].behind -= n
}

// token returns how long the next delivery of a run that has begun must wait for the destination's rate. A delivery takes no
// token if it will not be sent: its lane is held, or its turn comes too late for its lease.
func (l *lane) token(now time.Time, d *delivery) (wait time.Duration, inTime bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.breaker.Holding() || l.gone || l.removed {
		return 0, true
	}
	if l.tooLate(d, now.Add(l.flow.Turn(now))) {
		return 0, false
	}
	return l.flow.Wait(now), true
}

// posted records how long a delivery took, with its wait for the destination's rate.
func (l *lane) posted(took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.perPost == 0 {
		l.perPost = took
	}
	l.perPost += (took - l.perPost) / 8
}

// orderingKeys are the keys of a lane that have work in this relay.
type orderingKeys struct {
	ready    []readyKey // the next delivery of each may be claimed; in the order in which they were found
	isReady  map[string]bool
	inFlight map[string]keyInFlight
}

// A keyInFlight is an ordering key of which deliveries were claimed and are not yet settled.
type keyInFlight struct {
	deliveries int
	replayed   bool // its run is one of replays
	freed      bool // by one that was settled: the key is ready once the rest is settled, too
}

// makeReady notes an ordering key whose next delivery may be claimed. A key in flight becomes ready by its own settlement.
func (l *lane) makeReady(key string, c class) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.keys.inFlight[key].replayed && c < replays {
		l.hasten(key, c)
	}
	l.keys.makeReady(key, c)
}

func (k *orderingKeys) makeReady(key string, c class) {
	if k.inFlight[key].deliveries > 0 || k.isReady[key] {
		return
	}
	if k.isReady == nil {
		k.isReady = map[string]bool{}
	}
	k.isReady[key] = true
	k.ready = append(k.ready, readyKey{key: key, class: c})
}

// markReplayed notes that the run of a key in flight is one of replays, or was one.
func (k *orderingKeys) markReplayed(key string, replayed bool) {
	if inFlight, known := k.inFlight[key]; known {
		inFlight.replayed = replayed
		k.inFlight[key] = inFlight
	}
}

// hasten moves queued replays of an ordering key to the class of what was found waiting behind them.
func (l *lane) hasten(key string, c class) {
	l.keys.markReplayed(key, false)
	q := &l.queues[replays]
	i := slices.IndexFunc(q.runs[q.head:], func(run []delivery) bool {
		return run[0].event.OrderingKey != nil && *run[0].event.OrderingKey == key
	})
	if i < 0 {
		return // it is being sent
	}
	run := q.runs[q.head+i]
	q.runs = slices.Delete(q.runs, q.head+i, q.head+i+1)
	q.taken -= len(run)
	q.behind -= len(run) - 1
	for i := range run {
		run[i].class = c
	}
	l.queues[c].push(run)
}

// keySettled counts a delivery with an ordering key that was settled, and makes its key ready if that, or one settled before,
// frees it: settlements that had to be set aside are written later than those behind them.
func (l *lane) keySettled(s *settlement) {
	l.mu.Lock()
	defer l.mu.Unlock()
	key := *s.event.OrderingKey
	rest := l.keys.inFlight[key]
	rest.deliveries--
	rest.freed = rest.freed || s.FreesKey
	if rest.deliveries > 0 {
		l.keys.inFlight[key] = rest
		return
	}
	delete(l.keys.inFlight, key)
	if rest.freed {
		l.keys.makeReady(key, s.class)
	}
}

// maxReady bounds how many ready keys of one class a lane has: with more, no others are looked for.
const maxReady = 10_000

// takeReady returns ready keys for which their class has room, each once, and of which classes there are too many others.
func (l *lane) takeReady(free [classes]int) (keys []readyKey, crowded [classes]bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	left := l.keys.ready[:0]
	var waiting [classes]int
	for _, key := range l.keys.ready {
		if free[key.class] <= 0 {
			left = append(left, key)
			waiting[key.class]++
			continue
		}
		free[key.class]--
		delete(l.keys.isReady, key.key)
		keys = append(keys, key)
	}
	clear(l.keys.ready[len(left):])
	l.keys.ready = left
	for c, n := range waiting {
		crowded[c] = n >= maxReady
	}
	return keys, crowded
}

// hasReady reports whether any key is ready.
func (l *lane) hasReady() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.keys.ready) > 0
}

// claimedKey counts n deliveries of an ordering key that are on their way.
func (l *lane) claimedKey(key string, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.keys.inFlight == nil {
		l.keys.inFlight = map[string]keyInFlight{}
	}
	l.keys.inFlight[key] = keyInFlight{deliveries: l.keys.inFlight[key].deliveries + n}
}

// floors remember, for each ordering key, up to which event every delivery is settled, so that a claim need not read them
// again: while a long transaction blocks vacuum, the index keeps an entry of every delivery that was ever pending.
//
// A floor never passes an event that may still appear: see writers. When settled deliveries become pending again, the
// destination's reordered number grows, and its floors no longer count. A forgotten floor costs one read of the key's history.
type floors struct {
	recent, older map[orderingKey]floor // at most floorsKept each; the older half is dropped when the recent one is full
}

type orderingKey struct{ destination, key string }

type floor struct {
	event      int64
	reordered  int64
	skipFailed bool
	blocked    bool // what comes behind it could not be claimed
}

const floorsKept = 32 << 10

// lookUp returns the floor of a key, or the lowest one if none is known that was learnt under the given conditions.
func (f *floors) lookUp(key orderingKey, reordered int64, skipFailed bool) floor {
	known, found := f.recent[key]
	if !found {
		if known, found = f.older[key]; found {
			f.set(key, known)
		}
	}
	if !found || known.reordered != reordered || known.skipFailed != skipFailed {
		return floor{event: math.MinInt64}
	}
	return known
}

// forget drops the floor of a key if a pending delivery was found at or below it. writers cannot foresee such an event: its
// producer chose the id, or took it from a sequence that hands out ids in blocks.
func (f *floors) forget(key orderingKey, eventID int64) {
	if known, found := f.recent[key]; found && eventID <= known.event {
		delete(f.recent, key)
	}
	if known, found := f.older[key]; found && eventID <= known.event {
		delete(f.older, key)
	}
}

func (f *floors) set(key orderingKey, to floor) {
	if f.recent == nil || len(f.recent) >= floorsKept {
		f.recent, f.older = make(map[orderingKey]floor), f.recent
	}
	f.recent[key] = to
}
