package capacity

import (
	"math"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// refusals counts the answers by which a receiver refuses some requests, or all of them, for now. A
// stop closes the lane; a share lowers its rate. See docs/decisions/0068-a-share-of-refusals.md.
//
// It counts in rounds. A round has at least roundAnswers answers, however long they take: fewer say
// little about a share.
type refusals struct {
	began    time.Time // the round. It does not count answers to what was sent before
	latest   time.Time // answer
	accepted int       // 2xx in the round
	limited  int       // 429s in the round

	served   bool      // something was accepted since the flow began
	row      int       // 429 and 503 since something was accepted
	rowSince time.Time // when the first of them came

	// background is the share of 429s that does not depend on the rate, as the latest trial found
	// it.
	background float64
	// before is the share of 429s before the rate was cut, while the round after the cut is a trial
	// of it. 0: it is none.
	before float64
	// explained is the share in the trial if the receiver accepts as many a second as before the
	// cut.
	explained float64
}

const (
	stopAnswers  = 16 // refused in a row: a stop
	slowStop     = 4  // so many are a stop, too, if they took as long as stopTime
	stopTime     = time.Second
	roundAnswers = 40 // in a round, at least
	roundTime    = time.Second
	trialRefused = 6 // 429s in a trial, if the cut made no difference

	unpacedShare  = 0.1  // of 429s, which alone do not make the flow look for a rate
	pacedShare    = 0.03 // of 429s, which do not keep a rate from growing
	maxBackground = 0.45 // a greater share lowers the rate: a receiver that allows no burst refuses half just above its limit
	doubtfulShare = 0.6  // up to this, a trial of few answers does not show a share above maxBackground
)

// record counts an answer. paced: the flow has found a rate.
func (r *refusals) record(now time.Time, reason policy.Reason, took time.Duration, paced bool) {
	switch pause := now.Sub(r.latest); {
	case r.began.IsZero(), !paced && pause >= roundTime: // a pause would lower what is accepted in a second
		r.begin(now.Add(-took))
	case pause < 0: // the clock was put back
		r.begin(now)
	}
	r.latest = now
	counts := !now.Add(-took).Before(r.began)
	switch reason {
	case policy.ReasonOK:
		if r.row >= slowStop && now.Sub(r.rowSince) >= stopTime { // the end of a stop, which says nothing about a share
			r.begin(now)
		}
		r.served, r.row = true, 0
		if counts {
			r.accepted++
		}
	case policy.ReasonRateLimited, policy.ReasonUnavailable:
		if r.row == 0 {
			r.rowSince = now
		}
		r.row++
		if reason == policy.ReasonRateLimited && counts {
			r.limited++
		}
	}
}

// begin begins a round.
func (r *refusals) begin(now time.Time) {
	r.began, r.accepted, r.limited, r.before = now, 0, 0, 0
}

// stopped reports whether the receiver refuses everything: a single refusal among answers is about
// its own event.
func (r *refusals) stopped(now time.Time) bool {
	return r.row > 0 && !r.served || r.row >= stopAnswers || r.row >= slowStop && now.Sub(r.rowSince) >= stopTime
}

func (r *refusals) answers() int { return r.accepted + r.limited }

// share returns the share of 429s in the round.
func (r *refusals) share() float64 { return float64(r.limited) / max(1, float64(r.answers())) }

// perSecond returns how many of n answers of the round came in a second.
func (r *refusals) perSecond(now time.Time, n int) float64 {
	return float64(n) / max(time.Second, now.Sub(r.began)).Seconds()
}

// tolerated returns how many 429s the round may have: the background, and some of what would be
// accepted without it.
func (r *refusals) tolerated(paced bool) float64 {
	share := 1 - (1-r.background)*(1-pacedShare-r.background/4)
	if !paced {
		share = max(share, unpacedShare)
	}
	return share * float64(max(r.answers(), roundAnswers))
}

// atLimit reports whether the round has more 429s than are tolerated: the rate does not grow.
func (r *refusals) atLimit(paced bool) bool { return float64(r.limited) > r.tolerated(paced) }

// overLimit reports whether the round has more 429s than are tolerated and than chance explains:
// the rate must be cut.
func (r *refusals) overLimit(now time.Time, paced bool) bool {
	if !paced && now.Sub(r.began) < roundTime && (r.limited < stopAnswers || r.share() <= maxBackground) {
		return false // what was accepted since then is no rate yet, or it may be a stop
	}
	tolerated := r.tolerated(paced)
	return float64(r.limited) > tolerated+2*math.Sqrt(tolerated)
}

// complete reports whether the next round may begin. At the limit a round continues until chance
// explains its 429s no longer.
func (r *refusals) complete(now time.Time, paced bool) bool {
	return r.answers() >= roundAnswers && now.Sub(r.began) >= roundTime && !r.atLimit(paced)
}

// try begins a trial of a cut of the rate to the given part.
func (r *refusals) try(now time.Time, part float64) {
	share := r.share()
	r.begin(now)
	if share > maxBackground {
		r.background = 0
		return
	}
	r.before, r.explained = share, max(0, 1-(1-share)/part)
}

// assess ends a trial that has seen enough, and finds the background. same: the cut made no
// difference.
func (r *refusals) assess(now time.Time) (ended, same bool) {
	share, expected := r.share(), r.before*float64(r.answers())
	rose := float64(r.limited) > 2*max(expected, trialRefused)+1
	fell := r.limited == 0 && expected >= trialRefused/2
	few := expected < trialRefused || share > maxBackground && share <= doubtfulShare && r.answers() < roundAnswers
	if !rose && !fell && (few || now.Sub(r.began) < roundTime) {
		return false, false
	}
	if !rose && share <= maxBackground {
		if same = share >= (r.before+r.explained)/2; same || share < r.background {
			r.background = share
		}
	}
	r.before = 0
	return true, same
}
