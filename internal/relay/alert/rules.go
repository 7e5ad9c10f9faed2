package alert

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// Rules that relays alert about, and that advice is about as long as they hold. An alert's subject
// is the destination, or the database where the rule is about all of it.
const (
	// RuleFailed tells that deliveries to a destination failed for good.
	RuleFailed = "failed"
	// RuleLag tells that due deliveries to a destination, or events that no relay has taken, wait
	// for too long, though nothing holds them.
	RuleLag = "lag"
	// RuleBreakerOpen tells that a destination is down as a whole and its deliveries are held.
	RuleBreakerOpen = "breaker_open"
	// RuleParked tells that events match no route.
	RuleParked = "parked"
	// RuleUndelivered tells that events have no deliveries, and that no relay takes them: they were
	// loaded from another server.
	RuleUndelivered = "undelivered"
	// RuleBlockedKeys tells that ordering keys wait behind a delivery that failed.
	RuleBlockedKeys = "blocked_keys"
	// RuleWaitingKeys: ordering keys wait for too long behind a delivery that is scheduled or
	// retried later.
	RuleWaitingKeys = "waiting_keys"
	// RuleRescueStorm tells that relays die one after the other.
	RuleRescueStorm = "rescue_storm"
	// RuleVacuumBlocked tells that a session keeps the database from cleaning up.
	RuleVacuumBlocked = "vacuum_blocked"
	// RulePaused tells that a destination has been paused for PausedOver or longer while deliveries
	// wait for it.
	RulePaused = "paused"
	// RuleUnserved tells that deliveries wait for a destination that no running relay serves.
	RuleUnserved = "unserved"
	// RuleRoutesChanged tells that a relay changed the routes and another one was configured with
	// others.
	RuleRoutesChanged = "routes_changed"
	// RuleMisconfigured says that deliveries to a destination fail in a way that only a person
	// fixes, and none has arrived since.
	RuleMisconfigured = "misconfigured"
	// RuleFailing says that a destination has accepted nothing for Config.LagOver, though what it
	// answers may be over soon, such as 429.
	RuleFailing = "failing"
	// RuleReloadRefused tells that a relay could not use its new configuration, and keeps what was
	// in effect.
	RuleReloadRefused = "reload_refused"
	// RuleRelaysDiffer tells that relays have different settings or secrets for one destination.
	RuleRelaysDiffer = "relays_differ"
	// RuleRelayRefused tells that a destination refuses some relays while another relay may be
	// accepted.
	RuleRelayRefused = "relay_refused"
	// RuleArchive tells that the archive has not run when it should have.
	RuleArchive = "archive_overdue"
	// RuleReconcile tells that the last comparison with a receiver found differences, or could not
	// be made.
	RuleReconcile = "reconcile"
	// RuleDatabase tells that a relay has lost its database, that the database refuses for lack of
	// disk or connections, or that claims fail. Each relay sends it alone: nothing can be stored
	// then.
	RuleDatabase = "database_trouble"
	// RuleQuarantined tells that a relay found itself on a copy of its database, and sends nothing.
	RuleQuarantined = "quarantined"
)

// Rules of advice alone: no alert is sent about them.
const (
	// RuleNoRelay tells that no relay runs.
	RuleNoRelay = "no_relay"
	// RuleUntaken tells that no relay takes events though one runs.
	RuleUntaken = "untaken"
	// RuleSlowed tells that a destination has asked relays to wait (Retry-After).
	RuleSlowed = "slowed"
	// RuleRetrying tells that deliveries to a destination wait for their next attempt.
	RuleRetrying = "retrying"
)

// RuleTest is that of a test of the channels. It is none of [Rules].
const RuleTest = "test"

// A rule says about one kind of alert all that depends on its kind. Its texts are templates, see
// [Alert.fill].
type rule struct {
	name string
	// after is how long the condition must last before it is sent. 0: it was measured over minutes,
	// or no time heals it.
	after   time.Duration
	command string // shows more; empty: [Alert.Command]'s default
	tells   string // what happened, without a full stop
	over    string // that it ended, without a full stop
	remedy  string // what to do; empty: the detail says it
}

// usual stands for [Policy.After].
const usual = time.Duration(-1)

// deployLasts is for how long relays differ while they are replaced one by one.
const deployLasts = 5 * time.Minute

func allRules() []rule { return slices.Concat(destinationRules(), eventRules(), relayRules()) }

// destinationRules are about destinations and what they answer.
func destinationRules() []rule {
	return []rule{
		{
			RuleFailed, 5 * time.Second, "outbox-relay events list --status failed --destination {word}",
			"{deliveries} to {name} failed for good[. First: {first}]",
			"no failed delivery to {name} is left, of {count} that failed[; {held}]",
			"Look at the reasons, fix the cause, then replay them.[ {paused}: `outbox-relay resume {word}`.] Until then later events with the same ordering key wait, unless on_failure is skip. What failed as invalid_event cannot be sent as it is: its producer must insert a corrected event under a new key.",
		},
		{
			RuleBreakerOpen, usual, "",
			"{name} {fault}, and its deliveries are held[ ({pending} pending)][. Latest error: {latest}]",
			"deliveries to {name} are no longer held[: {detail}]",
			"Nothing is lost: {tries}.[ {repair}]",
		},
		{
			RulePaused, 0, "",
			"{name} is still paused, and its deliveries wait[ ({pending} pending)][: {detail}]",
			"{name} is no longer paused, or no delivery waits for it",
			"If it was forgotten: `outbox-relay resume {word}`. What waits until the end of its `retry.not_after` fails.",
		},
		{
			RuleUnserved, usual, "",
			"Deliveries to {name} are unserved, as no running relay has this destination[: {detail}]",
			"no delivery to {name} waits for a relay that serves it",
			"To put it back, write `destinations.{subject}` into a relay's configuration and reload that relay (SIGHUP); or give them up: `outbox-relay discard --destination {word} --status pending`.",
		},
		{
			RuleMisconfigured, 0, "[outbox-relay events show {event}]",
			"Deliveries to {name} fail, and only a person can fix that[: it {cause}][: {detail}]",
			"{name} accepts deliveries, or none waits for it",
			"[{repair}]",
		},
		{
			RuleFailing, 0, "[outbox-relay events show {event}]",
			"{name} has accepted nothing[ {detail}]",
			"{name} accepts deliveries, or none is retried",
			"Each attempt is spent, and after the last one a delivery fails.[ {repair}]",
		},
		{
			RuleRelayRefused, usual, "outbox-relay relays",
			"Some relays are refused by {name}, and leave its deliveries to the others[: {detail}][: {failure}]",
			"no relay is refused alone by {name}",
			"{compare} What it was refused follows its schedule; the other relays deliver the rest.",
		},
		{
			RuleReconcile, 0, "outbox-relay reconcile --destination {word} --url URL",
			"The comparison of {name} with its receiver has not passed[: {detail}]",
			"everything compared that was delivered to {name} took effect, once",
			"Run the comparison by hand, with the URL or database that is asked every night; it names the keys, and `--heal` replays what never arrived.",
		},
	}
}

// eventRules are about events and deliveries that wait.
func eventRules() []rule {
	return []rule{
		{
			RuleLag, 0, "",
			"Deliveries to {name} lag[: {detail}]",
			"deliveries to {name} no longer lag",
			"The receiver is slower than what comes in, or the database is slow. Unless it answers 429, or a relay has learnt a lower limit, raise `max_in_flight` or `rate_limit` of the destination, then reload the relay.",
		},
		{
			RuleParked, usual, "outbox-relay events list --parked",
			"Events of {name} match no route[: {detail}]",
			"no event of {name} is parked",
			"Add a route to the relays' configuration and reload them (SIGHUP).",
		},
		{
			RuleUndelivered, usual, "outbox-relay events create-deliveries",
			"Events of {name} have no deliveries, so that no relay sends them[: {detail}]",
			"no event of {name} is known to have no deliveries",
			"",
		},
		{
			RuleBlockedKeys, 0, "outbox-relay events list --status failed --destination {word}",
			"Ordering keys of {name} are blocked[: {detail}]",
			"no ordering key of {name} is blocked",
			"Fix the cause and replay the failed delivery, or skip it. What failed as invalid_event no replay sends: its producer must insert a corrected event under a new key; then skip the failed one.",
		},
		{
			RuleWaitingKeys, 0, "[outbox-relay events show {event}]",
			"Ordering keys of {name} wait[: {detail}]",
			"no ordering key of {name} waits for long behind a delivery that is not due",
			"If the delivery in front is retried, its last error says what to fix. If it was scheduled, it holds up what is due; give it up if it is not wanted[: `outbox-relay discard {event} --destination {word}`].",
		},
	}
}

// relayRules are about relays and their database.
func relayRules() []rule {
	return []rule{
		{
			RuleRescueStorm, 0, "",
			"Relays of {name} keep dying[: {detail}]",
			"no relay of {name} has died for a while",
			"Search the logs of the relays for panics, and the host for processes killed for lack of memory.",
		},
		{
			RuleVacuumBlocked, 0, "outbox-relay doctor",
			"Database {name} cannot clean up[: {detail}]",
			"database {name} can clean up again",
			"",
		},
		{
			RuleRoutesChanged, deployLasts, "outbox-relay routes list",
			"Routes of {name} changed, and not every running relay is configured with them[: {detail}]",
			"all relays of {name} have the same routes",
			"Give all relays the same configuration, or stop the one that is not meant to run.",
		},
		{
			RuleReloadRefused, 0, "outbox-relay config check",
			"Relay {name} refused its new configuration[: {failure}]",
			"relay {name} uses its configuration, or is gone",
			"Correct the configuration, then reload the relay (SIGHUP). What was in effect before stays in effect until then.",
		},
		{
			RuleRelaysDiffer, deployLasts, "outbox-relay relays",
			"Relays differ in the settings of {name}[: {detail}]",
			"all relays have the same settings of {name}",
			"Give all relays the same settings and secrets, then reload them (SIGHUP).",
		},
		{
			RuleArchive, 0, "outbox-relay archive run",
			"The archive of {name} has not run when it should have[: {detail}][: {failure}]",
			"the archive of {name} has run",
			"{unarchived} Nothing is lost; tables grow until it has run.",
		},
		{
			RuleDatabase, usual, "outbox-relay doctor",
			"Relay {name} has trouble with its database[ {database}][: {latest}][: {detail}]",
			"relay {name} works with its database again",
			"See whether the server runs, whether it has disk space and connections left, and whether a lock or a missing right keeps the relay from its tables. Events are stored as long as it takes writes, and nothing is lost.",
		},
		{
			RuleQuarantined, 0, "outbox-relay identity show",
			"A relay is quarantined and sends nothing[: {failure}][: {detail}]",
			"no relay is quarantined any more",
			"",
		},
	}
}

// Rules returns the names of all rules.
func Rules() []string {
	var names []string
	for _, r := range allRules() {
		names = append(names, r.name)
	}
	return names
}

// ruleNamed returns the rule of a name. A program may store alerts of other rules, of which only
// the name is known.
func ruleNamed(name string) rule {
	for _, r := range allRules() {
		if r.name == name {
			return r
		}
	}
	unknown := rule{tells: "{rule} of {name}[: {detail}][: {first}]", over: "{rule} of {name} is over", after: usual}
	if name == RuleTest {
		unknown.tells, unknown.command = "This is a test of the alert channels. Nothing is wrong", "outbox-relay alerts test"
	}
	return unknown
}

// happened says what happened, without a full stop.
func (a Alert) happened(v voice) string { return a.say(ruleNamed(a.Rule).tells, v) }

// ended says what is over, without a full stop.
func (a Alert) ended(v voice) string { return a.say(ruleNamed(a.Rule).over, v) }

// Remedy says what to do about the alert; empty: its detail says it.
func (a Alert) Remedy(mark Marker) string {
	v := plainVoice()
	v.mark = mark
	return a.say(ruleNamed(a.Rule).remedy, v)
}

// Command returns the command that shows what the alert is about.
func (a Alert) Command() string {
	return cmp.Or(a.say(ruleNamed(a.Rule).command, plainVoice()), "outbox-relay status")
}

// say returns a template's text.
func (a Alert) say(template string, v voice) string {
	text, _ := a.fill(template, v)
	return text
}

// blanks of a template.
var blanks = regexp.MustCompile("`([^`]*)`|\\[([^]]*)\\]|\\{(\\w+)\\}")

// fill replaces {a name} in a template by the alert's value, marks `what people copy`, and leaves
// out [what names a value] that is not known. No value is read as a template. It reports whether
// all values are known.
func (a Alert) fill(template string, v voice) (text string, known bool) {
	known = true
	text = blanks.ReplaceAllStringFunc(template, func(blank string) string {
		inner := blank[1 : len(blank)-1]
		switch blank[0] {
		case '`':
			text, all := a.fill(inner, v)
			known = known && all
			return v.mark(text)
		case '[':
			if text, all := a.fill(inner, v); all {
				return text
			}
			return ""
		}
		value := a.value(inner, v)
		known = known && value != ""
		return value
	})
	return text, known
}

// value returns what a name in a template stands for; empty: it is not known.
func (a Alert) value(name string, v voice) string {
	switch name {
	case "rule":
		return v.inert(a.Rule, maxChatName)
	case "name":
		return v.name(a.Subject)
	case "subject":
		return a.Subject
	case "word": // of a command line
		return plain.ShellWord(plain.Clip(a.Subject))
	case "count":
		return fmt.Sprint(a.Count)
	case "deliveries":
		return plain.Plural(a.Count, "delivery", "deliveries")
	case "detail":
		return v.text(a.Detail)
	case "failure":
		return v.text(a.FirstError)
	case "first": // the code that fires an alert may leave out both of them
		return joined(a.say("[event {event}]", v), v.text(a.FirstError))
	case "latest":
		return v.text(a.latest())
	case "fault":
		return Fault(a.latest())
	case "repair":
		return Repair(a.Subject, ReasonOf(a.latest()), a.latest(), v.mark)
	case "tries":
		return a.Untried.text()
	case "compare":
		if clocksDiffer(ReasonOf(a.FirstError), a.FirstError) {
			return repairClocks(v.mark)
		}
		return "Compare the settings, secrets and network of the relays that are named with those of the others; correct them, then reload these relays (SIGHUP)."
	}
	return a.ifKnown(name, v)
}

// ifKnown returns values that some alerts lack.
func (a Alert) ifKnown(name string, v voice) string {
	failed := a.FirstError != ""
	switch {
	case name == "database" && a.Database != "":
		return v.name(a.Database)
	case name == "event" && a.FirstEventID != 0:
		return fmt.Sprint(a.FirstEventID)
	case name == "paused" && a.Untried == UntriedPaused:
		return "The destination is paused, and nothing is sent before it is resumed"
	case name == "held" && a.Untried == UntriedPaused && a.Pending > 0:
		return "the destination is paused, with " + plain.UpTo(a.Pending, 10_000) + " pending"
	case name == "pending" && a.Pending > 0:
		return plain.UpTo(a.Pending, 10_000)
	case name == "cause" && failed:
		return Fault(a.FirstError)
	case name == "unarchived" && failed:
		return "The log of the relays says more (archive)."
	case name == "unarchived":
		return "No relay has said why: perhaps none ran when it was due."
	}
	return ""
}
