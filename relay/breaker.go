package relay

import (
	"slices"
	"time"
)

// A breaker holds a lane whose destination is down as a whole, so that an outage of any length spends no attempts. The
// database keeps its state and its evidence, which all relays share; this is one relay's view of both. One relay at a
// time tries a held lane, with one delivery first, then two, four, and so on.
//
//	closed ──evidence──▶ open ──a relay takes its turn──▶ half-open ──as many as the lane may have──▶ closed
//	                      ▲                                   │
//	                      └────────────failed─────────────────┘
//
// Its methods take the time and are not safe for concurrent use.
type breaker struct {
	policy BreakerPolicy
	state  breakerState
	// write is what the claimer has yet to tell the database.
	write breakerWrite
	since time.Time // of the last change made here: what the database said before is old
	tryAt time.Time // when open: not before
	cause string    // the error that opened it

	// Evidence while closed. A failure counts one, an answer takes back some: see failures.
	recorded  int       // what the database holds, from all relays
	unwritten int       // what this relay adds to it; below 0 after answers
	writeAt   time.Time // when to write that
	answered  time.Time // when the destination last answered this relay
	// events that were answered with a failure, at most breakerEvents. An open breaker keeps them: see several.
	events []int64

	// While half-open.
	allowed  int       // how many may be in flight
	passed   int       // since that was last doubled
	accepted bool      // something has passed, now or, when open again, before
	streak   int       // failures since then
	until    time.Time // how long the lane is this relay's alone
}

// BreakerPolicy says when a destination is taken to be down as a whole. Its deliveries are then held: nothing is sent
// but probes, which spend no attempt, until one is accepted.
type BreakerPolicy struct {
	// Off never holds: an outage spends attempts on the schedule, and deliveries fail.
	Off bool
	// Failures that make a destination suspect, counted over all relays. An answer takes back three of them, so they
	// need not be in a row. 0: 5. From then on failures spend no attempt; the breaker opens when the destination has
	// not answered for a second, or at four times as many. Only failures of at least three events count. A destination
	// that cannot be reached is suspect at once, with one event.
	Failures int
	// ProbeAfter is how long an open breaker waits before the first probe; the wait doubles with each that fails.
	// 0: 1 s.
	ProbeAfter time.Duration
	// ProbeMax is the longest wait between two probes, and so how long deliveries may wait after a recovery. 0: 5 s.
	ProbeMax time.Duration
}

// Defaults of the breaker.
const (
	DefaultBreakerFailures = 5
	DefaultProbeAfter      = time.Second
	DefaultProbeMax        = 5 * time.Second
)

func (p BreakerPolicy) withDefaults() BreakerPolicy {
	setDefault(&p.Failures, DefaultBreakerFailures)
	setDefault(&p.ProbeAfter, DefaultProbeAfter)
	setDefault(&p.ProbeMax, max(DefaultProbeMax, p.ProbeAfter))
	return p
}

type breakerState int

const (
	breakerClosed breakerState = iota
	breakerOpen
	breakerHalfOpen
)

// String returns the state as the database spells it.
func (s breakerState) String() string { return [...]string{"closed", "open", "half_open"}[s] }

type breakerWrite int

const (
	writeNothing breakerWrite = iota
	writeOpen
	writeClosed
)

const (
	breakerAfter    = time.Second // without an answer
	breakerTimes    = 4           // as many failures as make a suspicion
	breakerEvents   = 3           // that must have failed, if what was sent could be at fault
	breakerForgives = 3           // failures that one answer takes back: more than three of four must fail
	// evidenceAfter is how long evidence waits to be written. At a busy destination an answer takes it back meanwhile.
	evidenceAfter = 500 * time.Millisecond
	// tryHold is how long a lane is one relay's alone to try, beyond the timeout of a request.
	tryHold = 20 * time.Second
)

// holding reports whether nothing may be sent.
func (b *breaker) holding() bool { return b.state == breakerOpen }

// trying reports whether this relay tries the lane, and how many may be in flight then.
func (b *breaker) trying() (trying bool, allowed int) { return b.state == breakerHalfOpen, b.allowed }

// failures returns how many failures are held against the destination.
func (b *breaker) failures() int { return max(0, b.recorded+b.unwritten) }

// several reports whether the failures are those of enough events to be the destination's fault.
func (b *breaker) several() bool { return len(b.events) >= breakerEvents }

// pending reports whether the claimer has something to write.
func (b *breaker) pending() bool { return b.write != writeNothing || b.unwritten != 0 }

// blame says whose fault a result is.
type blame int

const (
	blameNobody      blame = iota // the result says nothing about the destination
	blameNone                     // the destination answers
	blameEither                   // the destination, or what was sent
	blameDestination              // certainly the destination
)

func (v *result) blame() blame {
	switch v.reason {
	case ReasonOK, ReasonRejected:
		return blameNone
	case ReasonDNS, ReasonConnect, ReasonTLS, ReasonEgress:
		return blameDestination
	case ReasonServerError, ReasonUnavailable, ReasonTimeout, ReasonNetwork, ReasonMalformed, ReasonUnauthorized, ReasonNotFound,
		ReasonRedirect, ReasonUnexpected:
		if v.unreached {
			return blameDestination
		}
		return blameEither
	}
	return blameNobody
}

// recordResult records what came of a request. It reports whether the delivery is held, at no cost, instead of spending an
// attempt.
func (b *breaker) recordResult(now time.Time, event int64, v *result, most int) (hold bool) {
	blame := v.blame()
	if blame == blameNone {
		b.answered = now
	}
	switch {
	case b.policy.Off || !v.posted:
		return false
	case blame == blameNobody:
		return v.unreached // this relay cut the request off before there was a connection
	case b.state == breakerOpen:
		return blame != blameNone // the request was in flight when the breaker opened
	case b.state == breakerHalfOpen:
		return b.recordTrial(now, event, blame, v, most)
	case blame == blameNone:
		b.forgive(now)
		return false
	}
	certain := blame == blameDestination
	if !certain {
		b.addEvent(event)
	}
	b.add(now, 1)
	failures := b.failures()
	suspected := certain || b.several() && failures >= b.policy.Failures
	hold = certain || suspected && failures > b.policy.Failures // the failures before a suspicion spend attempts
	if suspected && (now.Sub(b.answered) >= breakerAfter || failures >= breakerTimes*b.policy.Failures) {
		b.open(now, v.message)
	}
	return hold
}

// forgive takes back evidence because the destination has answered. Without evidence there is nothing to write.
func (b *breaker) forgive(now time.Time) {
	if b.failures() > 0 {
		b.add(now, -min(breakerForgives, b.failures()))
	}
	if b.failures() == 0 {
		b.events = nil
	}
}

func (b *breaker) addEvent(event int64) {
	if !b.several() && !slices.Contains(b.events, event) {
		b.events = append(slices.Clone(b.events), event)
	}
}

// add changes the evidence, and plans when to write that.
func (b *breaker) add(now time.Time, failures int) {
	if b.unwritten == 0 {
		b.writeAt = now.Add(evidenceAfter)
	}
	b.unwritten += failures
}

// evidenceRecorded records that the database has taken the given part of what was unwritten, and what it holds now.
func (b *breaker) evidenceRecorded(now time.Time, written, failures int, events []int64) {
	if b.state == breakerClosed {
		b.recorded, b.unwritten, b.events, b.since = failures, b.unwritten-written, events, now
	}
}

// recordTrial records a result while this relay tries the lane, and reports whether the delivery is held at no cost.
func (b *breaker) recordTrial(now time.Time, event int64, blame blame, v *result, most int) (hold bool) {
	if blame == blameNone {
		b.accepted, b.streak = true, 0
		if b.passed++; b.passed >= b.allowed {
			b.allowed, b.passed = 2*b.allowed, 0
		}
		if b.allowed >= most {
			b.close(now)
		}
		return false
	}
	certain := blame == blameDestination
	if b.allowed == 1 {
		if !certain {
			b.addEvent(event)
		}
		passed := b.accepted
		b.open(now, v.message)
		b.accepted = passed
		return certain || b.several() // a lone event that was answered may be at fault itself: it spends its attempt
	}
	// The destination has just accepted another delivery, so this one spends its attempt, or it would be tried for ever.
	// One failure alone says nothing about the destination: some deliveries fail at any time.
	if b.streak++; b.streak > 1 || certain {
		b.allowed, b.passed = b.allowed/2, 0
	}
	return certain
}

func (b *breaker) enter(now time.Time, state breakerState) {
	*b = breaker{policy: b.policy, state: state, since: now, cause: b.cause, answered: b.answered, events: b.events}
	if state == breakerClosed {
		b.events = nil
	}
}

func (b *breaker) open(now time.Time, cause string) {
	b.enter(now, breakerOpen)
	b.write, b.cause = writeOpen, cause
}

func (b *breaker) close(now time.Time) {
	b.enter(now, breakerClosed)
	b.write = writeClosed
}

// opened records that the database has the open breaker, and how long no relay may try the lane.
func (b *breaker) opened(now time.Time, wait time.Duration) {
	if b.state == breakerOpen {
		b.write, b.since, b.tryAt = writeNothing, now, now.Add(wait)
	}
}

// try begins to try the lane.
func (b *breaker) try(now time.Time, hold time.Duration) {
	b.enter(now, breakerHalfOpen)
	b.allowed, b.until = 1, now.Add(hold)
	if b.policy.Off {
		b.close(now) // held before it was switched off, and there is nothing to find out
	}
}

// configure changes the policy. What is held when it is switched off goes when its next probe is due.
func (b *breaker) configure(now time.Time, policy BreakerPolicy) {
	b.policy = policy
	switch {
	case !policy.Off:
	case b.state == breakerHalfOpen:
		b.close(now)
	case b.write == writeOpen:
		b.enter(now, breakerClosed)
	}
}

// applyState applies the state of the destination as a beat read it. A state read before this relay's last change is old,
// and ignored.
func (b *breaker) applyState(began, now time.Time, s destinationState, instance int32) {
	if b.write != writeNothing || !began.After(b.since) {
		return
	}
	switch {
	case s.breaker == "closed":
		if b.state != breakerClosed {
			b.enter(now, breakerClosed)
			b.answered = now // the relay that closed it has had an answer
		}
		b.recorded = s.failures
		b.unwritten = max(b.unwritten, -b.recorded)
		if b.failures() == 0 {
			b.events = nil
		}
	case b.state == breakerHalfOpen && s.breaker == "half_open" && s.owner == instance:
	default: // it waits, or another relay tries
		if b.state != breakerOpen {
			b.enter(now, breakerOpen)
		}
		b.tryAt = now.Add(s.remaining)
	}
}
