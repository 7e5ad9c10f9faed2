package relay

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// wakeup carries the reasons for which waiting goroutines look again. Each channel holds at most one token: a token
// says "look", not how often.
type wakeup struct {
	// For the claimer.
	room     chan struct{} // a lane that wants more has room again
	tick     chan struct{} // the safety tick
	notified chan bool     // a producer committed while this relay was armed; true: look behind the positions too
	commits  atomic.Int64  // notifications of producers since the claimer last took their number
	hears    atomic.Bool   // the session listens
	idle     atomic.Bool   // as of the claimer's last turn
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

// Times of the choice between notifications and polling, and of idleness.
const (
	quietBeforeIdle   = 250 * time.Millisecond
	maxQuietBeforeArm = 4 * time.Second
	shortlyArmed      = time.Second
	firstArmedPoll    = 50 * time.Millisecond
	fastPoll          = 250 * time.Microsecond
	slowPoll          = 20 * time.Millisecond
	maxVain           = 100 * time.Millisecond
)

// pace decides how often to look for work, and whether producers notify. As the driver of a network card is interrupted while
// little comes in and polls while much does, a relay is armed at a low load: each commit notifies, and wakes it at once. At a
// high one that would cost producers too much, because a notification takes a lock which serialises the commits of the whole
// database: then it polls, as often as it finds something. While it is armed it polls ever less often: a transaction that
// began before does not notify, and is found after about as long as it ran.
//
// A relay is idle when nothing has come for a while.
//
// Its methods are pure: they take the time.
type pace struct {
	poll time.Duration // the longest wait that is not left to the safety tick
	deaf bool          // it hears no notifications, and is never armed

	armed    bool          // as declared
	armedAt  time.Time     // when it was
	load     load          // notifications while armed, looks that found something otherwise
	lastBusy time.Time     // when the load was last too high to be armed
	quiet    time.Duration // how long it must not be, before the relay is armed

	idle     bool
	lastWork time.Time // when a claim last found something, or a notification said so

	interval time.Duration // until the look after the next one
	nextLook time.Time
	woken    bool          // the next look is for a notification
	vain     time.Duration // how long it comes after the last such look, since these have found nothing
	vainAt   time.Time     // when that was
}

// look makes the next turn look for new work.
func (p *pace) look() { p.nextLook = time.Time{} }

// notified ends idleness, and makes the next turn look. If looks for notifications have found nothing, because another relay was
// quicker or the events are for a destination that is held, they become rarer.
func (p *pace) notified(now time.Time, commits int) {
	p.load.add(now, commits)
	p.lastWork, p.idle, p.woken = now, false, p.woken || commits > 0
	if next := p.vainAt.Add(p.vain); p.nextLook.After(next) {
		p.nextLook = next
	}
}

// claimed records what a look found, and how long it took.
func (p *pace) claimed(now time.Time, deliveries int, took time.Duration) {
	if deliveries > 0 {
		p.worked(now)
		p.vain = 0
	} else if p.woken {
		p.vain, p.vainAt = min(max(2*p.vain, fastPoll), maxVain), now
	}
	p.woken = false
	longest := 2 * p.poll
	if !p.armed && !p.idle {
		if deliveries > 0 {
			p.interval = fastPoll
		}
		// Rarer if being awake has been in vain: producers may be active for a destination that is held.
		longest = max(slowPoll, p.quiet/16)
	}
	p.interval = min(max(p.interval, fastPoll), longest)
	p.nextLook = now.Add(max(p.interval, took-fastPoll)) // long looks get half of the time
	p.interval = min(2*p.interval, longest)
}

// worked records that something was found, by a look or without one. The next look is put off by that no further: a lane that
// drains its backlog would keep the others from being looked at, and an armed relay from the look that idleness begins with.
func (p *pace) worked(now time.Time) {
	p.lastWork, p.idle = now, false
	next := now.Add(quietBeforeIdle)
	if !p.armed {
		p.load.add(now, 1)
		next = now.Add(slowPoll)
	}
	if p.nextLook.After(next) {
		p.nextLook = next
	}
}

// full records that a look was due and no lane had room for what it might find.
func (p *pace) full(now time.Time) {
	if p.looking(now) {
		p.nextLook = now.Add(slowPoll)
	}
}

// looking reports whether it is time to look for new work.
func (p *pace) looking(now time.Time) bool { return !now.Before(p.nextLook) }

// declaration returns whether producers should notify, and whether that must be declared.
func (p *pace) declaration(now time.Time) (armed, changed bool) {
	load := p.load.at(now)
	if p.armed && load > highLoad || !p.armed && load > lowLoad {
		p.lastBusy = now
	}
	armed = !p.deaf && now.Sub(p.lastBusy) >= max(p.quiet, quietBeforeIdle)
	return armed, armed != p.armed
}

// declared records that the database knows. Either way of finding work begins with a look. If the relay was armed in vain, since
// others work so much that it is disarmed at once, it waits longer the next time.
func (p *pace) declared(now time.Time, armed bool) {
	p.armed, p.load, p.interval = armed, load{}, fastPoll
	p.look()
	if armed {
		p.armedAt, p.interval = now, firstArmedPoll
		return
	}
	p.quiet = max(2*p.quiet, quietBeforeIdle)
	if now.Sub(p.armedAt) > shortlyArmed {
		p.quiet = quietBeforeIdle
	}
	p.quiet = min(p.quiet, maxQuietBeforeArm)
}

// becomeIdle reports whether the relay becomes idle. It begins that with a look.
func (p *pace) becomeIdle(now time.Time) bool {
	if p.idle || !p.armed && !p.deaf || now.Sub(p.lastWork) < quietBeforeIdle {
		return false
	}
	p.idle, p.interval = true, firstArmedPoll
	p.look()
	return true
}

// wait returns how long nothing is to be done; negative: until woken.
func (p *pace) wait(now time.Time) time.Duration {
	untilLook := max(p.nextLook.Sub(now), 0)
	if p.idle || p.armed {
		untilIdle := max(p.lastWork.Add(quietBeforeIdle).Sub(now), 0)
		switch left := p.interval > p.poll && !p.woken; {
		case left && p.idle:
			return -1
		case left:
			return untilIdle
		case !p.idle:
			return min(untilLook, untilIdle)
		}
	}
	return untilLook
}

// load counts what happens in steps of time.
type load struct {
	begun       time.Time // the step
	count, last int       // in it, and in the one before
}

const (
	loadStep = 100 * time.Millisecond
	highLoad = 30 // a step
	lowLoad  = 10
)

func (l *load) add(now time.Time, n int) {
	l.at(now)
	l.count += n
}

// at returns how much happens in a step, as far as is known.
func (l *load) at(now time.Time) int {
	switch passed := now.Sub(l.begun); {
	case passed >= 2*loadStep || passed < 0:
		*l = load{begun: now}
	case passed >= loadStep:
		*l = load{begun: l.begun.Add(loadStep), last: l.count}
	}
	return max(l.count, l.last)
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
