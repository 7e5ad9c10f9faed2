package alert

import (
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/outbox-relay/outbox-relay/internal/mask"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// An Alert tells that something needs a person, or no longer does. Empty fields are not known, and left out of JSON.
type Alert struct {
	Rule         string     `json:"rule"`      // one of the constants
	Subject      string     `json:"subject"`   // the destination, the relay, or the database
	Count        int64      `json:"count"`     // how often it happened since OpenedAt
	OpenedAt     time.Time  `json:"opened_at"` // when it began, or returned last
	FirstEventID int64      `json:"first_event_id,string,omitempty"`
	FirstError   string     `json:"first_error,omitempty"`
	Detail       string     `json:"detail,omitempty"`      // the latest state, in words
	ResolvedAt   *time.Time `json:"resolved_at,omitempty"` // when it ended; nil while it lasts
	Returned     int        `json:"returned,omitempty"`    // how often it returned soon after its end, since BeganAt
	BeganAt      time.Time  `json:"began_at"`              // when it began first
	// AcknowledgedBy has seen it and ends its repetitions, until it returns.
	AcknowledgedBy string `json:"acknowledged_by,omitempty"`
	// SilentUntil is until when nothing is sent of it; nil: it is not silenced.
	SilentUntil *time.Time `json:"silent_until,omitempty"`
	Database    string     `json:"database,omitempty"`
	// Pending deliveries of the destination when the alert was composed, up to 10,001.
	Pending int64 `json:"pending,omitempty"`

	Source
}

// A Source says whose an alert is, and where to continue. The relay that sends it fills it in.
type Source struct {
	Environment string `json:"environment,omitempty" db:"-"`
	Relay       string `json:"relay,omitempty" db:"-"`
	Page        string `json:"page,omitempty" db:"-"`     // address of the page of alerts
	Runbook     string `json:"runbook,omitempty" db:"-"`  // address of the rule's heading in the runbook
	Repeated    bool   `json:"repeated,omitempty" db:"-"` // it was sent before, and lasts
}

// runbook is where the headings of all rules are.
const runbook = "https://github.com/outbox-relay/outbox-relay/blob/main/docs/operations.md#alert-"

// State is "firing", or "resolved" once it has ended.
func (a Alert) State() string {
	if a.ResolvedAt != nil {
		return "resolved"
	}
	return "firing"
}

// Flaps reports whether it returns so often that single returns are no news.
func (a Alert) Flaps() bool { return a.Returned >= flapsAfter }

// Bounds of each text that an alert repeats, in bytes. Chats refuse a message of more than 4,096, or of 2,000 characters: the
// alert about a receiver with a long answer would not arrive.
const (
	maxChatName = 255
	maxChatText = mask.MaxExcerpt
)

// A voice writes alerts for one kind of reader.
type voice struct {
	inert func(text string, limit int) string // what others wrote, so that nothing in it is obeyed
	mark  Marker                              // what people copy
	quote Marker                              // around a name
}

func unmarked(text string) string { return text }

func doubleQuoted(text string) string { return `"` + text + `"` }

// chatVoice breaks mentions and links in what others wrote.
func chatVoice() voice {
	return voice{func(text string, limit int) string { return plain.Shorten(defang(plain.Clip(text)), limit) }, unmarked, doubleQuoted}
}

// plainVoice is for terminals and pages, which obey nothing that is printable.
func plainVoice() voice {
	return voice{func(text string, _ int) string { return plain.Clip(text) }, unmarked, doubleQuoted}
}

// slackVoice shows what others wrote, and what people copy, as code: Slack obeys and links nothing there, and shows it as it is.
func slackVoice() voice {
	return voice{func(text string, limit int) string { return code(plain.Shorten(plain.Clip(text), limit)) }, code, unmarked}
}

func code(text string) string {
	if text == "" {
		return ""
	}
	return "`" + strings.ReplaceAll(text, "`", "'") + "`"
}

func (v voice) name(text string) string { return v.quote(v.inert(text, maxChatName)) }

func (v voice) text(text string) string { return v.inert(strings.TrimRight(text, ". "), maxChatText) }

// Text says in one line what happened, or that it is over, whose it is, what to do, and which command shows more. It is made for
// chats: the texts of others in it are [plain.Line], and no mention or link in them works.
func (a Alert) Text() string { return a.compose(chatVoice()) }

// SlackText is Text in the markup of Slack. What others wrote, and what people copy, is code there.
func (a Alert) SlackText() string { return a.compose(slackVoice()) }

func (a Alert) compose(v voice) string {
	var parts []string
	add := func(format string, args ...any) { parts = append(parts, fmt.Sprintf(format, args...)) }
	if a.ResolvedAt != nil {
		add("Recovered: %s. It lasted %s, since %s.", a.ended(v), plain.Span(a.ResolvedAt.Sub(a.OpenedAt)), moment(a.OpenedAt))
		if a.Flaps() {
			add("It had returned %d times since %s.", a.Returned, moment(a.BeganAt))
		}
	} else {
		reminder := ""
		if a.Repeated {
			reminder = "Still: "
		}
		add("%s%s. Since %s.", reminder, a.happened(v), moment(a.OpenedAt))
		if a.Flaps() {
			add("It comes and goes: it has returned %d times since %s.", a.Returned, moment(a.BeganAt))
		}
		remedied := a // a name is part of the sentences
		remedied.Subject = strings.Trim(v.inert(a.Subject, maxChatName), "`")
		if remedy := remedied.Remedy(v.mark); remedy != "" {
			parts = append(parts, remedy)
		}
		add("Look further: %s", v.mark(a.command(v)))
	}
	if whose := a.whose(v); whose != "" {
		parts[len(parts)-1] = strings.TrimSuffix(parts[len(parts)-1], ".") + "."
		parts = append(parts, whose)
	}
	return strings.Join(parts, " ")
}

// whose says which database, environment and relay it is about, and links to the page and the runbook.
func (a Alert) whose(v voice) string {
	var of []string
	for _, part := range []struct{ what, name string }{{"database", a.Database}, {"environment", a.Environment}, {"relay", a.Relay}} {
		if part.name != "" {
			of = append(of, part.what+" "+v.name(part.name))
		}
	}
	text := strings.Join(of, ", ")
	if text != "" {
		text = strings.ToUpper(text[:1]) + text[1:] + "."
	}
	for _, link := range []struct{ what, address string }{{"Page", a.Page}, {"Runbook", a.Runbook}} {
		if link.address != "" {
			text += " " + link.what + ": " + link.address
		}
	}
	return strings.TrimSpace(text)
}

// printable returns the alert with every text that others may have written made printable and bounded.
func (a Alert) printable() Alert {
	for _, text := range []*string{&a.Rule, &a.Subject, &a.FirstError, &a.Detail, &a.AcknowledgedBy, &a.Database, &a.Environment, &a.Relay} {
		*text = plain.Clip(*text)
	}
	return a
}

// happened says what happened, without a full stop.
func (a Alert) happened(v voice) string {
	name, detail, failure := v.name(a.Subject), v.text(a.Detail), v.text(a.FirstError)
	switch a.Rule {
	case RuleFailed:
		return labelled(fmt.Sprintf("%s to %s failed for good. First", plain.Plural(a.Count, "delivery", "deliveries"), name), a.first(v))
	case RuleLag:
		return joined("Deliveries to "+name+" lag", detail)
	case RuleBreakerOpen:
		held := ""
		if a.Pending > 0 {
			held = " (" + plain.UpTo(a.Pending, 10_000) + " pending)"
		}
		return labelled(fmt.Sprintf("%s %s, and its deliveries are held%s. First error", name, Fault(a.FirstError), held), failure)
	case RuleParked:
		return joined("Events of "+name+" match no route", detail)
	case RuleUndelivered:
		return joined("Events of "+name+" have no deliveries, so that no relay sends them", detail)
	case RuleBlockedKeys:
		return joined("Ordering keys of "+name+" are blocked", detail)
	case RuleWaitingKeys:
		return joined("Ordering keys of "+name+" wait", detail)
	case RuleRescueStorm:
		return joined("Relays of "+name+" keep dying", detail)
	case RuleVacuumBlocked:
		return joined("Database "+name+" cannot clean up", detail)
	case RulePaused:
		waiting := ""
		if a.Pending > 0 {
			waiting = " (" + plain.UpTo(a.Pending, 10_000) + " pending)"
		}
		return joined(name+" is still paused, and its deliveries wait"+waiting, detail)
	case RuleUnserved:
		return joined("Deliveries to "+name+" are unserved, as no running relay has this destination", detail)
	case RuleRoutesChanged:
		return joined("Routes of "+name+" changed, and not every running relay is configured with them", detail)
	case RuleNeverDelivered:
		fault := ""
		if a.FirstError != "" {
			fault = ": it " + Fault(a.FirstError)
		}
		return joined(name+" has accepted no delivery yet, and only a person can fix that"+fault, detail)
	case RuleReloadRefused:
		return joined("Relay "+name+" refused its new configuration", failure)
	case RuleRelaysDiffer:
		return joined("Relays differ in the settings of "+name, detail)
	case RuleRelayRefused:
		return joined("Some relays are refused by "+name+", and leave its deliveries to the others", detail, failure)
	case RuleArchive:
		return joined("The archive of "+name+" has not run when it should have", detail, failure)
	case RuleReconcile:
		return joined("The comparison of "+name+" with its receiver has not passed", detail)
	case RuleDatabase:
		return joined("Relay "+name+" has trouble with its database", failure, detail)
	case RuleQuarantined:
		return joined("A relay is quarantined and sends nothing", failure, detail)
	case RuleTest:
		return "This is a test of the alert channels. Nothing is wrong"
	}
	return joined(v.inert(a.Rule, maxChatName)+" of "+name, detail, a.first(v))
}

// first names the first event and its error, as far as they are known: the code that fires an alert may leave both out.
func (a Alert) first(v voice) string {
	event := ""
	if a.FirstEventID != 0 {
		event = fmt.Sprintf("event %d", a.FirstEventID)
	}
	return joined(event, v.text(a.FirstError))
}

// labelled returns "label: text", and without a text only what stands before the label's own sentence.
func labelled(label, text string) string {
	if text == "" {
		return label[:strings.LastIndex(label, ". ")]
	}
	return label + ": " + text
}

func (a Alert) ended(v voice) string {
	name := v.name(a.Subject)
	switch a.Rule {
	case RuleFailed:
		return fmt.Sprintf("no failed delivery to %s is left, of %d that failed", name, a.Count)
	case RuleLag:
		return "deliveries to " + name + " no longer lag"
	case RuleBreakerOpen:
		return name + " accepts deliveries again, what was held is on its way"
	case RuleParked:
		return "every event of " + name + " matches a route"
	case RuleUndelivered:
		return "every event of " + name + " has its deliveries"
	case RuleBlockedKeys:
		return "no ordering key of " + name + " is blocked"
	case RuleWaitingKeys:
		return "no ordering key of " + name + " waits for long behind a delivery that is not due"
	case RuleRescueStorm:
		return "no relay of " + name + " has died for a while"
	case RuleVacuumBlocked:
		return "database " + name + " can clean up again"
	case RulePaused:
		return name + " is no longer paused, or no delivery waits for it"
	case RuleUnserved:
		return "no delivery to " + name + " waits for a relay that serves it"
	case RuleRoutesChanged:
		return "all relays of " + name + " have the same routes"
	case RuleNeverDelivered:
		return name + " accepts deliveries, or none waits for it"
	case RuleReloadRefused:
		return "relay " + name + " uses its configuration, or is gone"
	case RuleRelaysDiffer:
		return "all relays have the same settings of " + name
	case RuleRelayRefused:
		return "no relay is refused alone by " + name
	case RuleArchive:
		return "the archive of " + name + " has run"
	case RuleReconcile:
		return "everything compared that was delivered to " + name + " took effect, once"
	case RuleDatabase:
		return "relay " + name + " works with its database again"
	case RuleQuarantined:
		return "the relay is no longer quarantined"
	}
	return v.inert(a.Rule, maxChatName) + " of " + name + " is over"
}

// Happened says in one line what happened. Its texts are printable, and unlike those of [Alert.Text] not made for a chat.
func (a Alert) Happened() string { return a.happened(plainVoice()) }

// command is [Alert.Command], fit for a voice.
func (a Alert) command(v voice) string {
	a.Subject = strings.Trim(v.inert(a.Subject, maxChatName), "`")
	return a.Command()
}

// Command returns the command that shows what the alert is about.
func (a Alert) Command() string {
	switch a.Rule {
	case RuleFailed, RuleBlockedKeys:
		return "outbox-relay events list --status failed --destination " + shellWord(a.Subject)
	case RuleWaitingKeys, RuleNeverDelivered:
		if a.FirstEventID != 0 {
			return fmt.Sprintf("outbox-relay events show %d", a.FirstEventID)
		}
	case RuleParked:
		return "outbox-relay events list --parked"
	case RuleRoutesChanged:
		return "outbox-relay routes list"
	case RuleUndelivered:
		return "outbox-relay events create-deliveries"
	case RuleQuarantined:
		return "outbox-relay identity show"
	case RuleReloadRefused:
		return "outbox-relay config check"
	case RuleRelaysDiffer, RuleRelayRefused:
		return "outbox-relay relays"
	case RuleArchive:
		return "outbox-relay archive run"
	case RuleReconcile:
		return "outbox-relay reconcile --destination " + shellWord(a.Subject)
	case RuleDatabase:
		return "outbox-relay doctor"
	case RuleTest:
		return "outbox-relay alert test"
	}
	return "outbox-relay status"
}

// RuleTest is that of a test of the channels.
const RuleTest = "test"

// NewTest returns an alert that says of itself that it is a test.
func NewTest(now time.Time) Alert {
	return Alert{Rule: RuleTest, Subject: "test", Count: 1, OpenedAt: now, BeganAt: now, Detail: "sent by outbox-relay alert test"}
}

// Title says in a few words which alert it is, for channels that show one above the text. It is as harmless as [Alert.Text].
func (a Alert) Title() string {
	v := chatVoice()
	return fmt.Sprintf("outbox-relay: %s %s: %s", v.inert(a.Rule, maxChatName), v.inert(a.Subject, maxChatName), a.State())
}

func joined(texts ...string) string {
	var parts []string
	for _, text := range texts {
		if text != "" {
			parts = append(parts, text)
		}
	}
	return strings.Join(parts, ": ")
}

func moment(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 UTC") }

// shellWord quotes a word for a shell, unless it needs no quotes: people will paste it.
func shellWord(word string) string {
	return plain.ShellWord(plain.Clip(word))
}

// defang returns a printable text in which no mention, no link and no tag works, in whatever chat it is shown: @everyone,
// <!channel>, <users/all>, [text](target), https://, evil.example. It breaks them in the way of security advisories,
// which people recognise and can undo: [@]everyone, https[:]//evil[.]example.
func defang(text string) string {
	text = strings.NewReplacer("@", "[@]", "＠", "[@]", "://", "[:]//", "<", "‹", ">", "›").Replace(text)
	text = strings.ReplaceAll(text, "](", "] (") // which the first replacements may have made
	var b strings.Builder
	before := ' '
	for i, r := range text {
		after, _ := utf8.DecodeRuneInString(text[i+utf8.RuneLen(r):])
		if strings.ContainsRune(".。．｡", r) && !strings.ContainsRune(" .", before) && unicode.IsLetter(after) { // a host's name, without a scheme
			b.WriteString("[.]")
		} else {
			b.WriteRune(r)
		}
		before = r
	}
	return b.String()
}
