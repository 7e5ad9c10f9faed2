package watch

import (
	"fmt"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
)

// A subject is what one alert is about.
type subject struct {
	Rule    string `json:"rule"`
	Subject string `json:"subject"`
}

// A condition holds now and should be alerted.
type condition struct {
	subject
	level   int64 // how bad it is, in the unit of the rule
	detail  string
	event   int64
	failure string        // the error behind it
	age     time.Duration // for how long it has held
}

// findings are what follows from a look.
type findings struct {
	limits    alert.Config
	hold      []condition
	undecided map[subject]bool // neither holding nor ended, since another condition hides them
}

func (f *findings) add(rule, about string, c condition) {
	c.subject = subject{rule, about}
	f.hold = append(f.hold, c)
}

func (f *findings) hide(rules []string, about string) {
	for _, rule := range rules {
		f.undecided[subject{rule, about}] = true
	}
}

func (f *findings) hides(rule, about string) bool { return f.undecided[subject{rule, about}] }

// conditions returns the conditions that hold, and which open alerts are over. archiveDue returns
// by when an archive that ran at a time must have run again; zero: never. Nil: never.
func (s *sample) conditions(limits alert.Config, archiveDue func(time.Time) time.Time) (hold []condition, ended []alertSample) {
	f := &findings{limits: limits, undecided: map[subject]bool{}}
	s.findDestinations(f)
	for i := range s.Lanes {
		s.findLane(f, &s.Lanes[i])
	}
	s.findEvents(f)
	s.findRelays(f)
	s.findDatabase(f, archiveDue)
	return f.hold, s.ended(f.hold, f.undecided)
}

// findDestinations finds those that no relay serves, or that accept nothing, and notes which
// alerts follow from that: one fault, one alert.
func (s *sample) findDestinations(f *findings) {
	for _, u := range s.Unserved {
		f.hide([]string{alert.RuleLag}, u.Destination)
		f.add(alert.RuleUnserved, u.Destination, condition{level: int64(u.Pending), detail: plain.UpTo(u.Pending, countedTo) + " pending"})
	}
	for _, n := range s.Misconfigured {
		f.add(alert.RuleMisconfigured, n.Destination, condition{
			level: n.Attempts, event: n.Event, failure: plain.Clip(n.Error), age: inSeconds(n.Seconds),
			detail: fmt.Sprintf("%s that failed, the first of event %d; last: %s", plain.Plural(n.Attempts, "attempt", "attempts"), n.Event, plain.Clip(n.Error)),
		})
	}
	for _, n := range s.Failing {
		f.hide([]string{alert.RuleLag, alert.RuleWaitingKeys}, n.Destination)
		if slices.ContainsFunc(s.Misconfigured, func(m failingSample) bool { return m.Destination == n.Destination }) {
			continue
		}
		lasted := inSeconds(n.Seconds)
		f.add(alert.RuleFailing, n.Destination, condition{
			level: int64(lasted.Minutes()), event: n.Event, failure: plain.Clip(n.Error), age: lasted,
			detail: fmt.Sprintf("for %s, and %s failed, the first of event %d; last: %s",
				plain.Span(lasted), plain.Plural(n.Attempts, "attempt", "attempts"), n.Event, plain.Clip(n.Error)),
		})
	}
	for _, open := range s.Alerts {
		for _, l := range s.Lanes { // that of the failure has its error and its end
			if open.Rule == alert.RuleFailed && open.Failed && l.Destination == open.Subject && l.BlockedEvent == open.Event && l.Blocked > 0 {
				f.hide([]string{alert.RuleBlockedKeys}, l.Destination)
			}
		}
	}
}

// findLane finds what waits for a destination for too long.
func (s *sample) findLane(f *findings, l *laneSample) {
	if l.Held {
		f.hide([]string{alert.RuleMisconfigured, alert.RuleFailing, alert.RuleLag, alert.RuleWaitingKeys}, l.Destination)
	}
	counted, known := s.Counted[l.Destination]
	if s.Counted == nil {
		counted, known = l.LagSeconds, true
	}
	if unheld := inSeconds(counted); known && unheld > f.limits.LagOver && !f.hides(alert.RuleLag, l.Destination) {
		waited := inSeconds(l.LagSeconds)
		f.add(alert.RuleLag, l.Destination, condition{level: int64(waited.Minutes()), event: l.Event, age: unheld, detail: s.lagDetail(l, waited, unheld, f.limits)})
	}
	if paused := inSeconds(l.PausedSeconds); paused > alert.PausedOver {
		why := ""
		if l.PausedReason != "" {
			why = " (" + plain.Clip(l.PausedReason) + ")"
		}
		f.add(alert.RulePaused, l.Destination, condition{detail: "for " + plain.Span(paused) + why, age: paused})
	}
	if l.Blocked > 0 && !f.hides(alert.RuleBlockedKeys, l.Destination) {
		f.add(alert.RuleBlockedKeys, l.Destination, condition{level: int64(l.Blocked), event: l.BlockedEvent, age: inSeconds(l.BlockedSeconds), detail: l.blocked()})
	}
	if l.Waiting > 0 && !f.hides(alert.RuleWaitingKeys, l.Destination) {
		f.add(alert.RuleWaitingKeys, l.Destination, condition{level: int64(l.Waiting), event: l.WaitingEvent, age: inSeconds(l.WaitingSeconds), detail: l.waiting()})
	}
}

// lagDetail says for how long the oldest due delivery has waited, for how long of that nothing held
// it, and what the relay that looked has learnt of the receiver.
func (s *sample) lagDetail(l *laneSample, waited, unheld time.Duration, limits alert.Config) string {
	text := fmt.Sprintf("the oldest one that is due has waited for %s (event %d)", plain.Span(waited), l.Event)
	if waited-unheld >= time.Second {
		text += fmt.Sprintf(", for %s of it though nothing held it", plain.Span(unheld))
	}
	text += ", longer than " + plain.Span(limits.LagOver)
	if learnt, limited := s.Terms.Learnt[l.Destination]; limited {
		text += "; " + learnt.String()
	}
	return text
}

// blocked says how many ordering keys wait behind a delivery that failed, and names the first.
func (l *laneSample) blocked() string {
	keys := plain.Plural(l.Blocked, "key waits", "keys wait")
	if l.Blocked > countedTo {
		keys = plain.UpTo(l.Blocked, countedTo) + " keys wait"
	}
	return fmt.Sprintf("%s behind a delivery that failed, the oldest for %s: key %q behind event %d",
		keys, plain.Span(inSeconds(l.BlockedSeconds)), plain.Clip(l.BlockedKey), l.BlockedEvent)
}

// waiting says how many ordering keys wait behind a delivery that is not due, and names the first.
func (l *laneSample) waiting() string {
	until := ""
	if l.WaitingUntil != "" {
		until = ", until " + plain.Clip(l.WaitingUntil) + " UTC"
	}
	return fmt.Sprintf("%s behind a delivery that was not due, the oldest for %s: key %q behind event %d%s", plain.Plural(l.Waiting, "key waits", "keys wait"),
		plain.Span(inSeconds(l.WaitingSeconds)), plain.Clip(l.WaitingKey), l.WaitingEvent, until)
}

// findEvents finds events that no relay sends.
func (s *sample) findEvents(f *findings) {
	if p := s.Parked; p != nil && p.Count > 0 {
		of := ""
		if p.Type != "" {
			of = fmt.Sprintf(" of type %q", p.Type)
		}
		age := inSeconds(p.Seconds)
		f.add(alert.RuleParked, s.Database, condition{
			level: int64(p.Count), event: p.Event, age: age,
			detail: fmt.Sprintf("%s parked, the oldest for %s: event %d%s; add a route for it", plain.UpTo(p.Count, countedTo), plain.Span(age), p.Event, of),
		})
	}
	if u := s.Undelivered; u != nil {
		f.add(alert.RuleUndelivered, s.Database, condition{level: int64(u.Count), detail: u.String(), event: u.Event})
	}
}

// findRelays finds relays that die, that refuse their configuration, that differ, and that a
// destination refuses.
func (s *sample) findRelays(f *findings) {
	if dead := s.Rescues.Relays; dead >= rescueStorm {
		f.add(alert.RuleRescueStorm, s.Database, condition{
			level: int64(dead), detail: fmt.Sprintf("%d of them were found dead within %s", dead, plain.Span(stormWithin)),
		})
	} else if dead > 0 {
		f.hide([]string{alert.RuleRescueStorm}, s.Database)
	}
	for _, r := range s.Refused {
		f.add(alert.RuleReloadRefused, r.Relay, condition{failure: plain.Clip(r.Error), age: inSeconds(r.Seconds)})
	}
	for _, d := range s.Differ {
		f.add(alert.RuleRelaysDiffer, d.Destination, condition{level: int64(len(d.Relays)), detail: d.String()})
	}
	for _, r := range s.Refusals {
		f.add(alert.RuleRelayRefused, r.Destination, condition{level: int64(len(r.Relays)), detail: r.Only(), failure: plain.Clip(r.Error), age: inSeconds(r.Seconds)})
	}
}

// findDatabase finds what keeps the database from cleaning up, and an archive that has not run.
func (s *sample) findDatabase(f *findings, archiveDue func(time.Time) time.Time) {
	over := f.limits.VacuumBlockedOver
	if blockers := s.vacuumBlockers(); len(blockers) > 0 && blockers[0].For > over {
		detail := blockers[0].String()
		if more := len(slices.DeleteFunc(blockers[1:], func(h VacuumBlocker) bool { return h.For <= over })); more > 0 {
			detail += "; " + plain.Plural(more, "more holds", "more hold") + " it back, too"
		}
		f.add(alert.RuleVacuumBlocked, s.Database, condition{level: int64(blockers[0].For.Minutes()), detail: detail, age: blockers[0].For})
	}
	if a := s.Archive; a != nil && archiveDue != nil {
		if due := archiveDue(a.At); !due.IsZero() && s.at.After(due) {
			f.add(alert.RuleArchive, s.Database, condition{
				failure: plain.Clip(a.Error), age: s.at.Sub(due), detail: "last on " + a.At.UTC().Format("2006-01-02 15:04 UTC"),
			})
		}
	}
}

// ended returns the open alerts whose conditions hold no more. Nothing is decided about those in
// undecided.
func (s *sample) ended(hold []condition, undecided map[subject]bool) (ended []alertSample) {
	for _, open := range s.Alerts {
		holds := slices.ContainsFunc(hold, func(c condition) bool { return c.subject == open.subject })
		switch open.Rule {
		case alert.RuleLag, alert.RuleBlockedKeys, alert.RuleWaitingKeys, alert.RuleParked, alert.RuleUndelivered, alert.RuleRescueStorm, alert.RuleVacuumBlocked, alert.RulePaused, alert.RuleUnserved, alert.RuleMisconfigured, alert.RuleFailing,
			alert.RuleReloadRefused, alert.RuleRelaysDiffer, alert.RuleRelayRefused, alert.RuleArchive, alert.RuleDatabase:
			if !holds && !undecided[open.subject] {
				ended = append(ended, open)
			}
		case alert.RuleFailed:
			if !open.Failed {
				ended = append(ended, open)
			}
		case alert.RuleBreakerOpen, alert.RuleRoutesChanged, alert.RuleReconcile: // a breaker's probes end the alert, unless the destination was removed meanwhile
			if open.Left {
				ended = append(ended, open)
			}
		}
	}
	return ended
}
