package lane

import (
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/capacity"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
)

// outgoing is what a lane holds, and may send. The claimer fills it, senders empty it, the settler
// makes room again, and the session and reloads change what it may send. It is safe for concurrent
// use: mu guards all of it, and is locked in outgoing*.go alone.
type outgoing struct {
	mu sync.Mutex
	*post.Endpoint
	queues  [Classes]queue
	senders int
	share   int       // of the relay's capacity
	claimed time.Time // when the last claim was made
	flow    capacity.Flow
	breaker policy.Breaker
	keys    orderingKeys
	perPost time.Duration // how long a delivery takes a sender, as a moving average; 0: unknown
	settled int           // since the rate was last measured
	rate    capacity.Throughput
	// pausedBy410 lasts until something is claimed again although the destination was paused: it
	// was resumed.
	pausedBy410 bool
	pausedAt    time.Time // when the pause was in the database; zero: it is not
	removed     bool      // from the configuration
	waitEnded   bool      // by an operator, which the database has yet to be told
	voidUntil   time.Time // claims whose leases end before are void
	toldOthers  time.Time // that there is something of it that they may deliver while this relay waits
	releasedAt  time.Time // when outcomes were last written
	dueSince    time.Time // by the database's clock: since when rows are due that the settler has made; zero: there are none
	heldSince   time.Time // the same of rows that were held; the next claim after heldUntil reads them
	heldUntil   time.Time
}

// Bounds of what a lane claims and holds. Counts are deliveries.
const (
	maxTaken     = 4000                   // of each class, until they are settled
	MinPace      = 20 * time.Millisecond  // between two claims for less than a worthwhile batch
	fillAhead    = 200 * time.Millisecond // of sending at the measured rate
	SendMargin   = 2 * time.Second        // of the lease, to settle in after a POST that took its whole timeout
	MaxRun       = 16                     // of one ordering key, sent in sequence
	MaxBehind    = 2000                   // in runs, of all ordering keys
	fastLane     = 8000                   // deliveries a second, from which on takes wait for the room of a lane
	stillSending = 100 * time.Millisecond // since its last outcome was written
	sitsOut      = 2 * time.Second        // that its receiver asks it to wait, with what it holds
	tellOthers   = 5 * time.Second        // between two words to other relays about what it gives back meanwhile
)

// limit returns how many senders the lane may have.
func (o *outgoing) limit() int {
	limit := min(o.share, o.flow.Concurrency())
	if trying, allowed := o.breaker.Trying(); trying {
		limit = min(limit, allowed)
	}
	return limit
}

// State returns what the lane may have now.
func (o *outgoing) State() State {
	o.mu.Lock()
	defer o.mu.Unlock()
	s := State{Destination: o.Destination.Name, Concurrency: o.limit(), RateLimit: o.flow.Paced(), Breaker: o.breaker.State.String()}
	if o.breaker.Holding() {
		s.Concurrency = 0
	}
	return s
}

// Room returns how many deliveries of each class a claim may bring, and whether that is worth a
// claim now. A class never holds more than the lane sends within a fraction of the lease: what
// waits longer would be given back unsent.
func (o *outgoing) Room(now time.Time, lease time.Duration) (free [Classes]int, worthwhile bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if reason := o.stopReason(now); reason != "" && (reason != policy.ReasonPaused || o.pausedAt.IsZero()) {
		return free, false // the lane would give back what a claim brought
	}
	limit := o.limit()
	target := limit
	perSecond, known := o.rate.Measure(now, o.settled)
	o.settled = 0
	if !known && o.perPost > 0 && o.flow.Paced() == 0 { // at the start of a burst the first answers show the rate
		perSecond, known = float64(limit)/o.perPost.Seconds(), true
	}
	trying, _ := o.breaker.Trying()
	ahead := o.ahead(lease)
	switch {
	case trying:
		// Nothing ahead: what is claimed now may have to be given back.
	case known:
		target += max(0, min(maxTaken-limit, int(perSecond*min(fillAhead, ahead).Seconds())))
		// One at least, or a lane of one sender would be out of live deliveries whenever it has
		// sent one.
		if target == limit && o.perPost < ahead && (o.flow.Paced() == 0 || o.flow.Paced()*ahead.Seconds() > 1) {
			target++
		}
	case o.flow.Paced() == 0:
		target *= 2
	}
	most := 0
	for c := range free {
		free[c] = max(target-(o.queues[c].taken-o.queues[c].behind), 0)
		most = max(most, free[c])
	}
	return free, most > 0 && (most >= target/4 || now.Sub(o.claimed) >= MinPace)
}

// HasMuchRoom reports whether the lane holds at most a quarter of what it may send at once, so that
// no claim waits for room.
func (o *outgoing) HasMuchRoom() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return 4*o.taken() <= o.limit()
}

// ahead is how long something claimed may wait before it is sent: half of what the lease leaves.
func (o *outgoing) ahead(lease time.Duration) time.Duration {
	return (lease - o.Destination.Timeout - SendMargin) / 2
}

// EarliestClaim returns when the next claim makes sense: when the receiver has asked to wait until
// then, or when a claim made now would wait away its lease for the lane's rate. Zero: now.
func (o *outgoing) EarliestClaim(now time.Time, lease time.Duration) (until time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if now.Before(o.flow.Reopens) {
		return o.flow.Reopens
	}
	if wait := o.flow.UntilTurn(now) - o.ahead(lease); wait > 0 && !o.breaker.Holding() {
		return now.Add(wait)
	}
	return time.Time{}
}

// Push queues claimed runs of one class and returns how many senders to start for them.
func (o *outgoing) Push(now time.Time, c Class, runs [][]Delivery) (start int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.pausedAt.IsZero() && o.claimed.After(o.pausedAt) { // a claim that began before the pause proves nothing
		o.pausedBy410, o.pausedAt = false, time.Time{}
	}
	for _, run := range runs {
		o.queues[c].push(run)
		if key := run[0].Event.OrderingKey; key != nil {
			o.keys.activate(*key, c == Replays)
		}
	}
	return o.startSenders()
}

// startSenders returns how many senders to start for what is queued. The caller holds mu.
func (o *outgoing) startSenders() (start int) {
	waiting := 0
	for i := range o.queues {
		waiting += len(o.queues[i].runs) - o.queues[i].head
	}
	start = max(min(o.limit()-o.senders, waiting), 0)
	o.senders += start
	return start
}

// NextRun returns the run to send next, or how long the sender must wait for the destination's
// rate. Without either the sender ends.
func (o *outgoing) NextRun(now time.Time) (run []Delivery, wait time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	c, waits := o.nextClass()
	if !waits || o.senders > o.limit() && o.stopReason(now) == "" { // what is not sent is given back at once
		o.senders--
		return nil, 0
	}
	// A run that will not be sent takes no token of the rate.
	if head := &o.queues[c].runs[o.queues[c].head][0]; o.stopReason(now) == "" && !head.TooLate(o.Endpoint, now) && !head.LeaseEnds.Before(o.voidUntil) {
		if wait := o.flow.Wait(now); wait > 0 {
			return nil, wait
		}
	}
	for i := range o.queues {
		if !o.queues[i].empty() {
			o.queues[i].credit += weights[i]
			o.queues[c].credit -= weights[i]
		}
	}
	return o.queues[c].pop(), 0
}

// AddSender reports whether the caller must start one more sender: the lane may have it, and
// something waits for one.
func (o *outgoing) AddSender() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, waiting := o.nextClass(); !waiting || o.breaker.Holding() || o.senders >= o.limit() {
		return false
	}
	o.senders++
	return true
}

// TooLate reports whether too little is left of a delivery's lease for a POST that begins at the
// given time.
func (d *Delivery) TooLate(to *post.Endpoint, at time.Time) bool {
	return d.LeaseEnds.Sub(at) < to.Destination.Timeout+SendMargin
}

// nextClass returns the class to send from next, by smooth weighted round robin over those that
// have something to send.
func (o *outgoing) nextClass() (c Class, waits bool) {
	for i := range o.queues {
		q := &o.queues[i]
		if q.empty() {
			q.credit = 0
			continue
		}
		if !waits || q.credit+weights[i] > o.queues[c].credit+weights[c] {
			c, waits = Class(i), true
		}
	}
	return c, waits
}

// TakeUnsent empties the queues.
func (o *outgoing) TakeUnsent() (waiting []Delivery) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for i := range o.queues {
		for q := &o.queues[i]; !q.empty(); {
			run := q.pop()
			q.behind -= len(run) - 1
			waiting = append(waiting, run...)
			if key := run[0].Event.OrderingKey; key != nil {
				behind := o.keys.stop(*key)
				for j := range behind {
					o.queues[behind[j].Class].behind--
				}
				waiting = append(waiting, behind...)
			}
		}
	}
	return waiting
}

// Counts returns how many deliveries of each class the lane holds.
func (o *outgoing) Counts() (n [Classes]int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for c := range o.queues {
		n[c] = o.queues[c].taken
	}
	return n
}

// sharer returns what the lane needs of the relay's capacity.
func (o *outgoing) sharer(active bool) capacity.Sharer {
	o.mu.Lock()
	defer o.mu.Unlock()
	_, allowed := o.breaker.Trying()
	return capacity.Sharer{State: o.breaker.State, Allowed: allowed, InFlight: o.senders, Active: active}
}

// SetShare changes how many senders the lane may have at most; those beyond it end with their
// current run.
func (o *outgoing) SetShare(d capacity.Division, active bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.share = min(o.Destination.MaxInFlight, d.Part(o.breaker.State, active))
}

func (o *outgoing) RecordClaim(now time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.claimed = now
}

// busy reports whether the lane holds anything.
func (o *outgoing) busy() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.taken() > 0
}

// holdsNothing reports whether the lane holds nothing, has nothing that could be claimed, and a
// breaker without news.
func (o *outgoing) holdsNothing() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.taken() == 0 && o.senders == 0 && len(o.keys.ready) == 0 && o.dueSince.IsZero() && o.heldSince.IsZero() && o.breaker.IsQuiet()
}

// hasNoMemory reports whether a lane made again would do as this one does, which rests.
func (o *outgoing) hasNoMemory(now time.Time) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return !o.pausedBy410 && len(o.keys.spilling)+len(o.keys.arriving)+len(o.keys.inFlight) == 0 && !now.Before(o.flow.Reopens) && o.flow.UntilTurn(now) == 0
}

func (o *outgoing) IsRemoved() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.removed
}

// Pause keeps what is queued from being sent. It returns false if it was kept already.
func (o *outgoing) Pause() (first bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	first, o.pausedBy410 = !o.pausedBy410, true
	return first
}

// PauseWritten lets the lane claim again: the database decides now whether there is anything to
// claim.
func (o *outgoing) PauseWritten() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.pausedBy410 {
		o.pausedAt = time.Now()
	}
}

// StopReason returns why nothing may be sent at the given time, so that what the lane holds is
// given back; empty: it may, if only a moment later.
func (o *outgoing) StopReason(now time.Time) policy.Reason {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.stopReason(now)
}

func (o *outgoing) stopReason(now time.Time) policy.Reason {
	switch {
	case o.removed:
		return policy.ReasonRemoved
	case o.pausedBy410:
		return policy.ReasonPaused
	case o.breaker.Holding():
		return policy.ReasonBreaker
	case o.flow.Reopens.Sub(now) > sitsOut: // another relay may be welcome
		return policy.ReasonRetryAfter
	}
	return ""
}

// CountTaken counts deliveries that were claimed and are given back without having been queued.
func (o *outgoing) CountTaken(c Class, n int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.queues[c].taken += n
}

// Release makes room for n settled deliveries of a class again.
func (o *outgoing) Release(c Class, n int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.queues[c].taken -= n
	o.settled += n
	o.releasedAt = time.Now()
}

// Current returns the endpoint that the next request goes to.
func (o *outgoing) Current() *post.Endpoint {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.Endpoint
}

// RunBounds returns how many deliveries of one ordering key a claim may bring together, so that
// they can be sent one after the other within half of what a lease leaves. followers is how many
// may come behind the heads of all keys: they take no room from other keys, so another number must
// bound what the lane holds in memory.
func (o *outgoing) RunBounds(lease time.Duration) (longest, followers int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	longest = MaxRun
	if o.perPost > 0 {
		longest = int(max(1, min(MaxRun, o.ahead(lease)/o.perPost)))
	}
	if perSecond := o.flow.Paced(); perSecond > 0 {
		longest = min(longest, 1+int(perSecond*o.ahead(lease).Seconds()))
	}
	followers = MaxBehind
	for i := range o.queues {
		followers -= o.queues[i].behind
	}
	return longest, max(followers, 0)
}

// StepRun records that n deliveries of a run no longer wait for the one before them.
func (o *outgoing) StepRun(c Class, n int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.queues[c].behind -= n
}

// TakeToken returns how long the next delivery of a run that has begun must wait for the
// destination's rate. A delivery takes no token if it will not be sent: its lane is held, or its
// turn comes too late for its lease.
func (o *outgoing) TakeToken(now time.Time, d *Delivery) (wait time.Duration, inTime bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.stopReason(now) != "" {
		return 0, true
	}
	if d.TooLate(o.Endpoint, now.Add(o.flow.UntilTurn(now))) {
		return 0, false
	}
	return o.flow.Wait(now), true
}

// MakeReady notes an ordering key of which an event was found whose next delivery may be claimed.
// Queued replays of the key move to the class of what was found waiting behind them.
func (o *outgoing) MakeReady(key string, found ordering.Place, c Class) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.keys.inFlight[key].replayed && c < Replays {
		o.keys.clearReplayed(key)
		if run := o.queues[Replays].remove(key); run != nil { // otherwise it is being sent
			for i := range run {
				run[i].Class = c
			}
			o.queues[c].push(run)
		}
	}
	o.keys.makeReady(key, found, c)
}

// keySettled counts a delivery with an ordering key that was settled.
func (o *outgoing) keySettled(key string, c Class, frees, blocks bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.keys.settled(key, c, frees, blocks)
}

// TakeReady returns ready keys for which their class has room, each once, and of which classes
// there are too many others.
func (o *outgoing) TakeReady(free [Classes]int) (keys []ReadyKey, crowded [Classes]bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.keys.take(free)
}

func (o *outgoing) HasReady() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.keys.ready) > 0
}

// CountClaimed counts n deliveries of an ordering key that are on their way, up to the given place.
func (o *outgoing) CountClaimed(key string, n int, last ordering.Place) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.keys.claimed(key, n, last)
}

// measurePost records how long a delivery occupied its sender. The caller holds mu.
func (o *outgoing) measurePost(occupied time.Duration) {
	if o.perPost == 0 {
		o.perPost = occupied
	}
	o.perPost += (occupied - o.perPost) / 8
}

// configure makes the next requests go to another endpoint, also of a lane that was removed before.
func (o *outgoing) configure(now time.Time, e *post.Endpoint) {
	o.mu.Lock()
	old := o.Endpoint
	o.Endpoint, o.removed = e, false
	if e.URL.Host != old.URL.Host {
		o.flow = capacity.New(e.Destination.MaxInFlight, e.Destination.RateLimit) // what the other one can bear says nothing
	} else {
		o.flow.Configure(now, e.Destination.MaxInFlight, e.Destination.RateLimit)
	}
	o.breaker.Configure(now, e.Destination.Breaker)
	o.mu.Unlock()
	old.Retire()
}

// remove keeps the lane from beginning another request.
func (o *outgoing) remove() {
	o.mu.Lock()
	o.removed = true
	unused := o.Endpoint
	o.mu.Unlock()
	unused.Retire()
}
