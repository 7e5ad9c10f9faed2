package relay

import (
	"slices"
	"time"
)

// judge lets breaker and flow learn from a verdict, and turns it into a hold where the destination is at fault.
func (l *lane) judge(now time.Time, event int64, v *verdict, took time.Duration) (changed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before := l.breaker.write
	if l.breaker.judge(now, event, v, min(l.share, l.flow.concurrency())) && v.outcome == Retry {
		v.outcome = Hold
	}
	if v.posted {
		l.flow.answered(now, v.reason, took, min(v.retryAfter, l.destination.Retry.RetryAfterMax))
	}
	return l.breaker.write != before
}

// seen takes in what the database said, at the given time, of destinations that are paused or whose breaker is not
// closed; all others are open for business.
func (r *Relay) seen(began time.Time, states []destinationState) {
	instance, _ := r.session.current()
	now := time.Now()
	changed := false
	for _, l := range r.laneList() {
		state := destinationState{destination: l.name, breaker: "closed"}
		if i := slices.IndexFunc(states, func(s destinationState) bool { return s.destination == l.name }); i >= 0 {
			state = states[i]
		}
		l.mu.Lock()
		if state.remaining > l.implausible() {
			state.remaining = 0
		}
		before := l.breaker.state
		l.breaker.heard(began, now, state, instance)
		changed = changed || l.breaker.state != before
		l.mu.Unlock()
	}
	if changed {
		r.wake.notify(true)
	}
}

// lockedAgain is when to try again what somebody else's lock on a destination has prevented.
const lockedAgain = 2 * time.Second

// implausible is a longer time than any relay gives a breaker: the database's clock must have been put back since.
func (l *lane) implausible() time.Duration {
	return 2 * max(l.breaker.policy.ProbeMax, l.destination.Timeout+tryHold)
}

// tendBreakers tells the database what breakers have decided, takes this relay's turn with those that wait to be tried,
// and plans when to do so again.
func (c *claimer) tendBreakers(now time.Time, instance int32) error {
	for _, l := range c.relay.laneList() {
		if now.Before(l.tend) {
			c.plan(l.tend)
			continue
		}
		at, err := c.tendBreaker(l, now, instance)
		if hasCode(err, lockNotAvailable) { // which is no reason for the other lanes to wait
			c.relay.databaseError("breaker", err)
			l.tend = time.Now().Add(lockedAgain)
			at, err = l.tend, nil
		}
		if err != nil {
			return err
		}
		if !at.IsZero() {
			c.plan(at)
		}
	}
	return nil
}

func (c *claimer) tendBreaker(l *lane, now time.Time, instance int32) (next time.Time, err error) {
	r := c.relay
	l.mu.Lock()
	b := l.breaker
	hold, implausible := l.destination.Timeout+tryHold, l.implausible()
	l.mu.Unlock()
	switch {
	case b.write == writeOpen:
		wait, probes, err := r.store.openBreaker(r.settling, l.name, instance, b)
		if err != nil {
			return time.Time{}, err
		}
		l.mu.Lock()
		l.breaker.opened(time.Now(), wait)
		l.mu.Unlock()
		r.cfg.Log.Warn().Str("destination", l.name).Str("error", b.cause).Int("failed_probes", probes).
			Int64("next_probe_in_ms", wait.Milliseconds()).Msg("breaker open: deliveries are held, and spend no attempts")
		signal(r.alerts)
		return time.Now().Add(wait), nil

	case b.write == writeClosed:
		if err := r.store.closeBreaker(r.settling, l.name, instance); err != nil {
			return time.Time{}, err
		}
		l.mu.Lock()
		if l.breaker.write == writeClosed {
			l.breaker.write, l.breaker.since = writeNothing, time.Now()
		}
		l.mu.Unlock()
		r.cfg.Log.Info().Str("destination", l.name).Msg("breaker closed: the destination has recovered")
		l.walkNow()
		c.pace.look()
		signal(r.alerts)

	case b.state == breakerOpen && now.Before(b.tryAt):
		return b.tryAt, nil

	case b.state == breakerOpen:
		taken, err := r.store.tryBreaker(r.settling, l.name, instance, hold, implausible)
		if err != nil {
			return time.Time{}, err
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		if !taken { // nothing is due, or another relay was first: the next beat tells
			l.breaker.tryAt = now.Add(r.cfg.PollInterval)
			return l.breaker.tryAt, nil
		}
		l.breaker.try(time.Now(), hold)
		for i := range l.walks { // each probe goes on where the one before it ended: another delivery may pass
			l.walks[i].due = time.Time{}
		}
		c.pace.look()

	case b.state == breakerHalfOpen && b.until.Sub(now) < hold/2:
		held, err := r.store.renewTrial(r.settling, l.name, instance, hold)
		if err != nil {
			return time.Time{}, err
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.breaker.state == breakerHalfOpen {
			l.breaker.until = now.Add(hold)
			if !held {
				l.breaker.enter(now, breakerOpen)
				l.breaker.tryAt = now.Add(hold)
			}
		}

	case b.state == breakerHalfOpen:
		return b.until.Add(-hold / 2), nil
	}
	return time.Time{}, nil
}

// tried ends the trial of a lane that has nothing more to send.
func (l *lane) tried(now time.Time) (ended bool) {
	if l.busy() || !l.walked(now) {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.breaker.state == breakerHalfOpen && l.breaker.accepted {
		l.breaker.close(now)
		return true
	}
	return false
}
