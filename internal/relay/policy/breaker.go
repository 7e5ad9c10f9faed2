package policy

import (
	"cmp"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/check"
)

// A Breaker holds a lane whose destination is down as a whole, so that an outage of any length
// spends no attempts. The database keeps its state and its evidence, which all relays share; this
// is one relay's view of both. One relay at a time tries a held lane, with one delivery first, then
// two, four, and so on.
//
//	closed ──evidence──▶ open ──a relay takes its turn──▶ half-open ──as many as the lane may have──▶ closed
//	                      ▲                                   │
//	                      └────────────failed─────────────────┘
//
// A relay that is refused while another relay may be accepted holds the lane alone: the database
// has the lane closed, and the trial needs no turn.
//
// Its methods take the time and are not safe for concurrent use.
type Breaker struct {
	Policy BreakerPolicy
	State  BreakerState
	// Write is what the claimer has yet to tell the database.
	Write BreakerWrite
	Since time.Time // of the last change made here: what the database said before is old
	TryAt time.Time // when open: not before
	Cause string    // the error that opened it
	// Alone says that only this relay holds the lane, or tries it.
	Alone bool

	// Refusals that this relay got since its last answer, and up to BreakerEvents of their events.
	refusals      int
	refusedEvents []int64
	failedAlone   int // probes in a row, for the wait until the next

	// Evidence while closed. A failure counts one, an answer takes back some: see failures.
	Recorded  int       // what the database holds, from all relays
	Unwritten int       // what this relay adds to it; below 0 after answers
	WriteAt   time.Time // when to write that
	Answered  time.Time // when the destination last answered this relay
	// Events that were answered with a failure, at most BreakerEvents. An open breaker keeps them:
	// see several.
	Events []int64

	// While half-open.
	allowed  int       // how many may be in flight
	passed   int       // since that was last doubled
	Accepted bool      // something has passed, now or, when open again, before
	streak   int       // failures since then
	Until    time.Time // how long the lane is this relay's alone
}

// Implausible returns a longer time than any relay gives a breaker whose trials take so long: the
// database's clock must have been put back since.
func (b *Breaker) Implausible(hold time.Duration) time.Duration {
	return 2 * max(b.Policy.ProbeMax, hold)
}

// BreakerPolicy says when a destination is taken to be down as a whole. Its deliveries are then
// held: nothing is sent but probes, which spend no attempt, until one is accepted.
type BreakerPolicy struct {
	// Disabled never holds: an outage spends attempts on the schedule, and deliveries fail.
	Disabled bool
	// Failures that make a destination suspect, counted over all relays. An answer takes back three
	// of them, so they need not be in a row. 0: 5. From then on failures spend no attempt; the
	// breaker opens when the destination has not answered for a second, or at four times as many.
	// Only failures of at least three events count. A destination that cannot be reached is suspect
	// at once, with one event.
	Failures int
	// ProbeAfter is how long an open breaker waits before the first probe; the wait doubles with
	// each that fails. 0: 1 s.
	ProbeAfter time.Duration
	// ProbeMax is the longest wait between two probes, and so how long deliveries may wait after a
	// recovery. 0: 5 s.
	ProbeMax time.Duration
}

// Defaults of the breaker.
const (
	DefaultBreakerFailures = 5
	DefaultProbeAfter      = time.Second
	DefaultProbeMax        = 5 * time.Second
)

// WithDefaults returns a copy in which every zero value is replaced by its default.
func (p BreakerPolicy) WithDefaults() BreakerPolicy {
	p.Failures = cmp.Or(p.Failures, DefaultBreakerFailures)
	p.ProbeAfter = cmp.Or(p.ProbeAfter, DefaultProbeAfter)
	p.ProbeMax = cmp.Or(p.ProbeMax, max(DefaultProbeMax, p.ProbeAfter))
	return p
}

// Problems returns the mistakes in a policy with its defaults.
func (p BreakerPolicy) Problems(path string) []check.Problem {
	var v check.Problems
	v.Require(p.Failures > 0 && p.Failures <= 1000, path+".failures", "%d is out of range; write 1 to 1000", p.Failures)
	v.Require(p.ProbeAfter > 0 && p.ProbeAfter <= p.ProbeMax, path+".probe_after",
		"%s is out of range; write more than 0 and at most probe_max (%s)", p.ProbeAfter, p.ProbeMax)
	v.Require(p.ProbeMax > 0 && p.ProbeMax <= time.Hour, path+".probe_max", "%s is out of range; write more than 0 and at most 1h", p.ProbeMax)
	return v
}

// A BreakerState is where a breaker stands between normal operation and an outage.
type BreakerState int

// The states of a breaker.
const (
	BreakerClosed BreakerState = iota
	BreakerOpen
	BreakerHalfOpen
)

// String returns the state as the database spells it.
func (s BreakerState) String() string { return [...]string{"closed", "open", "half_open"}[s] }

// A BreakerWrite is a change that the database does not have yet.
type BreakerWrite int

// What the claimer may have to write.
const (
	WriteNothing BreakerWrite = iota
	WriteOpen
	WriteClosed
)

const (
	breakerAfter    = time.Second // without an answer
	breakerTimes    = 4           // as many failures as make a suspicion
	BreakerEvents   = 3           // that must have failed, if what was sent could be at fault
	breakerForgives = 3           // failures that one answer takes back: more than three of four must fail
	// evidenceAfter is how long evidence waits to be written. At a busy destination an answer takes
	// it back meanwhile.
	evidenceAfter = 500 * time.Millisecond
	// TryHold is how long a lane is one relay's alone to try, beyond the timeout of a request.
	TryHold = 20 * time.Second
)

// Holding reports whether nothing may be sent.
func (b *Breaker) Holding() bool { return b.State == BreakerOpen }

// IsQuiet reports whether the breaker is closed, and has nothing to write.
func (b *Breaker) IsQuiet() bool {
	return b.State == BreakerClosed && b.Write == WriteNothing && b.Unwritten == 0 && !b.Alone
}

// Trying reports whether this relay tries the lane, and how many may be in flight then.
func (b *Breaker) Trying() (trying bool, allowed int) { return b.State == BreakerHalfOpen, b.allowed }

// failures returns how many failures are held against the destination.
func (b *Breaker) failures() int { return max(0, b.Recorded+b.Unwritten) }

// several reports whether the failures are those of enough events to be the destination's fault.
func (b *Breaker) several() bool { return len(b.Events) >= BreakerEvents }

// Pending reports whether the claimer has something to write.
func (b *Breaker) Pending() bool { return b.Write != WriteNothing || b.Unwritten != 0 }

// blame says whose fault a result is.
type blame int

const (
	blameUnknown     blame = iota // the result says nothing about the destination
	blameNone                     // the destination answers
	blameEither                   // the destination, or what was sent
	blameDestination              // certainly the destination
)

func (v *Result) blame() blame {
	switch v.Reason {
	case ReasonOK, ReasonRejected:
		return blameNone
	case ReasonDNS, ReasonConnect, ReasonTLS, ReasonEgress:
		return blameDestination
	case ReasonServerError, ReasonUnavailable, ReasonTimeout, ReasonNetwork, ReasonMalformed, ReasonUnauthorized, ReasonNotFound,
		ReasonRedirect, ReasonUnexpected:
		if v.Unreached {
			return blameDestination
		}
		return blameEither
	}
	return blameUnknown
}

// refuses reports whether a result may concern this relay alone: its secret, its certificates or
// its way to the destination.
func (v *Result) refuses() bool {
	switch v.Reason {
	case ReasonUnauthorized, ReasonNotFound, ReasonRedirect, ReasonDNS, ReasonConnect, ReasonTLS, ReasonEgress:
		return true
	}
	return false
}

// MayBeAlone reports whether what has opened the breaker may concern this relay alone.
func (b *Breaker) MayBeAlone() bool { return b.refusals > 0 }

// isRefused reports whether this relay was refused often enough to be sure, whatever other relays
// were answered.
func (b *Breaker) isRefused() bool {
	return b.refusals >= b.Policy.Failures && len(b.refusedEvents) >= BreakerEvents
}

// noteRefusal counts a result towards the refusals in a row.
func (b *Breaker) noteRefusal(event int64, blame blame, v *Result) {
	switch {
	case blame == blameNone || !v.refuses():
		b.refusals, b.refusedEvents = 0, nil
	case v.Shared:
	default:
		b.refusals++
		b.refusedEvents = addEvent(b.refusedEvents, event)
	}
}

// RecordResult records what came of a request. It reports whether the delivery is held, at no cost,
// instead of spending an attempt.
func (b *Breaker) RecordResult(now time.Time, event int64, v *Result, most int) (hold bool) {
	blame := v.blame()
	if blame == blameNone {
		b.Answered = now
	}
	switch {
	case b.Policy.Disabled || !v.Posted:
		return false
	case blame == blameUnknown:
		return v.Unreached // this relay cut the request off before there was a connection
	}
	b.noteRefusal(event, blame, v)
	if b.Alone && b.State == BreakerHalfOpen && blame != blameNone && !v.refuses() {
		b.Close(now) // it is answered as all relays may be: what fails now speaks against the destination
	}
	switch {
	case b.State == BreakerOpen:
		return blame != blameNone // the request was in flight when the breaker opened
	case b.State == BreakerHalfOpen:
		return b.recordTrial(now, event, blame, v, most)
	case blame == blameNone:
		b.forgive(now)
		return false
	}
	certain := blame == blameDestination
	if !certain {
		b.Events = addEvent(b.Events, event)
	}
	if !v.Shared {
		b.add(now, 1)
	}
	// What other relays were answered takes back evidence, but not the refusals of this one.
	failures := max(b.failures(), b.refusals)
	suspected := certain || b.several() && b.failures() >= b.Policy.Failures || b.isRefused()
	hold = certain || suspected && failures > b.Policy.Failures // the failures before a suspicion spend attempts
	if suspected && (now.Sub(b.Answered) >= breakerAfter || failures >= breakerTimes*b.Policy.Failures) {
		b.open(now, v.Message)
	}
	return hold
}

// forgive takes back evidence because the destination has answered. Without evidence there is
// nothing to write.
func (b *Breaker) forgive(now time.Time) {
	if b.failures() > 0 {
		b.add(now, -min(breakerForgives, b.failures()))
	}
	if b.failures() == 0 {
		b.Events = nil
	}
}

func addEvent(events []int64, event int64) []int64 {
	if len(events) >= BreakerEvents || slices.Contains(events, event) {
		return events
	}
	return append(slices.Clone(events), event)
}

// add changes the evidence, and plans when to write that.
func (b *Breaker) add(now time.Time, failures int) {
	if b.Unwritten == 0 {
		b.WriteAt = now.Add(evidenceAfter)
	}
	b.Unwritten += failures
}

// EvidenceRecorded records that the database has taken the given part of what was unwritten, and
// what it holds now.
func (b *Breaker) EvidenceRecorded(now time.Time, written, failures int, events []int64) {
	if b.State == BreakerClosed {
		b.Recorded, b.Unwritten, b.Events, b.Since = failures, b.Unwritten-written, events, now
	}
}

// recordTrial records a result while this relay tries the lane, and reports whether the delivery is
// held at no cost.
func (b *Breaker) recordTrial(now time.Time, event int64, blame blame, v *Result, most int) (hold bool) {
	if blame == blameNone {
		b.Accepted, b.streak = true, 0
		if b.passed++; b.passed >= b.allowed {
			b.allowed, b.passed = 2*b.allowed, 0
		}
		if b.allowed >= most {
			b.Close(now)
		}
		return false
	}
	certain := blame == blameDestination
	if b.allowed == 1 {
		if !certain {
			b.Events = addEvent(b.Events, event)
		}
		passed := b.Accepted
		b.open(now, v.Message)
		b.Accepted = passed
		return certain || b.several() || b.isRefused() // a lone event that was answered may be at fault itself: it spends its attempt
	}
	// The destination has just accepted another delivery, so this one spends its attempt, or it
	// would be tried for ever. One failure alone says nothing about the destination: some
	// deliveries fail at any time.
	if v.Shared {
		return certain
	}
	if b.streak++; b.streak > 1 || certain {
		b.allowed, b.passed = b.allowed/2, 0
	}
	return certain
}

// Enter changes the state and forgets what belongs to the one before.
func (b *Breaker) Enter(now time.Time, state BreakerState) {
	*b = Breaker{
		Policy: b.Policy, State: state, Since: now, Cause: b.Cause, Answered: b.Answered, Events: b.Events,
		Alone: b.Alone, refusals: b.refusals, refusedEvents: b.refusedEvents, failedAlone: b.failedAlone,
	}
	if state == BreakerClosed {
		b.Events = nil
	}
}

func (b *Breaker) open(now time.Time, cause string) {
	b.Enter(now, BreakerOpen)
	b.Write, b.Cause = WriteOpen, cause
}

// Close ends the outage.
func (b *Breaker) Close(now time.Time) {
	b.Enter(now, BreakerClosed)
	b.Write = WriteClosed
}

// Opened records that the database has the open breaker, and how long no relay may try the lane.
// Also a relay that held it alone needs a turn from then on.
func (b *Breaker) Opened(now time.Time, wait time.Duration) {
	if b.State == BreakerOpen {
		b.Alone, b.failedAlone = false, 0
		b.Write, b.Since, b.TryAt = WriteNothing, now, now.Add(wait)
	}
}

// HoldAlone records that the database knows that this relay is refused, and returns when it tries
// again. Other relays continue.
func (b *Breaker) HoldAlone(now time.Time) (next time.Time) {
	if b.State != BreakerOpen {
		return time.Time{}
	}
	if b.Accepted {
		b.failedAlone = 0
	}
	wait := min(b.Policy.ProbeMax, b.Policy.ProbeAfter<<min(b.failedAlone, 20))
	b.failedAlone++
	b.Alone, b.Write, b.Since, b.TryAt = true, WriteNothing, now, now.Add(wait)
	return b.TryAt
}

// TryAlone begins to try the lane for this relay alone, with one delivery first. No turn and no
// time bounds that: what comes next is the trial.
func (b *Breaker) TryAlone(now time.Time) {
	b.Enter(now, BreakerHalfOpen)
	b.Alone, b.allowed = true, 1
	if b.Policy.Disabled {
		b.Close(now)
	}
}

// ClosedAlone records that the database knows that this relay is accepted again.
func (b *Breaker) ClosedAlone(now time.Time) {
	if b.Write == WriteClosed {
		b.Alone, b.failedAlone, b.Write, b.Since = false, 0, WriteNothing, now
	}
}

// Try begins to try the lane.
func (b *Breaker) Try(now time.Time, hold time.Duration) {
	b.Enter(now, BreakerHalfOpen)
	b.allowed, b.Until = 1, now.Add(hold)
	if b.Policy.Disabled {
		b.Close(now) // held before it was switched off, and there is nothing to find out
	}
}

// Configure changes the policy. What is held when it is switched off goes when its next probe is
// due.
func (b *Breaker) Configure(now time.Time, policy BreakerPolicy) {
	b.Policy = policy
	switch {
	case b.Alone && b.State == BreakerOpen:
		b.TryAt = now // with its new secret
	case !policy.Disabled:
	case b.State == BreakerHalfOpen:
		b.Close(now)
	case b.Write == WriteOpen:
		b.Enter(now, BreakerClosed)
	}
}

// DestinationState is what all relays share about one destination whose breaker is not closed, or
// that has failed lately.
type DestinationState struct {
	Destination string
	Breaker     string        // closed, open or half_open
	Remaining   time.Duration // until breaker_until; negative: it has passed. 0 when closed
	Owner       int32         // of the half-open breaker; 0: none
	Failures    int           // while closed, held against it by all relays
}

// ApplyState applies the state of the destination as a beat read it. A state read before this
// relay's last change is old, and ignored.
func (b *Breaker) ApplyState(began, now time.Time, s DestinationState, relayID int32) {
	if b.Write != WriteNothing || !began.After(b.Since) {
		return
	}
	switch {
	case s.Breaker == "closed":
		switch {
		case b.Alone:
			return
		case b.State != BreakerClosed && b.refusals > 0: // another relay was accepted; this one may still be refused
			b.TryAlone(now)
			return
		case b.State != BreakerClosed:
			b.Enter(now, BreakerClosed)
			b.Answered = now // the relay that closed it has had an answer
		}
		b.Recorded = s.Failures
		b.Unwritten = max(b.Unwritten, -b.Recorded)
		if b.failures() == 0 {
			b.Events = nil
		}
	case b.State == BreakerHalfOpen && s.Breaker == "half_open" && s.Owner == relayID:
	default: // it waits, or another relay tries
		wait := s.Remaining
		if b.State == BreakerOpen && s.Owner == relayID { // this one does, and the acknowledgement was lost
			wait = 0
		}
		if b.State != BreakerOpen {
			b.Enter(now, BreakerOpen)
		}
		b.Alone, b.failedAlone = false, 0
		b.TryAt = now.Add(wait)
	}
}
