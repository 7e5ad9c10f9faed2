package relay

import (
	"cmp"
	"slices"
	"time"
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

// runBounds returns how many deliveries of one ordering key a claim may bring together, so that they can be sent one
// after the other within half of what a lease leaves; and how many may come behind the heads of all keys, which bounds
// what the lane holds in memory: what waits in a run takes no room from other keys.
func (l *lane) runBounds(lease time.Duration) (longest, followers int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	longest = maxRun
	if l.perPost > 0 {
		longest = int(max(1, min(maxRun, l.ahead(lease)/l.perPost)))
	}
	if perSecond := l.flow.paced(); perSecond > 0 {
		longest = min(longest, 1+int(perSecond*l.ahead(lease).Seconds()))
	}
	followers = maxBehind
	for i := range l.queues {
		followers -= l.queues[i].behind
	}
	return longest, max(followers, 0)
}

// step tells that n deliveries of a run wait no longer for the one before them.
func (l *lane) step(c class, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queues[c].behind -= n
}

// token returns how long the next delivery of a run that has begun must wait for the destination's rate. What is not
// sent, because the lane is held, needs no turn; nor does what would have it too late for its lease.
func (l *lane) token(now time.Time, d *delivery) (wait time.Duration, inTime bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.breaker.holding() || l.gone || l.removed {
		return 0, true
	}
	if l.tooLate(d, now.Add(l.flow.turn(now))) {
		return 0, false
	}
	return l.flow.wait(now), true
}

// posted takes in how long a delivery took, with its wait for the destination's rate.
func (l *lane) posted(took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.perPost == 0 {
		l.perPost = took
	}
	l.perPost += (took - l.perPost) / 8
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
