package relay

import (
	"context"
	"time"

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
	for {
		c.markTurn()
		wait, err := c.claimIfDue(taking)
		if err != nil {
			wait = failing.NextBackOff()
			c.databaseError("claim", err)
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
	} else if wasIdle {
		if since := c.writers.Woken(time.Now()); !since.IsZero() {
			c.lookBack(since.Add(-policy.Overlap))
		}
	}
}

// claimIfDue is one turn: it claims once if there is reason to, and returns how long to wait for the next turn; negative: until woken.
func (c *claimer) claimIfDue(taking context.Context) (time.Duration, error) {
	instance, alive := c.current()
	if !alive || taking.Err() != nil {
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
	at, err := c.breakers.tend(now, instance)
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
			claim.lane.makeReady(key.key, key.class)
		}
		for _, s := range claim.request.scans {
			if s.class != live && !s.back {
				claim.lane.walks[s.class].failed(time.Now(), c.config().PollInterval)
			}
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
