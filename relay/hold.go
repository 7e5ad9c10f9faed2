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
		l.flow.answered(now, v.reason, took)
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
		before := l.breaker.state
		l.breaker.heard(began, now, state, instance)
		changed = changed || l.breaker.state != before
		l.mu.Unlock()
	}
	if changed {
		r.wake.notify(true)
	}
}

// tendBreakers tells the database what breakers have decided, and takes this relay's turn with those that wait to be
// tried. It returns when to do so again; zero: nothing is planned.
func (c *claimer) tendBreakers(now time.Time, instance int32) (next time.Time, err error) {
	r := c.relay
	for _, l := range r.laneList() {
		at, err := c.tendBreaker(l, now, instance)
		if err != nil {
			return time.Time{}, err
		}
		if !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	return next, nil
}

func (c *claimer) tendBreaker(l *lane, now time.Time, instance int32) (next time.Time, err error) {
	r := c.relay
	l.mu.Lock()
	b := l.breaker
	timeout := l.destination.Timeout
	l.mu.Unlock()
	hold := timeout + tryHold
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
		taken, err := r.store.tryBreaker(r.settling, l.name, instance, hold)
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
	}
	return time.Time{}, nil
}

// tried ends the trial of a lane that has nothing more to send.
func (l *lane) tried(now time.Time) (ended bool) {
	if l.busy() {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.breaker.state == breakerHalfOpen && l.breaker.any {
		l.breaker.close(now)
		return true
	}
	return false
}
