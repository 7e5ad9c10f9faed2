package ops

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/watch"
)

// Advice is one thing that is wrong, and the commands that come next.
type Advice struct {
	// Rule that it follows from: one of package alert, or that of an alert which a program stored.
	// Names are added, never renamed.
	Rule string `json:"rule"`
	// Subject is the destination; empty: the whole outbox, or the database.
	Subject string `json:"subject"`
	// Level says how bad it is.
	Level Level `json:"level"`
	// Text says what is wrong, and Remedy what fixes it; Remedy may be empty.
	Text   string `json:"text"`
	Remedy string `json:"remedy"`
	// Commands come next, in this order. What each does stands behind a #.
	Commands []string `json:"commands"`
}

// String returns what is wrong and what fixes it.
func (a Advice) String() string { return strings.TrimSpace(a.Text + " " + a.Remedy) }

// Destination returns which destination it is about; empty: none.
func (a Advice) Destination() string {
	switch a.Rule {
	case alert.RulePaused, alert.RuleBreakerOpen, alert.RuleSlowed, alert.RuleRetrying, alert.RuleFailed, alert.RuleBlockedKeys, alert.RuleWaitingKeys, alert.RuleUnserved, alert.RuleLag:
		return a.Subject
	}
	return ""
}

// Level says how bad something is.
type Level string

// The levels, the worst first.
const (
	Critical Level = "critical" // something is not delivered until a person acts, or a receiver does
	Warning  Level = "warning"  // a person should look at it
	Notice   Level = "notice"   // the relay deals with it
)

const (
	// CountedTo is up to how many deliveries are counted.
	CountedTo = 10_000
	// FailedTo is up to how many that failed are: they lie far apart, and until VACUUM was there,
	// each costs a page.
	FailedTo = 1_000
)

// advise says what to do about what the status shows, the worst first. No command in it does harm:
// nothing is replayed that cannot arrive, and nothing is restarted where a reload suffices.
func advise(s Status) []Advice {
	all := []Advice{}
	alive := slices.ContainsFunc(s.Relays, RelayStatus.Alive)
	if s.Quarantined != "" {
		all = append(all, Advice{
			alert.RuleQuarantined, "", Critical, fmt.Sprintf("Nothing is claimed or sent: %s.", s.Quarantined), "Decide what is to become of it.",
			[]string{"outbox-relay identity show"},
		})
	}
	if !alive {
		all = append(all, Advice{alert.RuleNoRelay, "", Critical, "No relay is running, so nothing is sent.", "", []string{"outbox-relay run"}})
	}
	if alive && s.Quarantined == "" && s.Untaken.OldestSeconds > untakenAfter.Seconds() {
		all = append(all, s.Untaken.advise())
	}
	for _, d := range s.Destinations {
		all = append(all, d.advise(alive && s.Quarantined == "")...) // a quarantined relay serves nothing: that is no reason to discard
	}
	routed := slices.ContainsFunc(s.Destinations, func(d DestinationStatus) bool { return d.Routed })
	if s.Parked > 0 && (routed || s.Quarantined == "") { // a quarantined relay has not stored its routes
		all = append(all, adviseParked(s.Parked, routed))
	}
	for _, r := range s.Relays {
		if r.Quarantined != "" && s.Quarantined == "" && r.Alive() {
			all = append(all, Advice{
				alert.RuleQuarantined, r.Called, Warning, fmt.Sprintf("Relay %q is quarantined and sends nothing, while others work: %s.", plain.Clip(r.Called), plain.Clip(r.Quarantined)),
				"Stop it, or give it the settings of the others.",
				[]string{"outbox-relay identity show"},
			})
		}
		if refused := (alert.Alert{Rule: alert.RuleReloadRefused, Subject: r.Called, FirstError: r.ReloadError}); r.ReloadError != "" {
			all = append(all, adviseOf(Warning, refused))
		}
	}
	for _, r := range s.Refusals {
		all = append(all, adviseRefusal(r, s.Differences))
	}
	for _, d := range s.Differences {
		if slices.ContainsFunc(s.Refusals, func(r watch.Refusal) bool { return r.Destination == d.Destination }) {
			continue // told with what follows from it
		}
		differ := alert.Alert{Rule: alert.RuleRelaysDiffer, Subject: d.Destination, Detail: d.String()}
		all = append(all, adviseOf(Warning, differ))
	}
	all = append(all, adviseAlerts(s.Alerts, all)...)
	levels := []Level{Critical, Warning, Notice}
	slices.SortStableFunc(all, func(a, b Advice) int { return slices.Index(levels, a.Level) - slices.Index(levels, b.Level) })
	return all
}

// adviseRefusal says what to do about relays that a destination refuses, while it may accept
// others.
func adviseRefusal(r watch.Refusal, differences []watch.Difference) Advice {
	refused := alert.Alert{Rule: alert.RuleRelayRefused, Subject: r.Destination, FirstError: r.Error}
	verb := "is"
	if len(r.Relays) > 1 {
		verb = "are"
	}
	text := fmt.Sprintf("%s %s refused by %q%s. The other relays deliver.", plain.Capital(r.Only()), verb, r.Destination, labelled(": %s", strings.TrimRight(r.Error, ". ")))
	for _, d := range differences {
		if d.Destination == r.Destination {
			text += fmt.Sprintf(" Relays have %s.", d)
		}
	}
	return Advice{refused.Rule, r.Destination, Warning, text, refused.Remedy(plainly), []string{refused.Command()}}
}

// spendsAttempts explains attempts of what is held.
const spendsAttempts = "An event that alone is answered with errors follows the schedule, and spends attempts: the fault may be its own."

// untakenAfter is how old an event becomes that no relay takes, before a person should look at it.
// Its age is counted from the beginning of its transaction, which may have been a long one.
const untakenAfter = time.Minute

func (u Untaken) advise() Advice {
	return Advice{
		alert.RuleUntaken, "", Warning, fmt.Sprintf("%s not yet routed, the oldest for %s: no relay has taken them.", counted(u.Events, "event is", "events are"),
			plain.Span(time.Duration(u.OldestSeconds*float64(time.Second)))),
		"Relays refuse to take events, or more events come than they take.",
		[]string{"outbox-relay doctor    # says why"},
	}
}

// advise says what to do about one destination. alive: a relay is running, and not quarantined.
func (d DestinationStatus) advise(alive bool) (all []Advice) {
	if d.Paused {
		all = append(all, d.advisePaused())
	}
	unserved := alive && !d.Served && d.Pending > 0
	if unserved { // first: nothing below helps before a relay serves it
		all = append(all, d.adviseUnserved())
	}
	calm := d.Breaker == "half_open" && d.Pending == 0 // what was held has arrived, or was given up
	switch {
	case d.Served && d.Breaker != "closed" && d.Breaker != "" && !calm:
		all = append(all, d.adviseHeld(alive))
	case d.WaitUntil != nil && d.Pending > 0:
		all = append(all, d.adviseSlowed())
	case !unserved && d.Retrying > 0 && d.RetryReason != "":
		all = append(all, d.adviseRetrying())
	}
	if d.Failed > d.failedHeads() { // what blocks a key is told below
		all = append(all, d.adviseFailed())
	}
	if d.BlockedKeys > 0 {
		all = append(all, d.adviseBlocked())
	}
	for _, h := range d.behindEarly() {
		all = append(all, d.adviseEarly(h))
	}
	return all
}

func (d DestinationStatus) advice(rule string, level Level, text, remedy string, commands ...string) Advice {
	return Advice{rule, d.Destination, level, text, remedy, commands}
}

// word is the destination's name as a shell takes it.
func (d DestinationStatus) word() string { return plain.ShellWord(d.Destination) }

func (d DestinationStatus) advisePaused() Advice {
	since := ""
	if d.PausedAt != nil {
		since = " since " + timeText(d.PausedAt)
	}
	return d.advice(alert.RulePaused, Warning, fmt.Sprintf("%q is paused%s%s: nothing is sent there.", d.Destination, labelled(" (%s)", d.PausedReason), since),
		"Nothing is lost, and no attempt is spent meanwhile.",
		"outbox-relay resume "+d.word())
}

func (d DestinationStatus) adviseUnserved() Advice {
	return d.advice(alert.RuleUnserved, Critical, fmt.Sprintf("%s unserved: no running relay has %q.", counted(d.Pending, "delivery is", "deliveries are"), d.Destination),
		fmt.Sprintf("To put it back, write destinations.%s into a relay's configuration and reload that relay (SIGHUP); or give them up.", d.Destination),
		"outbox-relay discard --destination "+d.word()+" --status pending    # gives them up")
}

func (d DestinationStatus) adviseHeld(alive bool) Advice {
	held := alert.Alert{Rule: alert.RuleBreakerOpen, Subject: d.Destination, FirstError: d.BreakerError}
	switch {
	case !alive:
		held.Untried = alert.UntriedUnserved
	case d.Paused:
		held.Untried = alert.UntriedPaused
	case d.WaitUntil != nil:
		held.Untried = alert.UntriedAsked
	}
	commands := []string{
		"outbox-relay resume " + d.word() + " --reset-breaker    # once it works: send what is due, without a probe",
		"outbox-relay retry --destination " + d.word() + "    # once it works: try now what waits for its next attempt",
	}
	remedy := held.Remedy(plainly)
	switch {
	case d.Retrying == 0:
		commands = commands[:1]
	case d.Due == 0:
		remedy += " " + spendsAttempts
		commands = commands[1:]
	}
	return d.advice(alert.RuleBreakerOpen, Critical, fmt.Sprintf("%q %s, and its deliveries are held%s.", d.Destination, alert.Fault(d.BreakerError), labelled(": %s", strings.TrimRight(d.BreakerError, ". "))),
		remedy, commands...)
}

func (d DestinationStatus) adviseSlowed() Advice {
	level := Notice
	if d.failing() {
		level = Warning
	}
	return d.advice(alert.RuleSlowed, level, fmt.Sprintf("%q asks to wait (Retry-After): it is tried again at %s, %s until then.", d.Destination, timeText(d.WaitUntil), counted(d.Pending, "delivery waits", "deliveries wait")),
		fmt.Sprintf("Nothing is lost. If it asks often, set destinations.%s.rate_limit to what it accepts, then reload the relay (SIGHUP).", d.Destination),
		"outbox-relay resume "+d.word()+" --reset-breaker    # once it works: send what is due, though it has asked to wait")
}

func (d DestinationStatus) adviseRetrying() Advice {
	level, remedy := Notice, alert.Repair(d.Destination, d.RetryReason, d.RetryError, plainly)
	switch {
	case d.RetryAt != nil && d.LastDeliveredAt != nil && d.LastDeliveredAt.After(*d.RetryAt):
		remedy = fmt.Sprintf("%q has accepted other events since.", d.Destination)
	case needsPerson(d.RetryReason) || d.failing():
		level = Warning
	}
	var behind []string
	for _, h := range d.WaitingBehind {
		if h.Status == "pending" && h.Attempts > 0 {
			behind = append(behind, fmt.Sprintf("%s behind event %d", counted(h.Waiting, "delivery waits", "deliveries wait"), h.EventID))
		}
	}
	return d.advice(alert.RuleRetrying, level, fmt.Sprintf("%s retrying at %s; last: %s.%s", upTo(d.Retrying), d.Destination, orReason(d.RetryError, d.RetryReason), labelled(" %s.", strings.Join(behind, ", "))),
		remedy, fmt.Sprintf("outbox-relay explain %d    # every attempt, and when the next one is", d.RetryEventID),
		"outbox-relay retry --destination "+d.word()+"    # once it is fixed: attempt all that waits for its next attempt")
}

func (d DestinationStatus) adviseEarly(h WaitingHead) Advice {
	return d.advice(alert.RuleWaitingKeys, Warning, fmt.Sprintf("%s at %q behind event %d of the ordering key %s, which its producer wants sent in %s.",
		counted(h.Waiting, "delivery waits", "deliveries wait"), d.Destination, h.EventID, h.Key, plain.Span(time.Duration(h.DueInSeconds*float64(time.Second)))),
		"It holds up what is due; give it up if it is not wanted.",
		fmt.Sprintf("outbox-relay explain %d", h.EventID),
		fmt.Sprintf("outbox-relay discard %d --destination %s    # gives it up: its effect is lost", h.EventID, d.word()))
}

// failedHeads returns how many of the Failed are named as what blocks an ordering key.
func (d DestinationStatus) failedHeads() (n int64) {
	for _, h := range d.WaitingBehind {
		if h.Status == "failed" {
			n++
		}
	}
	return n
}

// failingWithin is how long before the latest failure a delivery must have arrived for the
// destination to work: one that refuses some events between others that it accepts is not failing.
const failingWithin = 10 * time.Second

// failingOnes is how many events must have failed lately, and none delivered since the first of
// them, for a destination to fail at once.
const failingOnes = 3

// failing reports whether the destination's latest attempts failed through its own fault or of
// the configuration, and none has delivered lately.
func (d DestinationStatus) failing() bool {
	at, reason := d.RetryAt, d.RetryReason
	if at == nil || d.FailedAt != nil && d.FailedAt.After(*at) {
		at, reason = d.FailedAt, d.FailedReason
	}
	if at == nil || alert.Repair(d.Destination, reason, "", plainly) == "" {
		return false
	}
	all := d.Lately >= failingOnes && d.LatelySince != nil && d.LastDeliveredAt != nil && d.LastDeliveredAt.Before(*d.LatelySince)
	return all || d.LastDeliveredAt == nil || d.LastDeliveredAt.Before(at.Add(-failingWithin))
}

// needsPerson reports whether deliveries that fail for this reason continue failing until a person
// fixes something.
func needsPerson(reason policy.Reason) bool {
	switch reason {
	case policy.ReasonUnauthorized, policy.ReasonNotFound, policy.ReasonRedirect, policy.ReasonDNS, policy.ReasonTLS, policy.ReasonEgress:
		return true
	}
	return false
}

func (d DestinationStatus) adviseFailed() Advice {
	word, remedy, commands := d.word(), "", []string(nil)
	text := fmt.Sprintf("%s to %q failed; last: %s.", countedTo(d.Failed, FailedTo, "delivery", "deliveries"), d.Destination, orReason(d.FailedError, d.FailedReason))
	commands = append(commands, "outbox-relay events list --status failed --destination "+word+"    # see why")
	sendable := d.Failed - d.FailedUnsendable
	if d.FailedUnsendable > 0 {
		remedy = countedTo(d.FailedUnsendable, FailedTo, "of them cannot be sent as it is", "of them cannot be sent as they are") + ": the producer must insert a corrected event under a new key. "
		commands = append(commands, "outbox-relay discard --destination "+word+" --status failed --reason invalid_event    # once corrected")
	}
	switch {
	case sendable == 0:
	case !d.Routed:
		remedy += "No route leads there any more: add destination and route to a relay's configuration and reload it (SIGHUP) to send them again, or give them up."
		commands = append(commands, "outbox-relay discard --destination "+word+" --status failed    # gives them up")
	case d.FailedUnsendable > 0:
		commands = append(commands, "outbox-relay replay --destination "+word+" --reason REASON    # once its cause is fixed; not invalid_event")
	default:
		commands = append(commands, "outbox-relay replay --destination "+word+"    # once the cause is fixed")
	}
	if remedy == "" {
		remedy = "Look at the reasons, fix the cause, then replay them."
	}
	return d.advice(alert.RuleFailed, Warning, text, strings.TrimSpace(remedy), commands...)
}

func (d DestinationStatus) adviseBlocked() Advice {
	var heads []string
	replayable, unsent := d.BlockedKeys > d.failedHeads(), false // some of them
	commands := []string{}                                       // never null in JSON
	word := d.word()
	for _, b := range d.WaitingBehind {
		if b.Status != "failed" {
			continue
		}
		waiting := b.Key
		if b.Waiting > 0 {
			waiting += ": " + counted(b.Waiting, "waits", "wait")
		}
		heads = append(heads, fmt.Sprintf("%s behind event %d, failed (%s)", waiting, b.EventID, b.Reason))
		commands = append(commands, fmt.Sprintf("outbox-relay explain %d    # why it failed", b.EventID))
		unsent, replayable = unsent || unsendable(b.Reason), replayable || !unsendable(b.Reason)
		if d.Routed && !unsendable(b.Reason) {
			commands = append(commands, fmt.Sprintf("outbox-relay replay %d --destination %s    # once its cause is fixed", b.EventID, word))
		}
		commands = append(commands, fmt.Sprintf("outbox-relay discard --destination %s %s    # skips it: its effect is lost", word, plain.ShellFlag("--head-of-key", b.Key)))
	}
	more := ""
	if n := d.BlockedKeys - int64(len(heads)); n > 0 && len(heads) > 0 {
		more = fmt.Sprintf(", and %d more", n)
	}
	last := ""
	if d.Failed <= d.failedHeads() { // if more have, it is told with those
		last = labelled("; last: %s", strings.TrimRight(d.FailedError, ". "))
	}
	remedy := ""
	if replayable || !unsent {
		remedy = "Fix the cause and replay the failed delivery, or skip it."
	}
	if unsent {
		remedy += " No replay sends what cannot be sent as it is: the producer must insert a corrected event under a new key; then skip the failed one."
	}
	return d.advice(alert.RuleBlockedKeys, Warning, fmt.Sprintf("%s at %q behind a failed delivery%s%s%s.", counted(d.BlockedKeys, "ordering key waits", "ordering keys wait"), d.Destination,
		labelled(": %s", strings.Join(heads, ", ")), more, last), strings.TrimSpace(remedy), commands...)
}

// unsendable reports whether a delivery that failed for this reason cannot be sent as its event is.
func unsendable(reason policy.Reason) bool {
	return reason == policy.ReasonInvalidEvent || reason == policy.ReasonEventMissing
}

func adviseParked(n int64, routed bool) Advice {
	if !routed {
		return Advice{
			alert.RuleParked, "", Warning, fmt.Sprintf("%s for the first relay: no route is stored yet.", counted(n, "event waits", "events wait")),
			"A relay stores its routes when it starts, and sends what matches them.",
			[]string{"outbox-relay run"},
		}
	}
	return Advice{
		alert.RuleParked, "", Warning, fmt.Sprintf("%s no route.", counted(n, "event matches", "events match")),
		"Add a route to the relays' configuration and reload them (SIGHUP).",
		[]string{"outbox-relay events list --parked    # which"},
	}
}

// adviseAlerts says what to do about the open alerts that nothing before them explains.
func adviseAlerts(alerts []alert.Alert, before []Advice) (all []Advice) {
	explained := func(subject string, rules ...string) bool {
		return slices.ContainsFunc(before, func(a Advice) bool {
			return slices.Contains(rules, a.Rule) && (a.Subject == "" || a.Subject == subject)
		})
	}
	for _, a := range alerts {
		switch a.Rule {
		case alert.RuleFailed, alert.RuleBreakerOpen, alert.RuleBlockedKeys, alert.RuleUnserved, alert.RulePaused, alert.RuleParked, alert.RuleQuarantined, alert.RuleMisconfigured,
			alert.RuleReloadRefused, alert.RuleRelaysDiffer, alert.RuleRelayRefused:
			continue // counted above, or over since
		case alert.RuleFailing:
			if explained(a.Subject, alert.RulePaused, alert.RuleBreakerOpen, alert.RuleSlowed, alert.RuleUnserved, alert.RuleRetrying) {
				continue
			}
		case alert.RuleWaitingKeys:
			if explained(a.Subject, a.Rule) {
				continue
			}
		case alert.RuleLag:
			if explained(a.Subject, alert.RuleNoRelay, alert.RulePaused, alert.RuleBreakerOpen, alert.RuleUnserved, alert.RuleQuarantined, alert.RuleUntaken) {
				continue
			}
		}
		advice := adviseOf(Warning, a)
		switch {
		case !slices.Contains(alert.Rules(), a.Rule): // a program's own, of which nothing more is known
			advice.Commands = []string{}
		case advice.Commands[0] == "outbox-relay status":
			advice.Commands[0] = "outbox-relay relays    # which relays live, and what each has in flight"
		}
		all = append(all, advice)
	}
	return all
}

// AdviseTrouble says what to do about the trouble that a relay has with its database, of which
// nothing is stored.
func AdviseTrouble(a alert.Alert) Advice { return adviseOf(Critical, a) }

// adviseOf says what an alert says.
func adviseOf(level Level, a alert.Alert) Advice {
	return Advice{a.Rule, a.Subject, level, a.Happened() + ".", a.Remedy(plainly), []string{a.Command()}}
}

// plainly marks nothing: texts are read in terminals and pages.
func plainly(name string) string { return name }

// labelled returns the text within a format; nothing without a text.
func labelled(format, text string) string {
	if text == "" {
		return ""
	}
	return fmt.Sprintf(format, text)
}

// orReason returns the error without a full stop at its end; without one, the reason.
func orReason(text string, reason policy.Reason) string {
	if text = strings.TrimRight(text, ". "); text == "" {
		return string(reason)
	}
	return text
}

// upTo writes what was counted up to a bound.
func upTo(n int64) string { return plain.UpTo(n, CountedTo) }

// counted is [plain.Plural] of what was counted up to CountedTo.
func counted(n int64, one, more string) string { return countedTo(n, CountedTo, one, more) }

func countedTo(n, bound int64, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return plain.UpTo(n, bound) + " " + more
}
