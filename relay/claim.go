package relay

import (
	"context"
	"slices"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// claimer decides when to claim and for which lanes. It is one goroutine and owns all its fields.
type claimer struct {
	relay *Relay
	pace  pace
	clock databaseClock
	lost  unacknowledged
	next  time.Time // when something other than the pace asks for a turn; zero: nothing does
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

	looking := c.pace.looking(now)
	asks := c.asks(now)
	if len(asks) == 0 {
		if c.busy() {
			c.pace.full(now)
		} else if looking { // every destination is held or paused: nothing can be found
			c.pace.claimed(now, 0)
		}
		return c.wait(now), nil
	}
	claimed, at, err := c.claim(context.WithoutCancel(taking), instance, asks)
	if err != nil {
		c.lost.failed(instance, err)
		for _, a := range asks {
			a.lane.unblock(a.unblocked...)
			if a.class != live {
				a.lane.walks[a.class].failed(time.Now(), r.cfg.PollInterval)
			}
		}
		return 0, err
	}
	c.clock.set(at)
	c.lost.acknowledged(instance, at, r.cfg.Lease)
	work := c.work(claimed)
	c.handOut(asks, claimed, at, now)
	switch {
	case looking:
		c.pace.claimed(time.Now(), work)
	case work > 0:
		c.pace.worked(time.Now())
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

// claim takes what the asks want. Its context is not that of taking: a claim that is cut off may have committed, and its
// rows would wait for their lease.
func (c *claimer) claim(ctx context.Context, instance int32, asks []ask) ([]delivery, time.Time, error) {
	r := c.relay
	if err := c.lost.giveBack(ctx, r.store, instance); err != nil {
		return nil, time.Time{}, err
	}
	for i := range asks {
		a := &asks[i]
		if a.class == live || !a.lane.walks[a.class].chunked {
			continue
		}
		end, err := r.store.chunkEnd(ctx, a.destination, a.class == replays, a.after, walkChunk)
		if err != nil {
			return nil, time.Time{}, err
		}
		if end != (keyset{}) && (a.until == (keyset{}) || end.compare(a.until) < 0) {
			a.until, a.chunk = end, true
		}
	}
	return r.store.claim(ctx, instance, r.cfg.Lease, asks)
}

// asks returns what to claim: for lanes that may have more than their last claim took, for those whose ordering keys
// have moved on, and for all with room when it is time to look for new work.
func (c *claimer) asks(now time.Time) []ask {
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
	asks := make([]ask, 0, len(lanes))
	for _, l := range lanes {
		if r.cfg.Hooks.LaneChanged != nil {
			l.show(now, r.cfg.Hooks.LaneChanged)
		}
		l.setShare(min(l.current().destination.MaxInFlight, share))
		asks = append(asks, c.asksOf(l, now, looking)...)
	}
	return asks
}

// asksOf returns what to claim for one lane.
func (c *claimer) asksOf(l *lane, now time.Time, looking bool) (asks []ask) {
	looking = looking || l.owed
	if at := l.early(now, c.relay.cfg.Lease); !at.IsZero() {
		l.owed = looking
		c.plan(at)
		return nil
	}
	free, worthwhile := l.room(now, c.relay.cfg.Lease)
	l.owed = looking && free[live] <= 0
	to := l.current().destination
	base := ask{lane: l, destination: l.name, skipFailed: to.OnFailure == SkipFailed, promise: to.Retry.Promise}
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
	add := func(class class, free int, after, until keyset, unblocked []string) {
		a := base
		a.class, a.free, a.after, a.until, a.unblocked = class, free, after, until, unblocked
		a.run, a.followers = l.runBounds(c.relay.cfg.Lease)
		asks = append(asks, a)
		l.asked = now
	}
	if free[live] > 0 {
		unblocked := l.takeUnblocked(free[live])
		switch {
		case looking || w.more && worthwhile:
			// What is next of its key takes no room from the others: keys that go on would leave them none.
			add(live, free[live], after, keyset{}, unblocked)
		case len(unblocked) > 0:
			add(live, 0, after, keyset{}, unblocked) // without reading through what stands behind others of its key
		}
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
			add(class, free[class], w.position, until, nil)
		case w.more:
			c.plan(w.due)
		}
	}
	return asks
}

// handOut gives each lane what was claimed for it, at the database's time at, and starts senders for it.
func (c *claimer) handOut(asks []ask, claimed []delivery, at, asked time.Time) {
	r := c.relay
	took := time.Since(asked)
	found := make([]int, len(asks))
	last := make([]keyset, len(asks))
	byLane := make(map[string][]delivery, len(asks))
	for _, d := range claimed {
		if d.ask > 0 {
			found[d.ask-1]++
			last[d.ask-1] = d.place()
		}
		byLane[d.destination] = append(byLane[d.destination], d)
	}
	window := at.Add(-liveWindow)
	for i, a := range asks {
		l := a.lane
		if a.free > 0 {
			l.walks[a.class].advance(a, found[i], last[i], at, took, r.cfg.PollInterval)
		}
		deliveries, brought := byLane[a.destination]
		delete(byLane, a.destination) // with the first of its asks a lane gets everything
		if !brought {
			if l.tried(time.Now()) {
				signal(r.wake.room)
			}
			continue
		}
		if r.cfg.Hooks.Claimed != nil {
			r.cfg.Hooks.Claimed(a.destination, len(deliveries))
		}
		c.push(l, deliveries, window)
	}
}

// push queues what was claimed for a lane, each run in its class.
func (c *claimer) push(l *lane, deliveries []delivery, window time.Time) {
	r := c.relay
	all, broken := runs(deliveries)
	for _, d := range broken { // before anything is sent: what a run frees its key for must be free by then
		l.took(d.class, 1)
		r.settle(l, newSettlement(d, verdict{outcome: Hold, reason: ReasonOrder}, RetryPolicy{}, time.Now(), 0, 0))
	}
	var byClass [classes][][]delivery
	for _, run := range all {
		class := live
		switch head := &run[0]; {
		case head.replay:
			class = replays
		case head.nextAttemptAt.Time.Before(window):
			class = backlog
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

// newBackoff paces the repetition of what only waiting can mend: it never gives up.
func newBackoff() *backoff.ExponentialBackOff {
	return backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(50*time.Millisecond),
		backoff.WithMaxInterval(5*time.Second),
		backoff.WithMaxElapsedTime(0),
	)
}
