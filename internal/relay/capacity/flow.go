package capacity

import (
	"math"
	"time"

	"golang.org/x/time/rate"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// A Flow finds how much its receiver can bear, within what the configuration allows: how many
// requests at once, by additive increase and multiplicative decrease (as in TCP's congestion
// avoidance, RFC 5681 §3.1) on 503s, timeouts and rising latency; and how many a second, once the
// receiver has said 429 to more than some. A receiver that refuses everything, and says when to
// come back, gets nothing until then. Its methods take the time and are not safe for concurrent
// use.
type Flow struct {
	most       int           // requests at once, as configured
	configured float64       // requests a second; 0: any number
	takes      time.Duration // an answer, as a moving average

	AtOnce    float64       // requests at once, as found
	slowed    time.Time     // when that was last cut
	answers   int           // of the current round, which is at least as many as there may be at once
	latency   time.Duration // their sum
	round     time.Time     // when it began
	perSecond float64       // answers in the round before it; 0: they came easily
	down      bool          // fewer at once are being tried

	found    float64 // requests a second, as found; 0: no receiver's 429 has asked for it
	ceiling  float64 // what the receiver accepted in a second when the rate was last cut; 0: not known
	cut      time.Time
	grown    time.Time
	waited   time.Time // when a request last had to wait for its turn
	refusals refusals

	Reopens time.Time // not before, as the receiver has asked
	ramp    int       // requests at once since then; 0: as many as may be
	Ramped  time.Time // when that was last doubled

	bucket *rate.Limiter // of the lower of the two rates; nil: none
}

const (
	cutPause    = time.Second            // between two cuts of the rate: what was on its way is answered meanwhile
	forgetRate  = time.Minute            // without a 429 and without waiting, after which the found rate is dropped
	fewAnswers  = 8                      // a second: too few to know a rate by
	growEvery   = 100 * time.Millisecond // at most
	easyLatency = 100 * time.Millisecond // below which answers are not called slow
	slowRound   = 250 * time.Millisecond // the shortest round of slow answers
	// maxClosed bounds for how long one answer closes a lane. It may be about its own event alone,
	// or a mistake.
	maxClosed = time.Minute
	rampEvery = 200 * time.Millisecond // between two doublings after the lane has reopened
)

// New returns the flow to a receiver that may get at most so many requests at once, and so many a
// second; 0: any number.
func New(most int, configured float64) Flow {
	f := Flow{most: most, configured: configured, AtOnce: float64(most)}
	f.setBucket(time.Time{})
	return f
}

// Concurrency is how many requests there may be at once.
func (f *Flow) Concurrency() int {
	limit := min(f.most, max(1, int(f.AtOnce)))
	if f.ramp > 0 {
		limit = min(limit, f.ramp)
	}
	if perSecond := f.Paced(); perSecond > 0 {
		// More would only wait for their turn, and hold leases meanwhile. Some more than are
		// answered in the time that an answer takes, or it would seem that more at once do not
		// bring more.
		limit = min(limit, max(1, int(math.Ceil(perSecond*max(time.Second, f.takes*3/2).Seconds()))))
	}
	return limit
}

// Paced is how many requests there may be in a second; 0: any number.
func (f *Flow) Paced() float64 {
	switch {
	case f.found == 0:
		return f.configured
	case f.configured == 0:
		return f.found
	}
	return min(f.found, f.configured)
}

// A Slowdown is what a receiver has asked for.
type Slowdown struct {
	Until     time.Time // nothing is sent before; zero: it does not ask to wait
	PerSecond float64   // requests, as its 429s taught; 0: they do not limit the rate
}

// Slowdown returns what the receiver asks for at the given time.
func (f *Flow) Slowdown(now time.Time) (s Slowdown) {
	if now.Before(f.Reopens) {
		s.Until = f.Reopens
	}
	if f.found > 0 && f.found == f.Paced() {
		s.PerSecond = f.found
	}
	return s
}

// UntilTurn returns how long Wait would return, and takes nothing of the rate.
func (f *Flow) UntilTurn(now time.Time) time.Duration {
	closed := max(0, f.Reopens.Sub(now))
	if f.bucket == nil {
		return closed
	}
	missing := 1 - f.bucket.TokensAt(now)
	return max(closed, time.Duration(missing/float64(f.bucket.Limit())*float64(time.Second)))
}

// Wait returns how long the next request has to wait for its turn; 0: it is its turn, which it has
// taken.
func (f *Flow) Wait(now time.Time) time.Duration {
	if closed := f.Reopens.Sub(now); closed > 0 || f.bucket == nil {
		return max(0, closed)
	}
	turn := f.bucket.ReserveN(now, 1)
	wait := turn.DelayFrom(now)
	if wait > 0 {
		turn.CancelAt(now)
		f.waited = now
	}
	return wait
}

// Answered takes in what came of a request. retryAfter is when the receiver asked to come back; 0:
// it did not.
func (f *Flow) Answered(now time.Time, reason policy.Reason, took, retryAfter time.Duration) {
	f.takes += (took - f.takes) / 8
	f.refusals.record(now, reason, took, f.found != 0)
	stopped := f.refusals.stopped(now)
	if retryAfter > 0 && stopped {
		defer f.Close(now, min(retryAfter, maxClosed))
	}
	switch reason {
	case policy.ReasonRateLimited:
		switch {
		case retryAfter > 0 && f.ramp == 1 && !now.Before(f.Reopens):
			// Refused after a rest, and alone: a rate is not what it is about.
			f.setRate(now, 0)
		case !stopped || retryAfter <= time.Second: // asked for more, what was accepted in the last second says nothing
			f.adaptRate(now)
		}
	case policy.ReasonUnavailable, policy.ReasonTimeout:
		f.slowDown(now, max(took, growEvery), 0.7)
	case policy.ReasonOK:
		f.adaptRate(now)
		f.growRate(now)
		if f.ramp == 0 {
			f.growConcurrency(now, took)
		} else if now.Sub(f.Ramped) >= rampEvery {
			if f.ramp, f.Ramped = 2*f.ramp, now; f.ramp >= f.most {
				f.ramp = 0
			}
		}
	}
}

// Close sends nothing for the given time, and one request at once then.
func (f *Flow) Close(now time.Time, wait time.Duration) {
	if at := now.Add(wait); at.After(f.Reopens) {
		f.Reopens = at
	}
	f.ramp, f.Ramped = 1, f.Reopens
}

// Open ends such a wait early.
func (f *Flow) Open(now time.Time) {
	if now.Before(f.Reopens) {
		f.Reopens, f.Ramped = now, now
	}
}

// adaptRate cuts the rate when the receiver refuses more than is tolerated. Where a cut made no
// difference, the rate returns, and such a share is tolerated.
func (f *Flow) adaptRate(now time.Time) {
	r, paced := &f.refusals, f.found != 0
	if r.before > 0 {
		ended, same := r.assess(now)
		if !ended {
			return
		}
		if same {
			f.ceiling, f.grown = 0, now
			r.begin(now)
		}
	}
	switch {
	case r.overLimit(now, paced):
		if now.Sub(f.cut) >= cutPause { // the effect of the last cut is known
			f.cutRate(now)
		}
	case r.complete(now, paced):
		r.begin(now)
	}
}

// cutRate cuts the rate to below what the receiver accepts, and begins a trial of that.
func (f *Flow) cutRate(now time.Time) {
	r := &f.refusals
	sent, accepted := f.found, r.perSecond(now, r.accepted)
	f.ceiling = min(sent, max(0.85*sent, accepted))
	if f.found == 0 {
		if sent = r.perSecond(now, r.answers()); sent < fewAnswers && r.share() <= maxBackground {
			f.slowDown(now, cutPause, 0.7)
			return
		}
		f.ceiling = max(1, accepted)
	}
	next := max(0.85*f.ceiling, 0.1)
	if f.found == 0 || accepted == 0 {
		f.ceiling = 0
	}
	f.cut, f.grown, f.waited = now, now, now
	f.setRate(now, next)
	r.try(now, next/sent)
}

// setRate changes the rate that was found; 0: none.
func (f *Flow) setRate(now time.Time, found float64) {
	if f.found = found; found == 0 {
		f.refusals.begin(now)
		f.refusals.background = 0
	}
	f.setBucket(now)
}

// growRate adds 2 % a second, more above the last ceiling, and doubles the rate in a second where
// none is known. One answer adds little: at a low rate it takes many to see a refusal.
func (f *Flow) growRate(now time.Time) {
	elapsed := now.Sub(f.grown).Seconds()
	if f.found == 0 || elapsed < growEvery.Seconds() {
		return
	}
	// A rate of less than one a second is waited for less often than once a second.
	if between := time.Duration(3 / f.Paced() * float64(time.Second)); now.Sub(f.waited) > max(time.Second, between) { // not what holds the lane back
		if now.Sub(f.waited) > forgetRate && now.Sub(f.cut) > forgetRate {
			f.setRate(now, 0)
		}
		return
	}
	f.grown = now
	if f.refusals.before > 0 || f.refusals.atLimit(true) {
		return
	}
	doublings := min(elapsed, 0.5)
	if f.ceiling > 0 {
		doublings = min(1, 0.03*max(1, math.Pow(f.found/f.ceiling, 4))) * min(elapsed, 0.25)
	}
	f.found *= math.Pow(2, doublings)
	f.setBucket(now)
}

// slowDown cuts the concurrency, at most once in what an answer takes.
func (f *Flow) slowDown(now time.Time, pause time.Duration, to float64) {
	if now.Sub(f.slowed) < pause {
		return
	}
	f.slowed = now
	f.AtOnce = max(1, f.AtOnce*to)
	f.answers, f.latency = 0, 0
}

// growConcurrency adds a tenth, and at least one, per round of answers. While answers take long it
// climbs to where most of them come instead, since more at once may only wait for each other: it
// goes down as long as that costs no throughput.
func (f *Flow) growConcurrency(now time.Time, took time.Duration) {
	if f.answers == 0 {
		f.round = now
	}
	f.answers++
	f.latency += took
	limit := f.Concurrency()
	average := f.latency / time.Duration(f.answers)
	slow := average > easyLatency
	if f.answers < limit || slow && now.Sub(f.round) < slowRound {
		return
	}
	perSecond := float64(f.answers) / max(now.Sub(f.round), time.Millisecond).Seconds()
	f.answers, f.latency = 0, 0
	if !slow || perSecond*average.Seconds() < 0.8*float64(limit) { // by Little's law there is less to send than could be
		f.perSecond, f.down = 0, false
		f.AtOnce = min(float64(f.most), f.AtOnce+max(1, f.AtOnce/10))
		return
	}
	switch {
	case limit == 1: // there is no less, and what more at once brings is not known
		f.down = false
	case f.perSecond == 0, perSecond >= 0.95*f.perSecond && perSecond <= 1.05*f.perSecond:
		f.down = true
	case perSecond < f.perSecond:
		f.down = !f.down
	}
	f.perSecond = perSecond
	if f.down {
		f.AtOnce = max(1, 0.9*f.AtOnce)
	} else {
		f.AtOnce = min(float64(f.most), max(f.AtOnce+1, 1.1*f.AtOnce))
	}
}

// setBucket makes the bucket follow the rate. What it lets through at once is a fiftieth of a
// second's share.
func (f *Flow) setBucket(now time.Time) {
	perSecond := f.Paced()
	if perSecond == 0 {
		f.bucket = nil
		return
	}
	burst := max(1, int(perSecond/50))
	if f.bucket == nil {
		f.bucket = rate.NewLimiter(rate.Limit(perSecond), burst)
		return
	}
	f.bucket.SetLimitAt(now, rate.Limit(perSecond))
	f.bucket.SetBurstAt(now, burst)
}

// Configure changes what the configuration allows.
func (f *Flow) Configure(now time.Time, most int, configured float64) {
	if f.AtOnce >= float64(f.most) {
		f.AtOnce = float64(most)
	}
	f.most, f.configured = most, configured
	f.AtOnce = min(f.AtOnce, float64(most))
	f.setBucket(now)
}

// Throughput is a moving average of deliveries per second.
type Throughput struct {
	PerSecond float64
	Since     time.Time
	count     int
}

// rateWindow is the shortest time over which a rate is measured.
const rateWindow = 50 * time.Millisecond

// Measure adds n deliveries and returns the rate; false until it is known. A pause in which nothing
// was asked for does not lower it: it says nothing about the receiver.
func (r *Throughput) Measure(now time.Time, n int) (perSecond float64, known bool) {
	r.count += n
	elapsed := now.Sub(r.Since)
	switch {
	case r.Since.IsZero() || elapsed > time.Second && r.count == 0:
		r.Since, r.count = now, 0
	case elapsed >= rateWindow:
		current := float64(r.count) / elapsed.Seconds()
		if r.PerSecond == 0 {
			r.PerSecond = current
		} else {
			r.PerSecond += (current - r.PerSecond) / 4
		}
		r.Since, r.count = now, 0
	}
	return r.PerSecond, r.PerSecond > 0
}
