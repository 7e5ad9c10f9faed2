package watch

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
)

// sample is a look as the database stores it.
type sample struct {
	own     bool // this relay looked
	at, now time.Time

	Database string        `json:"database"`
	Lanes    []laneSample  `json:"lanes"`
	Untaken  untakenSample `json:"untaken"`
	Parked   *parkedSample `json:"parked"`

	Undelivered *UndeliveredSample `json:"undelivered"`

	Misconfigured []failingSample `json:"misconfigured"`
	Failing       []failingSample `json:"failing"`

	Holders []struct {
		Kind         string  `json:"kind"`
		PID          int     `json:"pid"`
		Application  string  `json:"application"`
		User         string  `json:"user"`
		State        string  `json:"state"`
		Name         string  `json:"name"`
		Seconds      float64 `json:"seconds"`
		StateSeconds float64 `json:"state_seconds"`
	} `json:"holders"`
	Tracked []struct {
		Kind         string    `json:"kind"`
		Name         string    `json:"name"`
		Transactions int64     `json:"transactions"`
		Active       bool      `json:"active"`
		Since        time.Time `json:"since"`
	} `json:"tracked"`
	Hidden    int              `json:"hidden"`
	Dead      map[string]int64 `json:"dead"`
	LockWaits int              `json:"lock_waits"`
	Rescues   struct {
		Relays int `json:"relays"`
	} `json:"rescues"`
	Alerts []alertSample `json:"alerts"`
	// Refused are relays that could not read their configuration again.
	Refused []refusedSample `json:"refused"`
	Differ  []Difference    `json:"differ"`
	// Refusals are of relays that a destination refuses alone.
	Refusals []Refusal      `json:"refusals"`
	Archive  *archiveSample `json:"archive"`
	// Unserved are destinations with pending deliveries that no registered relay serves.
	Unserved []unservedSample `json:"unserved"`
}

// alertSample is an alert that is open.
type alertSample struct {
	subject
	Failed bool  `json:"failed"` // failed deliveries are left
	Event  int64 `json:"event"`  // the first that it names
	Left   bool  `json:"left"`   // nothing leads to the destination any more, or waits for it; relays agree about routes
}

type laneSample struct {
	Destination    string  `json:"destination"`
	Held           bool    `json:"held"`
	PausedSeconds  float64 `json:"paused"` // 0: it is not paused
	PausedReason   string  `json:"paused_reason"`
	Seconds        float64 `json:"seconds"`
	Event          int64   `json:"event"`
	Blocked        int     `json:"blocked"`
	BlockedSeconds float64 `json:"blocked_seconds"`
	BlockedKey     string  `json:"blocked_key"`
	BlockedEvent   int64   `json:"blocked_event"`
	Waiting        int     `json:"waiting"`
	WaitingSeconds float64 `json:"waiting_seconds"`
	WaitingKey     string  `json:"waiting_key"`
	WaitingEvent   int64   `json:"waiting_event"`
	WaitingUntil   string  `json:"waiting_until"` // in UTC, as text: a year beyond 9999 is no JSON time; empty: it is due by now
}

// A failingSample is a destination at which attempts fail, the first of event Event.
type failingSample struct {
	Destination string  `json:"destination"`
	Attempts    int64   `json:"attempts"`
	Event       int64   `json:"event"`
	Error       string  `json:"error"`   // of the latest
	Seconds     float64 `json:"seconds"` // since the first attempt of that event or, of Failing, since something was accepted, if that was later
}

// An UndeliveredSample counts the events without deliveries that are remembered.
type UndeliveredSample struct {
	Count int   `json:"count"`
	Event int64 `json:"event"`
}

// An untakenSample counts the events that no relay has taken.
type untakenSample struct {
	Count   int     `json:"count"`
	Seconds float64 `json:"seconds"`
}

type parkedSample struct {
	Count   int     `json:"count"`
	Seconds float64 `json:"seconds"`
	Event   int64   `json:"event"`
	Type    string  `json:"type"`
}

type refusedSample struct {
	Relay   string  `json:"relay"`
	Error   string  `json:"error"`
	Seconds float64 `json:"seconds"`
}

type archiveSample struct {
	At    time.Time `json:"at"` // when it last ran to its end
	Error string    `json:"error"`
}

// A Difference names the relays that have different settings of a destination.
type Difference struct {
	Destination string `json:"destination"`
	// Secrets: nothing but the secrets differs.
	Secrets bool `json:"secrets"`
	// Relays, those that agree together.
	Relays [][]string `json:"relays"`
}

// String names what differs and which relays disagree; the fewest first, as they are the ones to
// look at.
func (d Difference) String() string {
	groups := slices.SortedStableFunc(slices.Values(d.Relays), func(a, b []string) int { return cmp.Compare(len(a), len(b)) })
	var names []string
	for _, group := range groups {
		if len(group) > 3 {
			group = append(slices.Clone(group[:3]), fmt.Sprintf("%d more", len(group)-3))
		}
		names = append(names, plain.Clip(strings.Join(group, " and ")))
	}
	what := "settings"
	if d.Secrets {
		what = "secrets"
	}
	return "other " + what + " at " + strings.Join(names, " than at ")
}

// A Refusal names the relays that a destination refuses while another relay may be accepted.
type Refusal struct {
	Destination string   `json:"destination"`
	Relays      []string `json:"relays"`
	Error       string   `json:"error"`   // of the latest
	Seconds     float64  `json:"seconds"` // since the first was refused
}

// Only names the relays.
func (r Refusal) Only() string {
	names, relay := r.Relays, "relay"
	if len(names) > 1 {
		relay = "relays"
	}
	if len(names) > 3 {
		names = append(slices.Clone(names[:3]), fmt.Sprintf("%d more", len(names)-3))
	}
	return "only " + relay + " " + plain.Clip(strings.Join(names, " and "))
}

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

func inSeconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

func (s *sample) watch() Watch {
	w := Watch{
		At: s.at, Database: s.Database, Holders: s.holders(), HiddenSessions: s.Hidden,
		DeadTuples: s.Dead, LockWaits: s.LockWaits, Rescues: s.Rescues.Relays,
		Untaken: s.Untaken.Count, UntakenFor: inSeconds(s.Untaken.Seconds),
	}
	for _, l := range s.Lanes {
		w.Lanes = append(w.Lanes, LaneWatch{
			Destination: l.Destination, Held: l.Held, Lag: inSeconds(l.Seconds),
			BlockedKeys: l.Blocked, BlockedFor: inSeconds(l.BlockedSeconds),
			WaitingKeys: l.Waiting, WaitingFor: inSeconds(l.WaitingSeconds),
		})
	}
	if s.Parked != nil {
		w.Parked, w.ParkedFor = s.Parked.Count, inSeconds(s.Parked.Seconds)
	}
	if s.Undelivered != nil {
		w.Undelivered = s.Undelivered.Count
	}
	return w
}

// holders returns what blocks vacuum, the longest first. The oldest transaction of the server
// explains nothing if there is a session to name, or none that cannot be seen.
func (s *sample) holders() (all []Holder) {
	for _, h := range s.Holders {
		all = append(all, Holder{
			Kind: h.Kind, PID: h.PID, Application: h.Application, User: h.User, State: h.State, Name: h.Name, Active: true,
			For: inSeconds(h.Seconds), StateFor: inSeconds(h.StateSeconds),
		})
	}
	for _, t := range s.Tracked {
		held := s.at.Sub(t.Since)
		explained := slices.ContainsFunc(all, func(h Holder) bool { return h.For >= held })
		switch {
		case t.Kind == "unseen" && (s.Hidden == 0 || explained || t.Transactions == 0):
		case t.Kind != "unseen" && t.Transactions < trackedTransactions:
		default:
			all = append(all, Holder{Kind: t.Kind, Name: t.Name, Active: t.Active, For: held})
		}
	}
	slices.SortStableFunc(all, func(a, b Holder) int { return cmp.Compare(b.For, a.For) })
	return all
}

// conditions returns the conditions that hold, and which open alerts are over. archiveDue returns
// by when an archive that ran at a time must have run again; zero: never. Nil: never.
func (s *sample) conditions(limits alert.Config, archiveDue func(time.Time) time.Time) (hold []condition, ended []subject) {
	undecided := map[subject]bool{} // neither holding nor ended, since another condition hides them
	for _, u := range s.Unserved {
		undecided[subject{alert.RuleLag, u.Destination}] = true
		hold = append(hold, condition{
			subject: subject{alert.RuleUnserved, u.Destination}, level: int64(u.Pending), detail: plain.UpTo(u.Pending, countedTo) + " pending",
		})
	}
	for _, n := range s.Misconfigured {
		hold = append(hold, condition{
			subject: subject{alert.RuleMisconfigured, n.Destination}, level: n.Attempts, event: n.Event, failure: plain.Clip(n.Error), age: inSeconds(n.Seconds),
			detail: fmt.Sprintf("%s that failed, the first of event %d; last: %s", plain.Plural(n.Attempts, "attempt", "attempts"), n.Event, plain.Clip(n.Error)),
		})
	}
	for _, f := range s.Failing { // one fault, one alert: what follows from it waits and lags
		undecided[subject{alert.RuleLag, f.Destination}] = true
		undecided[subject{alert.RuleWaitingKeys, f.Destination}] = true
		if !slices.ContainsFunc(s.Misconfigured, func(n failingSample) bool { return n.Destination == f.Destination }) {
			lasted := inSeconds(f.Seconds)
			hold = append(hold, condition{
				subject: subject{alert.RuleFailing, f.Destination}, level: int64(lasted.Minutes()), event: f.Event, failure: plain.Clip(f.Error), age: lasted,
				detail: fmt.Sprintf("for %s, and %s failed, the first of event %d; last: %s",
					plain.Span(lasted), plain.Plural(f.Attempts, "attempt", "attempts"), f.Event, plain.Clip(f.Error)),
			})
		}
	}
	for _, open := range s.Alerts {
		for _, l := range s.Lanes { // one fault, one alert: that of the failure has its error and its end
			if open.Rule == alert.RuleFailed && open.Failed && l.Destination == open.Subject && l.BlockedEvent == open.Event {
				undecided[subject{alert.RuleBlockedKeys, l.Destination}] = l.Blocked > 0
			}
		}
	}
	for i := range s.Lanes {
		hold = append(hold, s.Lanes[i].conditions(limits, undecided)...)
	}
	if p := s.Parked; p != nil && p.Count > 0 {
		hold = append(hold, condition{
			subject: subject{alert.RuleParked, s.Database}, level: int64(p.Count), detail: s.parked(), event: p.Event, age: inSeconds(p.Seconds),
		})
	}
	if u := s.Undelivered; u != nil {
		hold = append(hold, condition{subject: subject{alert.RuleUndelivered, s.Database}, level: int64(u.Count), detail: u.String(), event: u.Event})
	}
	storm := subject{alert.RuleRescueStorm, s.Database}
	if dead := s.Rescues.Relays; dead >= rescueStorm {
		hold = append(hold, condition{
			subject: storm, level: int64(dead), detail: fmt.Sprintf("%d of them were found dead within %s", dead, plain.Span(stormWithin)),
		})
	} else if dead > 0 {
		undecided[storm] = true
	}
	if holders := s.holders(); len(holders) > 0 && holders[0].For > limits.VacuumBlockedOver {
		detail := holders[0].String()
		if more := len(slices.DeleteFunc(holders[1:], func(h Holder) bool { return h.For <= limits.VacuumBlockedOver })); more > 0 {
			detail += "; " + plain.Plural(more, "more holds", "more hold") + " it back, too"
		}
		hold = append(hold, condition{subject: subject{alert.RuleVacuumBlocked, s.Database}, level: int64(holders[0].For.Minutes()), detail: detail, age: holders[0].For})
	}
	for _, r := range s.Refused {
		hold = append(hold, condition{subject: subject{alert.RuleReloadRefused, r.Relay}, failure: plain.Clip(r.Error), age: inSeconds(r.Seconds)})
	}
	for _, d := range s.Differ {
		hold = append(hold, condition{subject: subject{alert.RuleRelaysDiffer, d.Destination}, level: int64(len(d.Relays)), detail: d.String()})
	}
	for _, r := range s.Refusals {
		hold = append(hold, condition{
			subject: subject{alert.RuleRelayRefused, r.Destination}, level: int64(len(r.Relays)), detail: r.Only(), failure: plain.Clip(r.Error), age: inSeconds(r.Seconds),
		})
	}
	if a := s.Archive; a != nil && archiveDue != nil {
		if due := archiveDue(a.At); !due.IsZero() && s.at.After(due) {
			hold = append(hold, condition{
				subject: subject{alert.RuleArchive, s.Database}, failure: plain.Clip(a.Error), age: s.at.Sub(due), detail: "last on " + a.At.UTC().Format("2006-01-02 15:04 UTC"),
			})
		}
	}
	return hold, s.ended(hold, undecided)
}

// conditions returns what holds of a lane, and notes what is undecided.
func (l *laneSample) conditions(limits alert.Config, undecided map[subject]bool) (hold []condition) {
	if l.Held {
		undecided[subject{alert.RuleMisconfigured, l.Destination}] = true
		undecided[subject{alert.RuleFailing, l.Destination}] = true
	}
	lag := subject{alert.RuleLag, l.Destination}
	switch waited := inSeconds(l.Seconds); {
	case l.Held, undecided[lag]:
		undecided[lag] = true
	case waited > limits.LagOver:
		hold = append(hold, condition{
			subject: lag, level: int64(waited.Minutes()), event: l.Event, age: waited,
			detail: fmt.Sprintf("the oldest one that is due has waited for %s (event %d), longer than %s", plain.Span(waited), l.Event, plain.Span(limits.LagOver)),
		})
	}
	if paused := inSeconds(l.PausedSeconds); paused > alert.PausedOver {
		why := ""
		if l.PausedReason != "" {
			why = " (" + plain.Clip(l.PausedReason) + ")"
		}
		hold = append(hold, condition{subject: subject{alert.RulePaused, l.Destination}, detail: "for " + plain.Span(paused) + why, age: paused})
	}
	if blocked := (subject{alert.RuleBlockedKeys, l.Destination}); l.Blocked > 0 && !undecided[blocked] {
		keys := plain.Plural(l.Blocked, "key waits", "keys wait")
		if l.Blocked > countedTo {
			keys = plain.UpTo(l.Blocked, countedTo) + " keys wait"
		}
		hold = append(hold, condition{
			subject: blocked, level: int64(l.Blocked), event: l.BlockedEvent, age: inSeconds(l.BlockedSeconds),
			detail: fmt.Sprintf("%s behind a delivery that failed, the oldest for %s: key %q behind event %d",
				keys, plain.Span(inSeconds(l.BlockedSeconds)), plain.Clip(l.BlockedKey), l.BlockedEvent),
		})
	}
	switch waiting := (subject{alert.RuleWaitingKeys, l.Destination}); {
	case l.Held, undecided[waiting]:
		undecided[waiting] = true
	case l.Waiting > 0:
		hold = append(hold, condition{subject: waiting, level: int64(l.Waiting), detail: l.waiting(), event: l.WaitingEvent, age: inSeconds(l.WaitingSeconds)})
	}
	return hold
}

// parked says how many events are parked, and names the oldest.
func (s *sample) parked() string {
	p, of := s.Parked, ""
	if p.Type != "" {
		of = fmt.Sprintf(" of type %q", p.Type)
	}
	return fmt.Sprintf("%s parked, the oldest for %s: event %d%s; add a route for it", plain.UpTo(p.Count, countedTo), plain.Span(inSeconds(p.Seconds)), p.Event, of)
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

// ended returns the open alerts whose conditions hold no more. Nothing is decided about those in
// undecided.
func (s *sample) ended(hold []condition, undecided map[subject]bool) (ended []subject) {
	for _, open := range s.Alerts {
		holds := slices.ContainsFunc(hold, func(c condition) bool { return c.subject == open.subject })
		switch open.Rule {
		case alert.RuleLag, alert.RuleBlockedKeys, alert.RuleWaitingKeys, alert.RuleParked, alert.RuleUndelivered, alert.RuleRescueStorm, alert.RuleVacuumBlocked, alert.RulePaused, alert.RuleUnserved, alert.RuleMisconfigured, alert.RuleFailing,
			alert.RuleReloadRefused, alert.RuleRelaysDiffer, alert.RuleRelayRefused, alert.RuleArchive, alert.RuleDatabase:
			if !holds && !undecided[open.subject] {
				ended = append(ended, open.subject)
			}
		case alert.RuleFailed:
			if !open.Failed {
				ended = append(ended, open.subject)
			}
		case alert.RuleBreakerOpen, alert.RuleRoutesChanged, alert.RuleReconcile: // a breaker's probes end the alert, unless the destination was removed meanwhile
			if open.Left {
				ended = append(ended, open.subject)
			}
		}
	}
	return ended
}

// MaxUndelivered is up to how many events without deliveries are remembered.
const MaxUndelivered = 1_000

// String says how many there are, and what to do.
func (u *UndeliveredSample) String() string {
	found := plain.Plural(int64(u.Count), "event has", "events have")
	if u.Count > MaxUndelivered {
		found = fmt.Sprintf("more than %d events have", MaxUndelivered)
	}
	return fmt.Sprintf("%s no delivery, the first of them event %d: no relay takes them for new, as of rows that were loaded from another server; create what is missing: "+
		"outbox-relay events create-deliveries", found, u.Event)
}

// An unservedSample is a destination with pending deliveries that no registered relay serves.
type unservedSample struct {
	Destination string `json:"destination"`
	Pending     int    `json:"pending"`
}
