package policy

import "time"

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

// Pace decides how often to look for work, and whether producers notify. As the driver of a network card is interrupted while
// little comes in and polls while much does, a relay is armed at a low load: each commit notifies, and wakes it at once. At a
// high one that would cost producers too much, because a notification takes a lock which serialises the commits of the whole
// database: then it polls, as often as it finds something. While it is armed it polls ever less often: a transaction that
// began before does not notify, and is found after about as long as it ran.
//
// A relay is idle when nothing has come for a while.
//
// Its methods are pure: they take the time.
type Pace struct {
	Poll time.Duration // the longest wait that is not left to the safety tick
	Deaf bool          // notifications do not reach the relay, which is never armed then

	Armed    bool          // as declared in the database
	armedAt  time.Time     // since when producers notify
	load     load          // counts notifications while armed, and finds while not
	lastBusy time.Time     // when the load was last too high to be armed
	quiet    time.Duration // how long the load must be low before the relay is armed

	Idle     bool
	LastWork time.Time // when a claim last found something, or a notification said so

	Interval time.Duration // from the next look to the one after it
	NextLook time.Time
	took     time.Duration // how long the last look took
	woken    bool          // a notification asked for the next look
	vain     time.Duration // pause after a look that a notification asked for and that found nothing; zero: the last one found something
	vainAt   time.Time     // when that look was
}

// Look makes the next turn look for new work.
func (p *Pace) Look() { p.NextLook = time.Time{} }

// Notified ends idleness, and makes the next turn look. If looks for notifications have found nothing, because another relay was
// quicker or the events are for a destination that is held, they become rarer.
func (p *Pace) Notified(now time.Time, commits int) {
	p.load.add(now, commits)
	p.LastWork, p.Idle, p.woken = now, false, p.woken || commits > 0
	if next := p.vainAt.Add(p.vain); p.NextLook.After(next) {
		p.NextLook = next
	}
}

// Claimed records what a look found, and how long it took.
func (p *Pace) Claimed(now time.Time, deliveries int, took time.Duration) {
	if deliveries > 0 {
		p.Worked(now)
		p.vain = 0
	} else if p.woken {
		p.vain, p.vainAt = min(max(2*p.vain, fastPoll), maxVain), now
	}
	p.woken = false
	longest := 2 * p.Poll
	if !p.Armed && !p.Idle {
		if deliveries > 0 {
			p.Interval = fastPoll
		}
		// Looks become rarer where being awake was in vain: producers may be active for a destination that is held.
		longest = max(slowPoll, p.quiet/16)
	}
	p.Interval = min(max(p.Interval, fastPoll), longest)
	// Long looks may take half of the time. A single long look does not count: the server was held up for a moment, and the events
	// that came meanwhile have waited already.
	p.NextLook = now.Add(max(p.Interval, min(took, p.took)-fastPoll))
	p.Interval, p.took = min(2*p.Interval, longest), took
}

// Worked records that something was found, by a look or by another claim. It brings the next look forward if that is far off, and never
// puts it off: a lane that drains its backlog would keep the relay from looking at the others, and from becoming idle.
func (p *Pace) Worked(now time.Time) {
	p.LastWork, p.Idle = now, false
	next := now.Add(quietBeforeIdle)
	if !p.Armed {
		p.load.add(now, 1)
		next = now.Add(slowPoll)
	}
	if p.NextLook.After(next) {
		p.NextLook = next
	}
}

// Full records that a look was due and no lane had room for what it might find.
func (p *Pace) Full(now time.Time) {
	if p.Looking(now) {
		p.NextLook = now.Add(slowPoll)
	}
}

// Looking reports whether it is time to look for new work.
func (p *Pace) Looking(now time.Time) bool { return !now.Before(p.NextLook) }

// Declaration returns whether producers should notify, and whether that must be declared.
func (p *Pace) Declaration(now time.Time) (armed, changed bool) {
	load := p.load.at(now)
	if p.Armed && load > highLoad || !p.Armed && load > lowLoad {
		p.lastBusy = now
	}
	armed = !p.Deaf && now.Sub(p.lastBusy) >= max(p.quiet, quietBeforeIdle)
	return armed, armed != p.Armed
}

// Declared records that the database knows whether producers notify. Both states begin with a look. A relay that was disarmed
// shortly after it was armed waits longer before it arms again.
func (p *Pace) Declared(now time.Time, armed bool) {
	p.Armed, p.load, p.Interval = armed, load{}, fastPoll
	p.Look()
	if armed {
		p.armedAt, p.Interval = now, firstArmedPoll
		return
	}
	p.quiet = max(2*p.quiet, quietBeforeIdle)
	if now.Sub(p.armedAt) > shortlyArmed {
		p.quiet = quietBeforeIdle
	}
	p.quiet = min(p.quiet, maxQuietBeforeArm)
}

// BecomeIdle makes the relay idle, and the next turn look, if nothing has come for a while. It reports whether it did.
func (p *Pace) BecomeIdle(now time.Time) bool {
	if p.Idle || !p.Armed && !p.Deaf || now.Sub(p.LastWork) < quietBeforeIdle {
		return false
	}
	p.Idle, p.Interval = true, firstArmedPoll
	if p.Armed { // a transaction that will not notify began before the relay was armed, and has run for that long
		p.Interval = min(max(now.Sub(p.armedAt), firstArmedPoll), 2*p.Poll)
	}
	p.Look()
	return true
}

// Lapsed records that producers did not notify for a while although the relay was armed, and do so again.
func (p *Pace) Lapsed(now time.Time) {
	p.armedAt, p.Interval = now, firstArmedPoll
	p.Look()
}

// Wait returns how long the claimer has nothing to do; negative: until it is woken.
func (p *Pace) Wait(now time.Time) time.Duration {
	untilLook := max(p.NextLook.Sub(now), 0)
	if p.Idle || p.Armed {
		untilIdle := max(p.LastWork.Add(quietBeforeIdle).Sub(now), 0)
		switch left := p.Interval > p.Poll && !p.woken; {
		case left && p.Idle:
			return -1
		case left:
			return untilIdle
		case !p.Idle:
			return min(untilLook, untilIdle)
		}
	}
	return untilLook
}

// load counts events in steps of loadStep.
type load struct {
	begun       time.Time // when the current step began
	count, last int       // in the current step, and in the one before
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

// at returns the greater count of the current step and the one before.
func (l *load) at(now time.Time) int {
	switch passed := now.Sub(l.begun); {
	case passed >= 2*loadStep || passed < 0:
		*l = load{begun: now}
	case passed >= loadStep:
		*l = load{begun: l.begun.Add(loadStep), last: l.count}
	}
	return max(l.count, l.last)
}
