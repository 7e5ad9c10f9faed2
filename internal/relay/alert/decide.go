package alert

import "time"

const (
	// calm is how long a condition must have ended before its alert is forgotten. One that returns
	// sooner is counted as a return, and a condition that flaps recovers only then.
	calm = 5 * time.Minute
	// flapsAfter is how many returns make an alert one that flaps.
	flapsAfter = 3
	// worseAfter is the part of Policy.Repeat after which an alert that is twice as bad is
	// repeated.
	worseAfter = 4
	// checkWorse is how often an alert that lasts is compared with what was sent.
	checkWorse = time.Minute
)

// A Policy says when alerts are sent.
type Policy struct {
	After       time.Duration            // how long a condition must last first
	AfterByRule map[string]time.Duration // instead of After, and of what the rule has by default
	Repeat      time.Duration            // how long after it was sent an alert that lasts is sent again
}

// wait returns how long a condition of the rule must last before it is sent.
func (p Policy) wait(rule string) time.Duration {
	if wait, given := p.AfterByRule[rule]; given {
		return wait
	}
	if after := ruleNamed(rule).after; after != usual {
		return after
	}
	return p.After
}

// A State is what is stored of one alert, and of what one channel was sent of it. A zero time has
// not happened.
type State struct {
	Rule         string
	OpenedAt     time.Time // when the condition began, or returned last
	ResolvedAt   time.Time // when it ended; zero while it lasts
	Returned     int       // how often it returned within calm of its end
	Level        int64     // how bad it is, in the unit of the rule
	Acknowledged bool
	SilentUntil  time.Time
	SentAt       time.Time // when the channel was last sent that the condition lasts; zero again once its recovery was sent
	SentLevel    int64     // Level at that time
	Tried        bool      // the channel may have got a message that was not recorded as sent
	BusyUntil    time.Time // until when another relay sends, or when a channel that failed is tried again
}

// flaps reports whether the condition returns so often that single returns are no news.
func (s State) flaps() bool { return s.Returned >= flapsAfter }

// A Step is what is to be done with an alert for one channel.
type Step struct {
	Send bool      // send it now, as it is: that it lasts, or that it has ended
	Next time.Time // otherwise, when to decide again unless the alert changes before; zero: not before it changes
	Over bool      // nothing is left to be sent
}

// Decide returns what is to be done at a time. It is the only place that decides when an alert is
// sent.
func (p Policy) Decide(now time.Time, s State) Step {
	var due time.Time
	if s.ResolvedAt.IsZero() {
		if due = p.sendAt(now, s); due.IsZero() {
			return Step{}
		}
	} else {
		forgottenAt := s.ResolvedAt.Add(calm)
		if s.SentAt.IsZero() && !s.Tried {
			return Step{Next: forgottenAt, Over: !now.Before(forgottenAt)}
		}
		if due = s.ResolvedAt; s.flaps() {
			due = forgottenAt
		}
	}
	if due = latest(due, s.BusyUntil); now.Before(due) {
		return Step{Next: due}
	}
	return Step{Send: true}
}

// sendAt returns when a condition that lasts is sent to the channel; zero: not before it changes.
func (p Policy) sendAt(now time.Time, s State) time.Time {
	switch {
	case s.Acknowledged:
		return time.Time{}
	case s.SentAt.IsZero() && s.flaps():
		return latest(s.OpenedAt, s.SilentUntil)
	case s.SentAt.IsZero():
		return latest(s.OpenedAt.Add(p.wait(s.Rule)), s.SilentUntil)
	case p.Repeat <= 0:
		return time.Time{}
	}
	repeat, worse := s.SentAt.Add(p.Repeat), s.SentAt.Add(p.Repeat/worseAfter)
	switch {
	case s.Level >= 2*max(s.SentLevel, 1), now.Before(worse):
		repeat = worse
	default:
		repeat = earliest(repeat, latest(now.Add(checkWorse), worse))
	}
	return latest(repeat, s.SilentUntil)
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func earliest(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}
