package relay

import "time"

// A breaker holds a lane whose destination is down as a whole, so that an outage of any length spends no attempts. The
// database keeps its state, which all relays share; this is one relay's view of it, and its evidence. One relay at a
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

	// Evidence while closed.
	streak  int            // failures since the last answer
	failing time.Time      // since when
	certain int            // of which cannot be the fault of what was sent
	events  map[int64]bool // that failed in the streak
	recent  []bool         // whether each of the last requests failed
	oldest  int            // of recent

	// While half-open.
	allowed  int       // how many may be in flight
	passed   int       // since that was last doubled
	accepted bool      // something has passed, now or, when open again, before
	until    time.Time // how long the lane is this relay's alone
}

// BreakerPolicy says when a destination is taken to be down as a whole. Its deliveries are then held: nothing is sent
// but probes, which spend no attempt, until one is accepted.
type BreakerPolicy struct {
	// Off never holds: an outage spends attempts on the schedule, and deliveries fail.
	Off bool
	// Failures in a row after which the destination is under suspicion: from then on failures spend no attempt. 0: 5. The
	// breaker opens when the suspicion lasts: for a second, or for four times as many failures. Failures that may be
	// the fault of what was sent, such as a 500, count only when they happen to at least three events.
	Failures int
	// ProbeAfter is how long an open breaker waits before the first probe; the wait doubles with each that fails.
	// 0: 1 s.
	ProbeAfter time.Duration
	// ProbeMax is the longest wait between two probes. 0: 30 s.
	ProbeMax time.Duration
}

// Defaults of the breaker.
const (
	DefaultBreakerFailures = 5
	DefaultProbeAfter      = time.Second
	DefaultProbeMax        = 30 * time.Second
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
	breakerAfter  = time.Second // of nothing but failures
	breakerTimes  = 4           // as many failures as make a suspicion
	breakerEvents = 3           // that must have failed, if what was sent could be at fault
	breakerRecent = 50          // requests looked at for the share that failed
	breakerShare  = 80          // percent of them that open the breaker
	// tryHold is how long a lane is one relay's alone to try, beyond the timeout of a request.
	tryHold = 20 * time.Second
)

// holding reports whether nothing may be sent.
func (b *breaker) holding() bool { return b.state == breakerOpen }

// trying reports whether this relay tries the lane, and how many may be in flight then.
func (b *breaker) trying() (trying bool, allowed int) { return b.state == breakerHalfOpen, b.allowed }

// blame says what a verdict tells of the destination as a whole.
type blame int

const (
	blameNobody      blame = iota // it tells nothing
	blameNone                     // the destination is there
	blameEither                   // the destination, or what was sent
	blameDestination              // certainly the destination
)

func (v *verdict) blame() blame {
	switch v.reason {
	case ReasonOK, ReasonRejected:
		return blameNone
	case ReasonDNS, ReasonConnect, ReasonTLS, ReasonEgress, ReasonUnavailable:
		return blameDestination
	case ReasonServerError:
		if v.statusCode == 502 || v.statusCode == 504 { // a gateway's word for what is behind it
			return blameDestination
		}
		return blameEither
	case ReasonTimeout, ReasonNetwork, ReasonMalformed, ReasonUnauthorized, ReasonNotFound, ReasonRedirect, ReasonUnexpected:
		return blameEither
	}
	return blameNobody
}

// judge takes in what came of a request. It reports whether that is to be held, at no cost, instead of spending the
// delivery's attempt.
func (b *breaker) judge(now time.Time, event int64, v *verdict, most int) (hold bool) {
	blame := v.blame()
	if b.policy.Off || !v.posted || blame == blameNobody {
		return false
	}
	failed := blame != blameNone
	switch b.state {
	case breakerOpen:
		return failed // it was on its way when the breaker opened
	case breakerHalfOpen:
		return b.judgeTrial(now, blame, v, most)
	}
	b.remember(failed)
	if !failed {
		b.streak, b.certain, b.events = 0, 0, nil
		return false
	}
	if b.streak++; b.streak == 1 {
		b.failing = now
	}
	if blame == blameDestination {
		b.certain++
	}
	if b.events == nil {
		b.events = map[int64]bool{}
	}
	if len(b.events) < breakerEvents {
		b.events[event] = true
	}
	several := len(b.events) >= breakerEvents
	suspected := b.certain >= b.policy.Failures || several && b.streak >= b.policy.Failures
	hold = suspected && b.streak > b.policy.Failures // the first are the price
	if suspected && (now.Sub(b.failing) >= breakerAfter || b.streak >= breakerTimes*b.policy.Failures) || several && b.mostlyFailing() {
		b.open(now, v.message)
	}
	return hold
}

func (b *breaker) judgeTrial(now time.Time, blame blame, v *verdict, most int) (hold bool) {
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
	if b.allowed == 1 {
		passed := b.accepted
		b.open(now, v.message)
		b.accepted = passed
		return true
	}
	// The destination has just accepted something else: this one has to bear its own failure, or it would be tried for
	// ever. One alone tells nothing about the destination: some fail at any time.
	if b.streak++; b.streak > 1 || blame == blameDestination {
		b.allowed, b.passed = b.allowed/2, 0
	}
	return false
}

// remember notes a request among the recent ones.
func (b *breaker) remember(failed bool) {
	if len(b.recent) < breakerRecent {
		b.recent = append(b.recent, failed)
		return
	}
	b.recent[b.oldest] = failed
	b.oldest = (b.oldest + 1) % breakerRecent
}

func (b *breaker) mostlyFailing() bool {
	if len(b.recent) < breakerRecent {
		return false
	}
	failed := 0
	for _, f := range b.recent {
		if f {
			failed++
		}
	}
	return failed*100 >= breakerShare*breakerRecent
}

func (b *breaker) enter(now time.Time, state breakerState) {
	*b = breaker{policy: b.policy, state: state, since: now, cause: b.cause}
}

func (b *breaker) open(now time.Time, cause string) {
	b.enter(now, breakerOpen)
	b.write, b.cause = writeOpen, cause
}

func (b *breaker) close(now time.Time) {
	b.enter(now, breakerClosed)
	b.write = writeClosed
}

// opened records that the database knows, and when it lets somebody try.
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

// heard takes in what the database said at the given time.
func (b *breaker) heard(began, now time.Time, s destinationState, instance int32) {
	if b.write != writeNothing || !began.After(b.since) {
		return
	}
	switch {
	case s.breaker == "closed":
		if b.state != breakerClosed {
			b.enter(now, breakerClosed)
		}
	case b.state == breakerHalfOpen && s.breaker == "half_open" && s.owner == instance:
	default: // it waits, or another relay tries
		if b.state != breakerOpen {
			b.enter(now, breakerOpen)
		}
		b.tryAt = now.Add(s.remaining)
	}
}
