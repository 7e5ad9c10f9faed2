package relay

import (
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// wakeup carries the reasons for which waiting goroutines look again. Each channel holds at most one token: a token
// says "look", not how often.
type wakeup struct {
	// For the claimer.
	room     chan struct{} // a lane that wants more has room again
	tick     chan struct{} // the safety tick
	notified chan bool     // a producer committed while this relay was idle; true: look behind the positions too
	retries  *dues         // what this relay has put off is due again

	alerts chan struct{} // there may be alerts to send

	// For maintenance.
	parked   chan struct{} // there may be parked deliveries with a route
	routes   chan struct{} // the stored routes may have changed
	schema   chan struct{} // the schema may have changed under this relay
	reloaded chan struct{} // there may be an archive to plan anew, and removed lanes to empty
}

func newWakeup() *wakeup {
	token := func() chan struct{} { return make(chan struct{}, 1) }
	return &wakeup{
		room: token(), tick: token(), notified: make(chan bool, 1), retries: &dues{}, alerts: token(),
		parked: token(), routes: token(), schema: token(), reloaded: token(),
	}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// notify wakes the claimer. A request to sweep is never lost to a token without one.
func (w *wakeup) notify(sweep bool) {
	for {
		select {
		case w.notified <- sweep:
			return
		default:
		}
		if !sweep {
			return
		}
		select {
		case <-w.notified:
		default:
		}
	}
}

// How many notifications of one kind take effect in a second, and how many at once. A few more follow the first one of a burst, from
// producers that committed before they could see that the relay is awake.
const (
	looksPerSecond  = 10
	sweepsPerSecond = 1
	burstOfSweeps   = 3
)

// A throttle bounds how often notifications of one kind take effect. It belongs to one goroutine.
type throttle struct {
	limit   *rate.Limiter
	refused bool // whether the last notification was refused, so that the session has to catch up
}

func newThrottle(perSecond rate.Limit, burst int) throttle {
	return throttle{limit: rate.NewLimiter(perSecond, burst)}
}

// allow reports whether a notification at the given time may take effect.
func (t *throttle) allow(now time.Time) bool {
	allowed := t.limit.AllowN(now, 1)
	t.refused = !allowed
	return allowed
}

// takeRefused reports whether the last notification was refused, the first time that it is asked.
func (t *throttle) takeRefused() (refused bool) {
	refused, t.refused = t.refused, false
	return refused
}

// Times of the idle protocol.
const (
	quietBeforeIdle    = 250 * time.Millisecond
	maxQuietBeforeIdle = 4 * time.Second
	busyPoll           = 20 * time.Millisecond
	firstIdlePoll      = 50 * time.Millisecond
)

// pace decides how often to look for work, and when to be idle: to let producers notify, which costs them, instead of
// polling. A relay that found nothing for a while declares itself idle, looks once more, and then ever less often: a
// transaction that began before the declaration does not notify, and is found after about as long as it ran.
//
// Its methods are pure: they take the time.
type pace struct {
	poll time.Duration // the longest wait that is not left to the safety tick

	lastWork time.Time     // when a claim last found something, or a notification said so
	quiet    time.Duration // how long nothing may come before the relay is idle
	idle     bool          // as declared
	interval time.Duration // between looks while idle
	nextLook time.Time
}

// look makes the next turn look for new work.
func (p *pace) look() { p.nextLook = time.Time{} }

// notified ends idleness: one notification announces that producers are active, more would only cost them. Waking for
// work that another relay took makes the next idleness wait longer.
func (p *pace) notified(now time.Time) {
	p.quiet = min(max(2*p.quiet, quietBeforeIdle), maxQuietBeforeIdle)
	p.lastWork = now
	p.look()
}

// claimed records what a look found.
func (p *pace) claimed(now time.Time, deliveries int) {
	if deliveries > 0 {
		p.lastWork = now
		p.quiet = quietBeforeIdle
	}
	switch {
	case deliveries > 0:
		p.nextLook = now.Add(busyPoll)
	case !p.idle:
		// Rarer if being awake has been in vain: producers may be active for a destination that is held.
		p.nextLook = now.Add(max(busyPoll, p.quiet/16))
	default:
		p.nextLook = now.Add(p.interval)
		p.interval = min(2*p.interval, 2*p.poll)
	}
}

// worked records that something was found without a look. The next look is put off by that no further: a lane that drains
// its backlog would keep the others from being looked at.
func (p *pace) worked(now time.Time) {
	p.lastWork = now
	p.quiet = quietBeforeIdle
	if next := now.Add(busyPoll); p.nextLook.After(next) {
		p.nextLook = next
	}
}

// full records that a look was due and no lane had room for what it might find.
func (p *pace) full(now time.Time) {
	if p.looking(now) {
		p.nextLook = now.Add(busyPoll)
	}
}

// looking reports whether it is time to look for new work.
func (p *pace) looking(now time.Time) bool { return !now.Before(p.nextLook) }

// declaration returns whether the relay should be idle, and whether that must be declared.
func (p *pace) declaration(now time.Time) (idle, changed bool) {
	idle = now.Sub(p.lastWork) >= max(p.quiet, quietBeforeIdle)
	return idle, idle != p.idle
}

// declared records that the database knows; a new idleness begins with a look.
func (p *pace) declared(idle bool) {
	p.idle = idle
	if idle {
		p.interval = firstIdlePoll
		p.look()
	}
}

// wait returns how long nothing is to be done; negative: until woken.
func (p *pace) wait(now time.Time) time.Duration {
	if p.idle && p.interval > p.poll {
		return -1
	}
	return max(p.nextLook.Sub(now), 0)
}

// dues are times at which to look. Without them a retry would wait for the next poll, which may come later than all of its
// delay. Only near ones are kept, in steps, so that there are never more than a few thousand, whatever fails: to a long delay
// a poll adds next to nothing. They are safe for concurrent use.
type dues struct {
	mu    sync.Mutex
	begun time.Time   // what the steps are counted from
	at    []time.Time // ascending
}

const (
	dueAhead = 10 * time.Minute
	dueStep  = 100 * time.Millisecond
)

// add remembers to look when the given time has passed since now.
func (d *dues) add(now time.Time, in time.Duration) {
	if in > dueAhead {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.begun.IsZero() {
		d.begun = now
	}
	at := d.begun.Add((now.Sub(d.begun) + in).Truncate(dueStep) + dueStep)
	if i, known := slices.BinarySearchFunc(d.at, at, time.Time.Compare); !known {
		d.at = slices.Insert(d.at, i, at)
	}
}

// take reports whether it is time to look, and when it will be next; zero: unknown. What it has reported it forgets.
func (d *dues) take(now time.Time) (due bool, next time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	past := 0
	for past < len(d.at) && !now.Before(d.at[past]) {
		past++
	}
	d.at = slices.Delete(d.at, 0, past)
	if len(d.at) > 0 {
		next = d.at[0]
	}
	return past > 0, next
}
