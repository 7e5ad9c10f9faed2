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
					l.sweepNow()
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
	claimed, at, err := c.claim(context.WithoutCancel(taking), instance, asks)
	if err != nil {
		for _, a := range asks {
			r.lanes[a.destination].failed(a, time.Now(), r.cfg.PollInterval)
		}
		return 0, err
	}
	c.handOut(asks, claimed, at, now)
	c.pace.claimed(time.Now(), len(claimed))
	return c.pace.wait(time.Now()), nil
}

// claim takes what the asks want. Its context is not that of taking: a claim that is cut off may have committed, and its
// rows would wait for their lease.
func (c *claimer) claim(ctx context.Context, instance int32, asks []ask) ([]delivery, time.Time, error) {
	r := c.relay
	for i := range asks {
		a := &asks[i]
		if !a.sweep || !r.lanes[a.destination].chunked {
			continue
		}
		end, err := r.store.chunkEnd(ctx, a.destination, a.after, sweepChunk)
		if err != nil {
			return nil, time.Time{}, err
		}
		a.until = end
	}
	return r.store.claim(ctx, instance, r.cfg.Lease, asks)
}

// asks returns what to claim: for lanes that may have more than their last claim took, for those whose ordering keys
// have moved on, and for all with room when it is time to look for new work.
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
		free, worthwhile := l.room(now, r.cfg.Lease)
		sweep := worthwhile && !now.Before(l.sweepDue)
		if free == 0 {
			continue
		}
		unblocked := l.takeUnblocked(free)
		if !(looking || sweep || len(unblocked) > 0 || l.more && worthwhile) {
			continue
		}
		l.asked = now
		a := ask{destination: l.destination.Name, free: free - len(unblocked), after: l.position, unblocked: unblocked, sweep: sweep}
		switch {
		case sweep:
			a.after = l.swept
		case !l.more && a.after != (keyset{}):
			a.after = keyset{at: a.after.at.Add(-overlap)}
		}
		asks = append(asks, a)
	}
	return asks
}

// handOut gives each lane what was claimed for it, at the database's time at, and starts senders for it.
func (c *claimer) handOut(asks []ask, claimed []delivery, at, asked time.Time) {
	r := c.relay
	byLane := make(map[string][]delivery, len(asks))
	for _, d := range claimed {
		byLane[d.destination] = append(byLane[d.destination], d)
	}
	took := time.Since(asked)
	for _, a := range asks {
		l := r.lanes[a.destination]
		deliveries := byLane[a.destination]
		l.advance(a, deliveries, at, took, r.cfg.PollInterval)
		if len(deliveries) == 0 {
			continue
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
