package relay

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/shortsleep"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/session"
)

// claimer decides when to claim and for which lanes. It is one goroutine and owns all its fields. A turn is one pass of its loop.
type claimer struct {
	*core
	senders   *senders
	settler   *settler
	restTimes int // see the constant; less in tests, where a busy machine would make the rests last for minutes

	breakers breakerKeeper
	pace     policy.Pace
	clock    databaseClock
	writers  policy.Writers
	floors   policy.Floors
	damaged  damaged
	lost     session.Unacknowledged
	front    policy.Front
	next     time.Time // when to take the next turn for another reason than the pace; zero: there is none
}

// run claims until taking is done.
func (c *claimer) run(taking context.Context) {
	failing := newBackoff()
	sleeper := shortsleep.New()
	defer sleeper.Close()
	for {
		c.markTurn()
		wait, err := c.claimIfDue(taking)
		if err != nil {
			wait = failing.NextBackOff()
			c.databaseError("claim", err)
		} else {
			failing.Reset()
		}
		if wait > 0 && wait < shortsleep.Longest { // what comes meanwhile is met right after it
			sleeper.Sleep(wait)
			wait = 0
		}
		// A nil channel waits for ever: then only a wake-up ends the wait.
		var timeout <-chan time.Time
		var timer *time.Timer
		if wait >= 0 {
			timer = time.NewTimer(wait)
			timeout = timer.C
		}
		select {
		case <-taking.Done():
			return
		case <-c.wake.room:
			c.woken(WakeRoom)
		case <-timeout:
			c.woken(WakePoll)
		case <-c.wake.tick:
			c.woken(WakePoll)
			c.pace.Look()
		case sweep := <-c.wake.notified:
			c.notified(sweep)
		}
		if timer != nil {
			timer.Stop()
		}
	}
}

// notified makes the next turn look, and behind the positions if that is asked.
func (c *claimer) notified(sweep bool) {
	c.woken(WakeNotify)
	wasIdle := c.pace.Idle
	c.pace.Notified(time.Now(), int(c.wake.commits.Swap(0)))
	if c.wake.lapsed.Swap(false) {
		c.pace.Lapsed(time.Now())
	}
	if sweep {
		c.pace.Look()
		for _, l := range c.lanes.list() {
			l.walkNow()
		}
		if c.wake.rescued.Swap(false) { // the walk may have a large backlog before it
			c.lookBack(c.clock.now().Add(-rescuedWindow))
		}
	} else if wasIdle {
		if since := c.writers.Woken(time.Now()); !since.IsZero() {
			c.lookBack(since.Add(-policy.Overlap))
		}
	}
}

// claimIfDue is one turn: it claims once if there is reason to, and returns how long to wait for the next turn; negative: until woken.
func (c *claimer) claimIfDue(taking context.Context) (time.Duration, error) {
	instance, alive := c.current()
	if c.presence.WasLost() || !alive || taking.Err() != nil {
		// Without its session this relay's claims would look like a dead relay's. Floors and writers may be those of another server:
		// the database may have failed over since.
		c.floors, c.writers = policy.Floors{}, policy.Writers{}
		return minPace, nil
	}
	now := time.Now()
	c.pace.Deaf = !c.wake.listening.Load()
	if err := c.arm(taking, now); err != nil {
		return 0, err
	}
	if hook := c.config().Hooks.Idle; c.becomeIdle(now) && hook != nil {
		defer hook() // after the look that idleness begins with
	}
	if err := c.prepare(taking, now, instance); err != nil {
		return 0, err
	}
	looking := c.pace.Looking(now)
	claims := c.laneClaims(now)
	if len(claims) == 0 {
		if c.lanes.busy() {
			c.pace.Full(now)
		} else if looking { // every destination is held or paused: nothing can be found
			c.pace.Claimed(now, 0, 0)
		}
		return c.wait(now), nil
	}
	result, err := c.claim(taking, instance, claims)
	if err != nil {
		c.claimFailed(claims)
		return 0, err
	}
	c.clock.set(result.at)
	work, took := c.countWork(result.deliveries), time.Since(now)
	ready := c.applyResult(claims, result, took)
	c.handOut(claims, result)
	switch {
	case looking:
		c.pace.Claimed(time.Now(), work, took)
	case work > 0:
		c.pace.Worked(time.Now())
	}
	if ready {
		return 0, nil
	}
	return c.wait(time.Now()), nil
}

// arm declares in the database whether producers notify: they do while the load is low.
func (c *claimer) arm(taking context.Context, now time.Time) error {
	armed, changed := c.pace.Declaration(now)
	if !changed {
		return nil
	}
	if err := c.store.arm(taking, armed); err != nil {
		return err
	}
	c.pace.Declared(now, armed)
	return nil
}

// becomeIdle makes the relay idle if nothing has come for a while, and reports whether it did so now.
func (c *claimer) becomeIdle(now time.Time) bool {
	became := c.pace.BecomeIdle(now)
	c.wake.idle.Store(c.pace.Idle)
	if !became {
		return false
	}
	c.writers.BecameIdle()
	return true
}

// prepare does what a claim depends on: it plans the retries of this relay, writes what the breakers decided, learns the
// database's time and looks at open transactions.
func (c *claimer) prepare(taking context.Context, now time.Time, instance int32) error {
	c.next = time.Time{}
	due, next := c.wake.retries.Take(now)
	if due {
		c.pace.Look()
	}
	if !next.IsZero() {
		c.plan(next)
	}
	at, err := c.breakers.writeDecisions(now, instance)
	if c.breakers.looks {
		c.breakers.looks = false
		c.pace.Look()
	}
	if err != nil {
		return err
	}
	if !at.IsZero() {
		c.plan(at)
	}
	if c.clock.read.IsZero() {
		at, err := c.store.now(taking)
		if err != nil {
			return err
		}
		c.clock.set(at)
	}
	c.observeWriters(taking, now)
	return nil
}

// claim gives back the rows of an earlier claim whose answer was lost, and then claims. The end of taking does not cancel it: a
// cancelled claim may have committed, and its rows would wait until their lease ends.
func (c *claimer) claim(taking context.Context, instance int32, claims []laneClaim) (claimResult, error) {
	requests := make([]claimRequest, len(claims))
	for i, claim := range claims {
		requests[i] = claim.request
	}
	ctx := context.WithoutCancel(taking)
	if err := c.lost.GiveBack(ctx, c.store.pool, instance); err != nil {
		return claimResult{}, err
	}
	return c.claimAll(ctx, instance, requests)
}

// claimFailed makes the keys of a failed claim ready again and puts its walks off, so that the next claim costs less.
func (c *claimer) claimFailed(claims []laneClaim) {
	for _, claim := range claims {
		for _, key := range claim.request.keys {
			claim.lane.makeReady(key.key, 0, key.class)
		}
		for _, s := range claim.request.scans {
			if s.class != live && !s.back {
				claim.lane.walks[s.class].failed(time.Now(), min(c.config().PollInterval, DefaultPollInterval))
			}
		}
	}
}

// countWork counts the claimed deliveries that are no probes. A probe does not end idleness.
func (c *claimer) countWork(claimed []delivery) (n int) {
	var l *lane
	probe := false
	for i := range claimed {
		if d := &claimed[i]; l == nil || l.name != d.destination {
			l = c.lanes.get(d.destination)
			probe = l.state().Breaker != policy.BreakerClosed.String()
		}
		if !probe {
			n++
		}
	}
	return n
}

// applyResult moves the lanes past what a claim has read. It reports whether any ordering key can be claimed at once.
func (c *claimer) applyResult(claims []laneClaim, result claimResult, took time.Duration) (ready bool) {
	if result.frontTaken {
		c.front.Record(time.Now(), true)
		c.plan(c.front.Next)
	}
	for i, claim := range claims {
		if reordered, changed := result.reordered[i]; changed {
			claim.lane.reordered = reordered
		}
	}
	c.rememberFloors(claims, result) // before noteKeys: a key of which a scan saw an earlier event loses its floor again
	brought := result.broughtByScan()
	n := 0
	for _, claim := range claims {
		for _, s := range claim.request.scans {
			read := result.scans[n]
			unblocked := c.noteKeys(claim, s.class, read.keys)
			c.advanceWalk(claim.lane, s, read, brought[n], unblocked, result.at, took)
			n++
		}
		ready = ready || claim.lane.hasReady()
	}
	return ready
}

// rememberFloors remembers where the unsettled deliveries of each ordering key begin: at the head that the claim brought,
// or at the one that it found and could not claim.
func (c *claimer) rememberFloors(claims []laneClaim, result claimResult) {
	index := map[string]int{}
	for i := range claims {
		index[claims[i].lane.name] = i
	}
	remember := func(request int, key string, head int64, blocked bool) {
		claim := claims[request]
		c.floors.Set(policy.OrderingKey{Destination: claim.lane.name, Key: key},
			policy.Floor{Event: min(head-1, c.writers.Closed), Reordered: claim.lane.reordered, SkipFailed: claim.request.skipFailed, Blocked: blocked})
	}
	for _, head := range result.heads {
		remember(head.request, head.key, head.eventID, true)
	}
	for i := range result.deliveries {
		if d := &result.deliveries[i]; d.scan == 0 && d.after == 0 && d.event.OrderingKey != nil {
			remember(index[d.destination], *d.event.OrderingKey, d.eventID, false)
		}
	}
}

// broughtByScan returns how many deliveries each scan brought.
func (r *claimResult) broughtByScan() []int {
	brought := make([]int, len(r.scans))
	for i := range r.deliveries {
		if d := &r.deliveries[i]; d.scan > 0 {
			brought[d.scan-1]++
		}
	}
	return brought
}

// noteKeys makes the ordering keys ready that a scan has seen, and counts those that are not known to be blocked.
func (c *claimer) noteKeys(claim laneClaim, class class, keys []foundKey) (unblocked int) {
	l := claim.lane
	for _, found := range keys {
		key := policy.OrderingKey{Destination: l.name, Key: found.key}
		if !c.floors.LookUp(key, l.reordered, claim.request.skipFailed).Blocked {
			unblocked++
		}
		c.floors.Forget(key, found.eventID)
		l.makeReady(found.key, found.eventID, class)
	}
	return unblocked
}

// advanceWalk moves the walk of a lane past what its scan s has read, which brought so many deliveries. Blocked keys do not count as
// found, or a walk through them would never rest.
func (c *claimer) advanceWalk(l *lane, s scan, read scanResult, brought, unblocked int, at time.Time, took time.Duration) {
	if s.shared && !read.unread {
		c.front.Record(time.Now(), false)
	}
	w := &l.walks[s.class]
	if s.back {
		l.advanceLookBack(read)
	} else if !read.unread {
		// A little less than the poll interval, so that a walk that comes with each safety tick does not miss every other one.
		rest := policy.Rest{Least: c.config().PollInterval * 9 / 10, Times: c.restTimes}
		w.advance(s.class, read, brought+unblocked, at, took, rest)
		w.clear = brought > 0 && brought == read.looked
		if read.more && (read.passed > 0 || read.unkeyed > brought) { // other relays claim here
			w.shared = time.Now().Add(policy.SharedFor)
		}
	}
	// No settlement wakes the claimer for these: the requests may hang, or the deliveries are another relay's.
	if read.more || w.pause > 0 {
		c.plan(time.Now().Add(max(took, w.pause)))
	}
}

// handOut gives each lane what was claimed for it, and starts senders for it.
func (c *claimer) handOut(claims []laneClaim, result claimResult) {
	byLane := byDestination(result.deliveries)
	window := result.at.Add(-liveWindow)
	parts := c.lanes.divide(c.config().MaxInFlight, byLane)
	for _, claim := range claims {
		deliveries, brought := byLane[claim.lane.name]
		if !brought {
			if claim.lane.endTrial(time.Now()) {
				signal(c.wake.room)
			}
			continue
		}
		if c.config().Hooks.Claimed != nil {
			c.config().Hooks.Claimed(claim.lane.name, len(deliveries))
		}
		claim.lane.setShare(parts, true) // before it starts senders: all lanes together may have MaxInFlight
		c.push(claim, deliveries, window)
	}
}

// push queues the claimed deliveries of a lane, each run in the class of its most urgent delivery: a live delivery would otherwise
// wait among the replays for those that precede it in its key.
func (c *claimer) push(claim laneClaim, deliveries []delivery, window time.Time) {
	l := claim.lane
	keyClass := make(map[string]class, len(claim.request.keys))
	for _, key := range claim.request.keys {
		keyClass[key.key] = key.class
	}
	all, broken := runs(deliveries)
	for _, d := range broken { // before anything is sent: the end of a run makes its key ready, and these must be free then
		l.countTaken(d.class, 1)
		l.countClaimed(*d.event.OrderingKey, 1, d.eventID)
		c.settler.settle(held(d, policy.ReasonOrder))
	}
	var byClass [classes][][]delivery
	for _, run := range all {
		class := replays
		for i := range run {
			class = min(class, run[i].classAt(window))
		}
		if key := run[0].event.OrderingKey; key != nil {
			l.countClaimed(*key, len(run), run[len(run)-1].eventID)
			if class == replays {
				class = keyClass[*key]
			}
		}
		for i := range run {
			run[i].class = class
		}
		byClass[class] = append(byClass[class], run)
	}
	for i, runs := range byClass {
		for range l.push(time.Now(), class(i), runs) {
			c.senders.start(l)
		}
	}
}

// plan makes the next turn come at the given time at the latest.
func (c *claimer) plan(at time.Time) {
	if c.next.IsZero() || at.Before(c.next) {
		c.next = at
	}
}

// wait returns how long to wait for the next turn, by the pace and by what is planned; negative: until woken.
func (c *claimer) wait(now time.Time) time.Duration {
	wait := c.pace.Wait(now)
	if c.next.IsZero() {
		return wait
	}
	untilNext := max(c.next.Sub(now), minPace)
	if wait < 0 {
		return untilNext
	}
	return min(wait, untilNext)
}
