package relay

import (
	"context"
	"slices"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// claimer decides when to claim and for which lanes. It is one goroutine and owns all its fields.
type claimer struct {
	relay   *Relay
	pace    pace
	clock   databaseClock
	writers writers
	floors  floors
	damaged damaged
	lost    unacknowledged
	idleAt  time.Time // the database's, when the relay was last declared idle
	next    time.Time // when something other than the pace asks for a turn; zero: nothing does
}

// databaseClock tells what the database's clock shows, from what it showed last.
type databaseClock struct{ shown, read time.Time }

func (c *databaseClock) set(shown time.Time) { c.shown, c.read = shown, time.Now() }

func (c *databaseClock) now() time.Time { return c.shown.Add(time.Since(c.read)) }

// run claims until taking is done.
func (c *claimer) run(taking context.Context) {
	failing := newBackoff()
	for {
		wait, err := c.turn(taking)
		if err != nil {
			wait = failing.NextBackOff()
			c.relay.databaseError("claim", err)
		} else {
			failing.Reset()
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
		case <-c.relay.wake.room:
		case <-timeout:
		case <-c.relay.wake.tick:
			c.pace.look()
		case sweep := <-c.relay.wake.notified:
			c.pace.notified(time.Now())
			if sweep {
				for _, l := range c.relay.laneList() {
					l.walkNow()
				}
			} else if !c.idleAt.IsZero() { // the transaction may have been open for long
				c.lookBack(c.idleAt.Add(-overlap))
			}
		}
		if timer != nil {
			timer.Stop()
		}
	}
}

// turn claims once if there is reason to, and returns how long to wait for the next turn; negative: until woken.
func (c *claimer) turn(taking context.Context) (time.Duration, error) {
	r := c.relay
	instance, alive := r.session.current()
	if !alive || taking.Err() != nil {
		// Without its lock this relay's claims would look like a dead relay's.
		return minPace, nil
	}
	now := time.Now()
	if idle, changed := c.pace.declaration(now); changed {
		if err := r.store.declareIdle(taking, idle); err != nil {
			return 0, err
		}
		c.pace.declared(idle)
		c.idleAt = c.clock.now()
		if idle && r.cfg.Hooks.Idle != nil {
			defer r.cfg.Hooks.Idle()
		}
	}
	c.next = time.Time{}
	due, next := r.wake.retries.take(now)
	if due {
		c.pace.look()
	}
	if !next.IsZero() {
		c.plan(next)
	}
	if err := c.tendBreakers(now, instance); err != nil {
		return 0, err
	}
	if c.clock.read.IsZero() {
		at, err := r.store.now(taking)
		if err != nil {
			return 0, err
		}
		c.clock.set(at)
	}

	if err := c.observeWriters(taking, now); err != nil {
		return 0, err
	}

	looking := c.pace.looking(now)
	claims := c.claims(now)
	if len(claims) == 0 {
		if c.busy() {
			c.pace.full(now)
		} else if looking { // every destination is held or paused: nothing can be found
			c.pace.claimed(now, 0)
		}
		return c.wait(now), nil
	}
	result, err := c.claim(taking, instance, claims)
	if err != nil {
		for _, of := range claims {
			for _, key := range of.request.keys {
				of.lane.makeReady(key.key, key.class)
			}
			for _, s := range of.request.scans {
				if s.class != live {
					of.lane.walks[s.class].failed(time.Now(), r.cfg.PollInterval)
				}
			}
		}
		return 0, err
	}
	c.clock.set(result.at)
	work := c.work(result.deliveries)
	found := c.advance(claims, result, time.Since(now))
	c.handOut(claims, result)
	switch {
	case looking:
		c.pace.claimed(time.Now(), work)
	case work > 0:
		c.pace.worked(time.Now())
	}
	if found {
		return 0, nil
	}
	return c.wait(time.Now()), nil
}

// work returns how many of the claimed deliveries are no probes, for which an idle relay need not wake up.
func (c *claimer) work(claimed []delivery) (n int) {
	var l *lane
	probe := false
	for i := range claimed {
		if d := &claimed[i]; l == nil || l.name != d.destination {
			l = c.relay.lane(d.destination)
			probe = l.state().Breaker != breakerClosed.String()
		}
		if !probe {
			n++
		}
	}
	return n
}

// busy reports whether any lane holds anything.
func (c *claimer) busy() bool {
	return slices.ContainsFunc(c.relay.laneList(), (*lane).busy)
}

// plan makes the next turn come at the given time at the latest.
func (c *claimer) plan(at time.Time) {
	if c.next.IsZero() || at.Before(c.next) {
		c.next = at
	}
}

// wait returns how long nothing is to be done, neither for the pace nor for what is planned; negative: until woken.
func (c *claimer) wait(now time.Time) time.Duration {
	wait := c.pace.wait(now)
	if c.next.IsZero() {
		return wait
	}
	untilNext := max(c.next.Sub(now), minPace)
	if wait < 0 {
		return untilNext
	}
	return min(wait, untilNext)
}

// A laneClaim is what a claim wants of one lane.
type laneClaim struct {
	lane    *lane
	request claimRequest
}

// claim runs the statement. It is not cut off when taking ends: the claim may have committed, and its rows would wait for
// their lease.
func (c *claimer) claim(taking context.Context, instance int32, claims []laneClaim) (claimResult, error) {
	requests := make([]claimRequest, len(claims))
	for i, of := range claims {
		requests[i] = of.request
	}
	ctx := context.WithoutCancel(taking)
	if err := c.lost.giveBack(ctx, c.relay.store, instance); err != nil {
		return claimResult{}, err
	}
	return c.claimAll(ctx, instance, requests)
}

// claims returns what to claim: for lanes that may have more than their last claim took, for those whose ordering keys
// have moved on, and for all with room when it is time to look for new work.
func (c *claimer) claims(now time.Time) []laneClaim {
	r := c.relay
	lanes := r.laneList()
	active := 0
	for _, l := range lanes {
		if l.walks[live].more || l.walks[backlog].more || l.busy() {
			active++
		}
	}
	share := max(1, r.config().MaxInFlight/max(1, active))
	looking := c.pace.looking(now)
	claims := make([]laneClaim, 0, len(lanes))
	for _, l := range lanes {
		if r.cfg.Hooks.LaneChanged != nil {
			l.show(now, r.cfg.Hooks.LaneChanged)
		}
		l.setShare(min(l.current().destination.MaxInFlight, share))
		if request := c.request(l, now, looking); len(request.scans)+len(request.keys) > 0 {
			claims = append(claims, laneClaim{l, request})
			l.asked = now
		}
	}
	return claims
}

// request returns what to claim for one lane; nothing if it has neither scans nor keys.
func (c *claimer) request(l *lane, now time.Time, looking bool) (request claimRequest) {
	looking = looking || l.owed
	if at := l.early(now, c.relay.cfg.Lease); !at.IsZero() {
		l.owed = looking
		c.plan(at)
		return claimRequest{}
	}
	free, worthwhile := l.room(now, c.relay.cfg.Lease)
	keys, crowded := l.takeReady(free)
	for class := range free {
		if crowded[class] {
			free[class] = 0
		}
	}
	l.owed = looking && free[live] <= 0
	to := l.current().destination
	request = claimRequest{
		destination: l.name, keys: keys, skipFailed: to.OnFailure == SkipFailed, promise: to.Retry.Promise, reordered: l.reordered,
	}
	longest, followers := l.runBounds(c.relay.cfg.Lease)
	request.run = min(longest, 1+followers/max(1, len(keys)))
	for i := range keys {
		keys[i].floor = c.floors.of(orderingKey{l.name, keys[i].key}, l.reordered, request.skipFailed).event
	}
	request.scans = c.scans(l, now, free, looking, worthwhile)
	return request
}

// scans returns which parts of a lane's due deliveries to look at.
func (c *claimer) scans(l *lane, now time.Time, free [classes]int, looking, worthwhile bool) (scans []scan) {
	window := keyset{at: c.clock.now().Add(-liveWindow)}
	w := &l.walks[live]
	after := w.position
	if !w.more && after != (keyset{}) {
		after = keyset{at: after.at.Add(-overlap)}
	}
	if after.compare(window) < 0 {
		if after != (keyset{}) && w.more { // what it had not come to has become backlog
			l.walks[backlog].due = time.Time{}
		}
		after = window
	}
	// What is next of its key takes no room from the others: keys that go on would leave them none.
	if free[live] > 0 && (looking || w.more && worthwhile) {
		scans = append(scans, scan{class: live, free: free[live], after: after})
	}
	for _, class := range []class{backlog, replays} {
		w := &l.walks[class]
		until := keyset{}
		if class == backlog {
			until = after
		}
		switch {
		case free[class] <= 0 || !worthwhile: // what is settled next asks again
		case w.wanted(now):
			scans = append(scans, scan{class: class, free: free[class], after: w.position, until: until})
		case w.more:
			c.plan(w.due)
		}
	}
	return scans
}

// advance moves the lanes past what a claim has looked at, and notes the ordering keys it found. It reports whether one of
// them can be claimed at once. A key that could not be claimed when it was last asked for is nothing found, or a walk through
// what is blocked would never rest.
func (c *claimer) advance(claims []laneClaim, result claimResult, took time.Duration) (ready bool) {
	found := make([]int, len(result.scans))
	for i := range result.deliveries {
		if d := &result.deliveries[i]; d.scan > 0 {
			found[d.scan-1]++
		}
	}
	for i, of := range claims {
		if reordered, changed := result.reordered[i]; changed {
			of.lane.reordered = reordered
		}
	}
	c.learn(claims, result)
	n := 0
	for _, of := range claims {
		for _, s := range of.request.scans {
			seen := result.scans[n]
			for _, waits := range seen.keys {
				key := orderingKey{of.lane.name, waits.key}
				if !c.floors.of(key, of.lane.reordered, of.request.skipFailed).blocked {
					found[n]++
				}
				c.floors.forget(key, waits.eventID)
				of.lane.makeReady(waits.key, s.class)
			}
			of.lane.walks[s.class].advance(s.class, seen, found[n], result.at, took, c.relay.cfg.PollInterval)
			n++
		}
		ready = ready || of.lane.hasReady()
	}
	return ready
}

// learn remembers where the unsettled deliveries of ordering keys begin. The heads of what was claimed are among its
// deliveries. It comes before what scans have seen below that: such a key must be read anew.
func (c *claimer) learn(claims []laneClaim, result claimResult) {
	of := map[string]int{}
	for i := range claims {
		of[claims[i].lane.name] = i
	}
	learn := func(request int, key string, head int64, blocked bool) {
		of := claims[request]
		c.floors.set(orderingKey{of.lane.name, key},
			floor{min(head-1, c.writers.closed), of.lane.reordered, of.request.skipFailed, blocked})
	}
	for _, head := range result.heads {
		learn(head.request, head.key, head.eventID, true)
	}
	for i := range result.deliveries {
		if d := &result.deliveries[i]; d.scan == 0 && d.after == 0 && d.event.orderingKey != nil {
			learn(of[d.destination], *d.event.orderingKey, d.eventID, false)
		}
	}
}

// handOut gives each lane what was claimed for it, and starts senders for it.
func (c *claimer) handOut(claims []laneClaim, result claimResult) {
	r := c.relay
	byLane := make(map[string][]delivery, len(claims))
	for _, d := range result.deliveries {
		byLane[d.destination] = append(byLane[d.destination], d)
	}
	window := result.at.Add(-liveWindow)
	for _, of := range claims {
		deliveries, brought := byLane[of.lane.name]
		if !brought {
			if of.lane.tried(time.Now()) {
				signal(r.wake.room)
			}
			continue
		}
		if r.cfg.Hooks.Claimed != nil {
			r.cfg.Hooks.Claimed(of.lane.name, len(deliveries))
		}
		c.push(of, deliveries, window)
	}
}

// push queues what was claimed for a lane, each run in the class of its most urgent delivery. A key of which something else
// than replays was found waiting is not slowed down to their share by the replays before it.
func (c *claimer) push(of laneClaim, deliveries []delivery, window time.Time) {
	r, l := c.relay, of.lane
	asked := make(map[string]class, len(of.request.keys))
	for _, key := range of.request.keys {
		asked[key.key] = max(key.class, backlog)
	}
	all, broken := runs(deliveries)
	for _, d := range broken { // before anything is sent: what a run frees its key for must be free by then
		l.took(d.class, 1)
		l.claimedKey(*d.event.orderingKey, 1)
		r.settle(l, newSettlement(d, verdict{outcome: Hold, reason: ReasonOrder}, RetryPolicy{}, time.Now(), 0, 0))
	}
	var byClass [classes][][]delivery
	for _, run := range all {
		class := replays
		if key := run[0].event.orderingKey; key != nil {
			l.claimedKey(*key, len(run))
			class = asked[*key]
		}
		for i := range run {
			class = min(class, run[i].classAt(window))
		}
		for i := range run {
			run[i].class = class
		}
		byClass[class] = append(byClass[class], run)
	}
	for i, runs := range byClass {
		for range l.push(time.Now(), class(i), runs) {
			r.senders.Go(func() { r.send(l) })
		}
	}
}

// classAt returns the class of a delivery when the live window begins at the given time.
func (d *delivery) classAt(window time.Time) class {
	switch {
	case d.replay:
		return replays
	case d.nextAttemptAt.Time.Before(window):
		return backlog
	}
	return live
}

// newBackoff paces the repetition of what only waiting can mend: it never gives up.
func newBackoff() *backoff.ExponentialBackOff {
	return backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(50*time.Millisecond),
		backoff.WithMaxInterval(5*time.Second),
		backoff.WithMaxElapsedTime(0),
	)
}
