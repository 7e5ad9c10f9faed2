package relay

import (
	"context"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// claimer decides when to claim and for which lanes. It is one goroutine and owns all its fields.
type claimer struct {
	relay *Relay
	pace  pace
}

// overlap is how far behind the newest delivery it has seen a lane that keeps up looks again: transactions that
// overlap commit out of order.
const overlap = 2 * time.Second

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
				for _, l := range c.relay.lanes {
					l.sweepDue = time.Time{}
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
		if err := r.store.declareIdle(taking, instance, idle); err != nil {
			return 0, err
		}
		c.pace.declared(idle)
		if idle && r.cfg.Hooks.Idle != nil {
			defer r.cfg.Hooks.Idle()
		}
	}

	asks := c.asks(now)
	if len(asks) == 0 {
		c.pace.full(now)
		return c.pace.wait(now), nil
	}
	// Not taking: a claim that is cut off may have committed, and its rows would wait for their lease.
	claimed, err := r.store.claim(context.WithoutCancel(taking), instance, r.cfg.Lease, asks)
	if err != nil {
		return 0, err
	}
	took := time.Since(now)
	for _, a := range asks {
		if a.after == (keyset{}) {
			l := r.lanes[a.destination]
			l.sweepFrom = now.Add(101 * took)
			l.sweepDue = now.Add(took + max(r.cfg.PollInterval, 100*took))
		}
	}
	c.handOut(asks, claimed)
	c.pace.claimed(time.Now(), len(claimed))
	return c.pace.wait(time.Now()), nil
}

// asks returns what to claim: for lanes that may have more than their last claim took, and for all with room when it is
// time to look for new work.
func (c *claimer) asks(now time.Time) []ask {
	r := c.relay
	active := 0
	for _, l := range r.lanes {
		if l.more || l.busy() {
			active++
		}
	}
	share := max(1, r.cfg.MaxInFlight/max(1, active))
	looking := c.pace.looking(now)
	asks := make([]ask, 0, len(r.lanes))
	for _, l := range r.lanes {
		l.setLimit(min(l.destination.MaxInFlight, share))
		if l.unblocked.Swap(false) {
			l.sweepDue = l.sweepFrom
		}
		free, worthwhile := l.room(now, r.cfg.Lease)
		sweep := !now.Before(l.sweepDue)
		if free == 0 || !(looking || sweep || l.more && worthwhile) {
			continue
		}
		l.asked = now
		after := l.position
		switch {
		case sweep:
			after = keyset{}
		case !l.more && after != (keyset{}):
			after = keyset{at: after.at.Add(-overlap)}
		}
		asks = append(asks, ask{destination: l.destination.Name, free: free, after: after})
	}
	return asks
}

// handOut gives each lane what was claimed for it and starts senders for it.
func (c *claimer) handOut(asks []ask, claimed []delivery) {
	r := c.relay
	byLane := make(map[string][]delivery, len(asks))
	for _, d := range claimed {
		byLane[d.destination] = append(byLane[d.destination], d)
	}
	for _, a := range asks {
		l := r.lanes[a.destination]
		deliveries := byLane[a.destination]
		l.more = len(deliveries) >= a.free
		if len(deliveries) == 0 {
			continue
		}
		last := deliveries[len(deliveries)-1]
		if l.more || last.nextAttemptAt.Time.After(l.position.at) {
			l.position = keyset{at: last.nextAttemptAt.Time, id: last.eventID}
		}
		if r.cfg.Hooks.Claimed != nil {
			r.cfg.Hooks.Claimed(a.destination, len(deliveries))
		}
		for range l.push(deliveries) {
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
