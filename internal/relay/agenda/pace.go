package agenda

import "time"

// Times of the choice between notifications and polling, and of idleness.
const (
	quietBeforeIdle   = 250 * time.Millisecond
	maxQuietBeforeArm = 4 * time.Second
	shortlyArmed      = time.Second
	firstArmedPoll    = 50 * time.Millisecond
	fastPoll          = 250 * time.Microsecond
	busyPoll          = 2 * time.Millisecond // the longest interval while work was found lately
	slowPoll          = 20 * time.Millisecond
	maxEmptyBackoff   = 100 * time.Millisecond
	queueStep         = 250 * time.Millisecond // between checks whether producers wait
	queueChecks       = 4
)

// Pace decides how often to poll, that is to ask for new events, and whether producers notify. As
// the driver of a network card is interrupted while little comes in and polls while much does, a
// relay is armed at a low load: each commit notifies, and wakes it at once. At a high one that
// would cost producers too much, because a notification takes a lock which serialises the commits
// of the whole database: then it polls, as often as it finds something. Where commits are slow,
// that is so at any load. While it is armed it polls ever less often: a transaction that began
// before does not notify, and is found after about as long as it ran.
//
// A relay is idle when nothing has come for a while.
//
// Its methods are pure: they take the time.
type Pace struct {
	Poll         time.Duration // between two safety ticks; longer waits are left to these
	CannotListen bool          // notifications do not reach the relay, which is never armed then

	Armed    bool          // as declared in the database
	armedAt  time.Time     // since when producers notify
	load     load          // counts notifications while armed, and finds while not
	lastBusy time.Time     // when the load was last too high to be armed
	heard    bool          // a producer has notified since queueAt
	queueAt  time.Time     // when it was last checked whether producers wait for the lock
	queued   int           // checks in a row that found one who waits
	quiet    time.Duration // how long the load must be low before the relay is armed

	Idle     bool
	LastWork time.Time // when something was last found, or a notification said so

	Interval time.Duration // from the next poll to the one after it
	NextPoll time.Time
	took     time.Duration // how long the last poll took
	notified bool          // a notification asked for the next poll

	emptyBackoff time.Duration // after a poll that a notification asked for and that found nothing; zero: the last one found something
	emptyAt      time.Time     // when that poll was
}

// pollNow makes the next turn poll.
func (p *Pace) pollNow() { p.NextPoll = time.Time{} }

// Notified ends idleness, and makes the next turn poll. If polls for notifications have found
// nothing, because another relay was quicker or the events are for a destination that is held, they
// become rarer.
func (p *Pace) Notified(now time.Time, commits int) {
	p.load.add(now, commits)
	p.heard = p.heard || commits > 0
	p.LastWork, p.Idle, p.notified = now, false, p.notified || commits > 0
	if next := p.emptyAt.Add(p.emptyBackoff); p.NextPoll.After(next) {
		p.NextPoll = next
	}
}

// Polled records what a poll found, and how long it took.
func (p *Pace) Polled(now time.Time, deliveries int, took time.Duration) {
	if deliveries > 0 {
		p.Worked(now)
		p.emptyBackoff = 0
	} else if p.notified {
		p.emptyBackoff, p.emptyAt = min(max(2*p.emptyBackoff, fastPoll), maxEmptyBackoff), now
	}
	p.notified = false
	longest := 2 * p.Poll
	if !p.Armed && !p.Idle {
		if deliveries > 0 {
			p.Interval = fastPoll
		}
		// Polls become rarer where being awake was in vain: producers may be active for a
		// destination that is held. But intervals that double make what comes after a pause wait
		// for as long as the pause was: pauses of 10 ms are usual at hundreds of events a second.
		longest = min(max(slowPoll, p.quiet/16), max(busyPoll, now.Sub(p.LastWork)/8))
	}
	p.Interval = min(max(p.Interval, fastPoll), longest)
	// Long polls may take half of the time. A single long one does not count: the server was held
	// up for a moment, and the events that came meanwhile have waited already.
	p.NextPoll = now.Add(max(p.Interval, min(took, p.took)-fastPoll))
	p.Interval, p.took = min(2*p.Interval, longest), took
}

// Worked records that something was found, by a poll or by a claim. It brings the next poll forward
// if that is far off, and never puts it off: a lane that drains its backlog would keep the relay
// from new events of the others, and from becoming idle.
func (p *Pace) Worked(now time.Time) {
	p.LastWork, p.Idle = now, false
	next := now.Add(quietBeforeIdle)
	if !p.Armed {
		p.load.add(now, 1)
		next = now.Add(slowPoll)
	}
	if p.NextPoll.After(next) {
		p.NextPoll = next
	}
}

// Full records that a poll was due and could not be made.
func (p *Pace) Full(now time.Time) { p.NextPoll = now.Add(slowPoll) }

// Declaration returns whether producers should notify, and whether that must be declared.
func (p *Pace) Declaration(now time.Time) (armed, changed bool) {
	load := p.load.at(now)
	if p.Armed && load > highLoad || !p.Armed && load > lowLoad {
		p.lastBusy = now
	}
	armed = !p.CannotListen && now.Sub(p.lastBusy) >= max(p.quiet, quietBeforeIdle)
	return armed, armed != p.Armed
}

// MustCheckQueue reports whether the relay must find out now if producers wait for the lock of
// notifications. Where commits take long, the lock itself keeps their number below any limit.
func (p *Pace) MustCheckQueue(now time.Time) bool {
	return p.Armed && p.heard && now.Sub(p.queueAt) >= queueStep
}

// QueueChecked records whether producers wait for the lock. If they did each time for a second,
// notifications cost too much: one that waits for the short commit of another is no sign.
func (p *Pace) QueueChecked(now time.Time, waiting bool) {
	p.queueAt, p.heard = now, false
	if !waiting {
		p.queued = 0
	} else if p.queued++; p.queued >= queueChecks {
		p.lastBusy, p.queued = now, 0
	}
}

// Declared records that the database knows whether producers notify. Both states begin with a poll.
// A relay that was disarmed shortly after it was armed waits longer before it arms again.
func (p *Pace) Declared(now time.Time, armed bool) {
	p.Armed, p.load, p.Interval = armed, load{}, fastPoll
	p.pollNow()
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

// BecomeIdle makes the relay idle, and the next turn poll, if nothing has come for a while. It
// reports whether it did.
func (p *Pace) BecomeIdle(now time.Time) bool {
	if p.Idle || !p.Armed && !p.CannotListen || now.Sub(p.LastWork) < quietBeforeIdle {
		return false
	}
	p.Idle, p.Interval = true, firstArmedPoll
	if p.Armed { // a transaction that will not notify began before the relay was armed, and has run for that long
		p.Interval = min(max(now.Sub(p.armedAt), firstArmedPoll), 2*p.Poll)
	}
	p.pollNow()
	return true
}

// NotifyGap records that producers did not notify for a while although the relay was armed, and do
// so again.
func (p *Pace) NotifyGap(now time.Time) {
	p.armedAt, p.Interval = now, firstArmedPoll
	p.pollNow()
}

// Plan registers when to poll, and when the relay may become idle. Polls that have become rarer
// than the safety tick are left to it.
func (p *Pace) Plan(a *Agenda, now time.Time) {
	leftToTick := (p.Idle || p.Armed) && p.Interval > p.Poll && !p.notified
	if !leftToTick || !now.Before(p.NextPoll) {
		a.At(CausePoll, p.NextPoll)
	}
	if p.Armed && !p.Idle {
		a.At(CauseIdle, p.LastWork.Add(quietBeforeIdle))
	}
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
