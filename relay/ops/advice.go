package ops

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// Advice is one thing that is wrong, and the commands that come next.
type Advice struct {
	// Why: quarantined, no_relay, parked, paused, held, unserved, retrying, failed, blocked, lag, or the rule of an open alert. Names
	// are added, never renamed.
	Why string `json:"why"`
	// Subject is the destination; empty: the whole outbox, or the database.
	Subject string `json:"subject"`
	// Level says how bad it is.
	Level Level `json:"level"`
	// Text says what is wrong, and Remedy what mends it; Remedy may be empty.
	Text   string `json:"text"`
	Remedy string `json:"remedy"`
	// Commands come next, in this order. What each does stands behind a #.
	Commands []string `json:"commands"`
}

// String returns what is wrong and what mends it.
func (a Advice) String() string { return strings.TrimSpace(a.Text + " " + a.Remedy) }

// Destination returns which destination it is about; empty: none.
func (a Advice) Destination() string {
	switch a.Why {
	case "paused", "held", "retrying", "failed", "blocked", "unserved", alert.RuleLag:
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
	// FailedTo is up to how many that failed are: they lie far apart, and until VACUUM was there, each costs a page.
	FailedTo = 1_000
)

// advise says what to do about what the status shows, the worst first. No command in it does harm: nothing is replayed that
// cannot arrive, and nothing is restarted where a reload suffices.
func advise(s Status) []Advice {
	all := []Advice{}
	alive := slices.ContainsFunc(s.Relays, RelayStatus.Alive)
	if s.Quarantined != "" {
		all = append(all, Advice{
			"quarantined", "", Critical, fmt.Sprintf("Nothing is claimed or sent: %s.", s.Quarantined), "Decide what is to become of it.",
			[]string{"outbox-relay identity show"},
		})
	}
	if !alive {
		all = append(all, Advice{"no_relay", "", Critical, "No relay is running, so nothing is sent.", "", []string{"outbox-relay run"}})
	}
	for _, d := range s.Destinations {
		all = append(all, d.advise(alive && s.Quarantined == "")...) // a quarantined relay serves nothing: that is no reason to discard
	}
	routed := slices.ContainsFunc(s.Destinations, func(d DestinationStatus) bool { return d.Routed })
	if s.Parked > 0 && (routed || s.Quarantined == "") { // a quarantined relay has not stored its routes
		all = append(all, adviseParked(s.Parked, routed))
	}
	all = append(all, adviseAlerts(s.Alerts, all)...)
	levels := []Level{Critical, Warning, Notice}
	slices.SortStableFunc(all, func(a, b Advice) int { return slices.Index(levels, a.Level) - slices.Index(levels, b.Level) })
	return all
}

// advise says what to do about one destination. alive: a relay is running, and not quarantined.
func (d DestinationStatus) advise(alive bool) (all []Advice) {
	word := plain.ShellWord(d.Destination)
	add := func(why string, level Level, text, remedy string, commands ...string) {
		all = append(all, Advice{why, d.Destination, level, text, remedy, commands})
	}
	if d.Paused {
		add("paused", Warning, fmt.Sprintf("%q is paused%s: nothing is sent there.", d.Destination, labelled(" (%s)", d.PausedReason)),
			"Nothing is lost, and no attempt is spent meanwhile.",
			"outbox-relay resume "+word)
	}
	if d.Served && d.Breaker != "closed" && d.Breaker != "" {
		reason, fault := heldReason(d.BreakerError), "is down"
		if reason == policy.ReasonUnauthorized || reason == policy.ReasonNotFound || reason == policy.ReasonRedirect { // it answers
			fault = "refuses all requests"
		}
		add("held", Critical, fmt.Sprintf("%q %s, and its deliveries are held%s.", d.Destination, fault, labelled(": %s", d.BreakerError)),
			strings.TrimSpace("Nothing is lost: relays try it every few seconds. "+repairOf(d.Destination, reason, d.BreakerError)),
			"outbox-relay resume "+word+" --reset-breaker    # once it works: send at once, without a probe")
	} else if d.Retrying > 0 && d.RetryReason != "" {
		level := Notice
		if needsPerson(d.RetryReason) || d.failing() {
			level = Warning
		}
		add("retrying", level, fmt.Sprintf("%s retrying at %s; last: %s.", upTo(d.Retrying), d.Destination, orReason(d.RetryError, d.RetryReason)),
			repairOf(d.Destination, d.RetryReason, d.RetryError),
			fmt.Sprintf("outbox-relay explain %d    # every attempt, and when the next one is", d.RetryEventID),
			"outbox-relay retry --destination "+word+"    # once it is mended: attempt all that waits for its next attempt")
	}
	if d.Failed > 0 {
		text, remedy, commands := d.adviseFailed(word)
		add("failed", Warning, text, remedy, commands...)
	}
	if d.BlockedKeys > 0 {
		text, commands := d.adviseBlocked(word)
		add("blocked", Warning, text, "Mend the cause and replay the failed delivery, or skip it.", commands...)
	}
	if alive && !d.Served && d.Pending > 0 {
		add("unserved", Critical, fmt.Sprintf("%s unserved: no running relay has %q.", counted(d.Pending, "delivery is", "deliveries are"), d.Destination),
			"Add it to a relay's configuration and reload that relay (SIGHUP), or give them up.",
			"outbox-relay discard --destination "+word+" --status pending    # gives them up")
	}
	return all
}

// failingWithin is how long before the latest failure a delivery must have arrived for the destination to work: one that refuses some
// events between others that it accepts is not failing.
const failingWithin = 10 * time.Second

// failing reports whether the destination's latest attempts failed through a fault of its own or of the configuration, and none has
// delivered lately.
func (d DestinationStatus) failing() bool {
	at, reason := d.RetryAt, d.RetryReason
	if at == nil || d.FailedAt != nil && d.FailedAt.After(*at) {
		at, reason = d.FailedAt, d.FailedReason
	}
	if at == nil || repair(d.Destination, reason) == "" {
		return false
	}
	return d.LastDeliveredAt == nil || d.LastDeliveredAt.Before(at.Add(-failingWithin))
}

// heldReason returns the reason of the error that opened a breaker, which is stored as text alone: an answer begins with its status.
func heldReason(text string) policy.Reason {
	first, _, _ := strings.Cut(text, " ")
	if status, err := strconv.Atoi(first); err == nil && status >= 300 && status <= 599 {
		return policy.ClassifyResponse(status, nil, "", policy.Responses{}, time.Time{}).Reason
	}
	for _, known := range []struct {
		sign   string
		reason policy.Reason
	}{{"no such host", policy.ReasonDNS}, {"tls: ", policy.ReasonTLS}, {"x509: ", policy.ReasonTLS}, {"dial ", policy.ReasonConnect}, {"timeout", policy.ReasonTimeout}, {"deadline exceeded", policy.ReasonTimeout}} {
		if strings.Contains(text, known.sign) {
			return known.reason
		}
	}
	return policy.ReasonUnexpected
}

// logNamed finds the stream of NATS or the topic of Kafka that an error names. Errors of HTTP begin with the status code.
var logNamed = regexp.MustCompile(`^(?:[^0-9].*?)??(there is no )?(stream|topic)(?: than)? "([^"]+)"(?:; create it with the subject "([^"]+)")?`)

// repairOf says what mends the error for which a destination fails: of a log that an error names, or of a receiver.
func repairOf(destination string, reason policy.Reason, text string) string {
	found := logNamed.FindStringSubmatch(text)
	if found == nil {
		return repair(destination, reason)
	}
	kind, name, subject := found[2], found[3], found[4]
	do := "Do what the error says"
	switch {
	case found[1] == "":
	case kind == "stream":
		do = "Create the stream: nats stream add " + plain.ShellWord(name)
		if subject != "" {
			do += " --subjects " + plain.ShellWord(subject) + " (or a pattern that covers all its subjects)"
		}
	default:
		do = fmt.Sprintf("Create the topic %s, or give the relay's user the right to see it", name)
	}
	return fmt.Sprintf("%s, or correct destinations.%s.%s and %s.", do, destination, kind, reload(destination))
}

// repair says what mends the reason for which a destination fails; empty: only the error says it.
func repair(destination string, reason policy.Reason) string {
	setting, address, reload := "destinations."+destination, "destinations."+destination+".url", reload(destination)
	if destination == "default" {
		address += " (or OUTBOX_DESTINATION_URL)"
	}
	switch reason {
	case policy.ReasonUnauthorized:
		return fmt.Sprintf("Make %s.signing_secrets (or its credentials) those of the receiver, then %s.", setting, reload)
	case policy.ReasonNotFound, policy.ReasonRedirect, policy.ReasonDNS:
		return fmt.Sprintf("Correct %s, then %s, or mend the receiver.", address, reload)
	case policy.ReasonConnect:
		return fmt.Sprintf("Start the receiver, or correct %s and %s.", address, reload)
	case policy.ReasonTLS:
		return fmt.Sprintf("Correct %s.tls, then %s, or mend the receiver's certificate.", setting, reload)
	case policy.ReasonTimeout:
		return fmt.Sprintf("The receiver answers later than %s.timeout allows.", setting)
	case policy.ReasonRateLimited:
		return fmt.Sprintf("The receiver asks for fewer requests: set %s.rate_limit, then %s.", setting, reload)
	case policy.ReasonEgress:
		return "The relay may not connect to this address: see egress in its configuration."
	case policy.ReasonServerError, policy.ReasonUnavailable, policy.ReasonTransient, policy.ReasonUnexpected, policy.ReasonNetwork, policy.ReasonMalformed:
		return "The log of the receiver says more."
	}
	return ""
}

// reload says how a relay reads a changed setting of a destination. Only the destination "default" may come from the environment, which a
// signal cannot change. The status does not know where a relay's settings come from.
func reload(destination string) string {
	if destination == "default" {
		return "reload the relay (SIGHUP), or restart it if the environment sets it"
	}
	return "reload the relay (SIGHUP)"
}

// needsPerson reports whether deliveries that fail for this reason go on failing until a person mends something.
func needsPerson(reason policy.Reason) bool {
	switch reason {
	case policy.ReasonUnauthorized, policy.ReasonNotFound, policy.ReasonRedirect, policy.ReasonDNS, policy.ReasonTLS, policy.ReasonEgress:
		return true
	}
	return false
}

func (d DestinationStatus) adviseFailed(word string) (text, remedy string, commands []string) {
	text = fmt.Sprintf("%s to %q failed; last: %s.", countedTo(d.Failed, FailedTo, "delivery", "deliveries"), d.Destination, orReason(d.FailedError, d.FailedReason))
	commands = append(commands, "outbox-relay events list --status failed --destination "+word+"    # see why")
	sendable := d.Failed - d.FailedUnsendable
	if d.FailedUnsendable > 0 {
		remedy = countedTo(d.FailedUnsendable, FailedTo, "of them can", "of them can") + " never be sent: the producer must insert a corrected event under a new key. "
		commands = append(commands, "outbox-relay discard --destination "+word+" --status failed --reason invalid_event    # once corrected")
	}
	switch {
	case sendable == 0:
	case !d.Routed:
		remedy += "No route leads there any more: add destination and route to a relay's configuration and reload it (SIGHUP) to send them again, or give them up."
		commands = append(commands, "outbox-relay discard --destination "+word+" --status failed    # gives them up")
	case d.FailedUnsendable > 0:
		commands = append(commands, "outbox-relay replay --destination "+word+" --reason REASON    # once its cause is mended; not invalid_event")
	default:
		commands = append(commands, "outbox-relay replay --destination "+word+"    # once the cause is mended")
	}
	if remedy == "" {
		remedy = "Look at the reasons, mend the cause, then replay them."
	}
	return text, strings.TrimSpace(remedy), commands
}

// maxBlockedKeys is how many ordering keys are looked at.
const maxBlockedKeys = 1_000

func (d DestinationStatus) adviseBlocked(word string) (text string, commands []string) {
	var heads []string
	for _, b := range d.Blocked {
		heads = append(heads, fmt.Sprintf("%s behind event %d (%s)", b.Key, b.EventID, b.Reason))
		if d.Routed && !unsendable(b.Reason) {
			commands = append(commands, fmt.Sprintf("outbox-relay replay %d --destination %s    # once its cause is mended", b.EventID, word))
		}
		commands = append(commands, fmt.Sprintf("outbox-relay discard --destination %s %s    # skips it: its effect is lost", word, plain.ShellFlag("--head-of-key", b.Key)))
	}
	more := ""
	if n := d.BlockedKeys - int64(len(heads)); n > 0 && len(heads) > 0 {
		more = fmt.Sprintf(", and %d more", n)
	}
	return fmt.Sprintf("%s at %q behind a failed delivery%s%s.", waitingKeys(d.BlockedKeys), d.Destination, labelled(": %s", strings.Join(heads, ", ")), more), commands
}

// unsendable reports whether a delivery that failed for this reason can never be sent.
func unsendable(reason policy.Reason) bool {
	return reason == policy.ReasonInvalidEvent || reason == policy.ReasonEventMissing
}

// waitingKeys says how many ordering keys wait.
func waitingKeys(n int64) string {
	if n > maxBlockedKeys {
		return plain.UpTo(n, maxBlockedKeys) + " ordering keys wait"
	}
	return plain.Plural(n, "ordering key waits", "ordering keys wait")
}

func adviseParked(n int64, routed bool) Advice {
	if !routed {
		return Advice{
			"parked", "", Warning, fmt.Sprintf("%s for the first relay: no route is stored yet.", counted(n, "event waits", "events wait")),
			"A relay stores its routes when it starts, and sends what matches them.",
			[]string{"outbox-relay run"},
		}
	}
	return Advice{
		"parked", "", Warning, fmt.Sprintf("%s no route.", counted(n, "event matches", "events match")),
		"Add a route to the relays' configuration and reload them (SIGHUP).",
		[]string{"outbox-relay events list --parked    # which"},
	}
}

// adviseAlerts says what to do about the open alerts that nothing before them explains.
func adviseAlerts(alerts []alert.Alert, before []Advice) (all []Advice) {
	explained := func(subject string, whys ...string) bool {
		return slices.ContainsFunc(before, func(a Advice) bool {
			return slices.Contains(whys, a.Why) && (a.Subject == "" || a.Subject == subject)
		})
	}
	for _, a := range alerts {
		switch a.Rule {
		case alert.RuleFailed, alert.RuleBreakerOpen, alert.RuleBlockedKeys, alert.RuleUnserved, alert.RuleParked, alert.RuleQuarantined, alert.RuleNeverDelivered:
			continue // counted above, or over since
		case alert.RuleLag:
			if explained(a.Subject, "no_relay", "paused", "held", "unserved", "quarantined") {
				continue
			}
		}
		remedy := ""
		if a.Rule == alert.RuleLag {
			remedy = "The receiver is slower than what comes in (raise max_in_flight or rate_limit of the destination, then reload the relay), or the database is slow."
		}
		command := a.Command()
		if command == "outbox-relay status" {
			command = "outbox-relay relays    # which relays live, and what each has in flight"
		}
		all = append(all, Advice{a.Rule, a.Subject, Warning, a.Happened() + ".", remedy, []string{command}})
	}
	return all
}

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
