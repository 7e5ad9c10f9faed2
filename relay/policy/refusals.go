package policy

import (
	"math"
	"time"
)

// refusals counts the answers by which a receiver refuses some requests, or all of them, for now. A stop closes the lane; a
// share lowers its rate. See docs/decisions/0068-a-share-of-refusals.md.
type refusals struct {
	accepted, limited counter   // 2xx and 429 within the last second
	since             time.Time // when answers began to come, after a pause
	latest            time.Time // when the latest came
	recent            float64   // share of 429s, as a moving average

	served   bool      // something was accepted since the flow began
	row      int       // 429 and 503 since something was accepted
	rowSince time.Time // when the first of them came

	// background is the share of 429s that a lower rate did not change: they count something other than the rate. 0: not known.
	background float64
	learnt     time.Time // when that was found
	cut        cutTrial
}

// A cutTrial compares the share of 429s before a cut of the rate with that after it. Only requests sent after the cut count.
type cutTrial struct {
	since     time.Time // zero: there is no trial
	rate      float64   // before the cut; 0: none
	share     float64   // of 429s before the cut
	needed    int       // answers
	refused   int
	responses int
}

const (
	stopAnswers    = 16 // refused in a row: a stop
	slowStop       = 4  // so many are a stop, too, if they took as long as stopTime
	stopTime       = time.Second
	toleratedShare = 0.1 // of 429s, which alone do not make the flow look for a rate
	fewAnswers     = 8   // within a second: too few to know a rate by
	maxBackground  = 0.5 // a greater share always lowers the rate
	trialTime      = 8 * time.Second
)

// record counts an answer.
func (r *refusals) record(now time.Time, reason Reason) {
	if now.Sub(r.latest) >= time.Second {
		r.since = now
	}
	r.latest = now
	switch reason {
	case ReasonOK:
		r.accepted.add(now)
		r.recent -= r.recent / 32
		r.served, r.row = true, 0
	case ReasonRateLimited, ReasonUnavailable:
		if r.row == 0 {
			r.rowSince = now
		}
		r.row++
		if reason == ReasonRateLimited {
			r.limited.add(now)
			r.recent += (1 - r.recent) / 32
		}
	}
}

// stopped reports whether the receiver refuses everything: a single refusal among answers is about its own event.
func (r *refusals) stopped(now time.Time) bool {
	return r.row > 0 && !r.served || r.row >= stopAnswers || r.row >= slowStop && now.Sub(r.rowSince) >= stopTime
}

// share returns the share of 429s within the last second, and of how many answers.
func (r *refusals) share(now time.Time) (share, responses float64) {
	refused := r.limited.perSecond(now)
	responses = refused + r.accepted.perSecond(now)
	return refused / max(1, responses), responses
}

// exceed reports whether more 429s came within the last second than are tolerated and than chance explains. A flow that has
// found a rate tolerates none, unless a lower rate was found not to help.
func (r *refusals) exceed(now time.Time, paced bool) bool {
	if now.Sub(r.learnt) > forgetRate {
		r.background = 0
	}
	if paced && r.background == 0 {
		return true
	}
	share, responses := r.share(now)
	if !paced && share <= maxBackground && now.Sub(r.since) < time.Second { // what was accepted since then is no rate yet
		return false
	}
	expected := max(toleratedShare, 1.5*r.background) * responses
	return share*responses > expected+2*math.Sqrt(expected)
}

// try begins a trial of a cut from the given rate; 0: there was none.
func (r *refusals) try(now time.Time, rate float64) {
	r.cut = cutTrial{}
	if r.recent > 0 && r.recent <= maxBackground {
		r.cut = cutTrial{since: now, rate: rate, share: r.recent, needed: int(max(10, 8/r.recent))}
	}
}

// assess counts an answer of a trial. undo: the trial has ended, and the cut made no difference.
func (r *refusals) assess(now time.Time, took time.Duration, wasRefused bool) (undo bool) {
	c := &r.cut
	if c.since.IsZero() || now.Add(-took).Before(c.since) {
		return false
	}
	c.responses++
	if wasRefused {
		c.refused++
	}
	before := c.share * float64(c.responses) // so many would have been refused before the cut
	refused := float64(c.refused)
	switch {
	case c.refused == 0 && before >= 3, refused > 1.6*c.share*float64(c.needed)+1: // the answer is clear
	case c.responses < c.needed && now.Sub(c.since) < trialTime:
		return false
	}
	c.since, r.background = time.Time{}, 0
	after := refused / float64(c.responses)
	if undo = c.refused >= 4 && refused >= 0.6*before && refused <= 1.6*before+1 && after <= maxBackground; undo {
		r.background, r.learnt = after, now
	}
	return undo
}

// trying reports whether a trial of a cut has not ended.
func (r *refusals) trying(now time.Time) bool {
	return !r.cut.since.IsZero() && now.Sub(r.cut.since) < trialTime
}
