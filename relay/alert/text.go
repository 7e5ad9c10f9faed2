package alert

import (
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// An Alert tells that something needs a person, or no longer does.
type Alert struct {
	Rule         string     `json:"rule"`      // one of the constants
	Subject      string     `json:"subject"`   // the destination, or the database
	Count        int64      `json:"count"`     // how often it happened since OpenedAt
	OpenedAt     time.Time  `json:"opened_at"` // when the first of them happened
	FirstEventID int64      `json:"first_event_id,string"`
	FirstError   string     `json:"first_error"`
	Detail       string     `json:"detail"`                // the latest state, in words
	ResolvedAt   *time.Time `json:"resolved_at,omitempty"` // when it ended; nil while it lasts
}

// State is "firing", or "resolved" once it has ended.
func (a Alert) State() string {
	if a.ResolvedAt != nil {
		return "resolved"
	}
	return "firing"
}

// Text says in one line what happened, or that it is over, and which command shows more. It is made for chats: the texts of others
// in it are [plain.Line], and no mention or link in them works.
func (a Alert) Text() string {
	a = a.forChat()
	if a.ResolvedAt != nil {
		return fmt.Sprintf("Recovered: %s. It lasted %s, since %s.", a.ended(), plain.Span(a.ResolvedAt.Sub(a.OpenedAt)), moment(a.OpenedAt))
	}
	return fmt.Sprintf("%s. Look further: %s", strings.TrimSuffix(a.happened(), "."), a.Command())
}

// printable returns the alert with every text that others may have written made printable and bounded.
func (a Alert) printable() Alert {
	a.Rule, a.Subject, a.FirstError, a.Detail = plain.Clip(a.Rule), plain.Clip(a.Subject), plain.Clip(a.FirstError), plain.Clip(a.Detail)
	return a
}

// Bounds of each text that an alert repeats, in bytes. Chats refuse a message of more than 4,096, or of 2,000 characters: the
// alert about a receiver with a long answer would not arrive.
const (
	maxChatName = 255
	maxChatText = post.MaxExcerpt
)

// forChat returns the alert with those texts also defanged, and short.
func (a Alert) forChat() Alert {
	a = a.printable()
	a.Rule, a.Subject = plain.Shorten(defang(a.Rule), maxChatName), plain.Shorten(defang(a.Subject), maxChatName)
	a.FirstError, a.Detail = plain.Shorten(defang(a.FirstError), maxChatText), plain.Shorten(defang(a.Detail), maxChatText)
	return a
}

func (a Alert) happened() string {
	subject, detail := a.Subject, a.Detail
	switch a.Rule {
	case RuleFailed:
		return labelled(fmt.Sprintf("%s to %q failed for good since %s. First", plain.Plural(a.Count, "delivery", "deliveries"), subject, moment(a.OpenedAt)), a.first())
	case RuleLag:
		return joined(fmt.Sprintf("Deliveries to %q lag", subject), detail)
	case RuleBreakerOpen:
		text := fmt.Sprintf("Deliveries to %q are held since %s: the destination is down as a whole", subject, moment(a.OpenedAt))
		if detail != "" {
			text += ". It holds " + detail
		}
		return labelled(text+". First error", a.FirstError)
	case RuleParked:
		return joined(fmt.Sprintf("Events of %q match no route", subject), detail)
	case RuleUndelivered:
		return joined(fmt.Sprintf("Events of %q have no deliveries, so that no relay sends them", subject), detail)
	case RuleBlockedKeys:
		return joined(fmt.Sprintf("Ordering keys of %q are blocked", subject), detail)
	case RuleWaitingKeys:
		return joined(fmt.Sprintf("Ordering keys of %q wait", subject), detail)
	case RuleRescueStorm:
		return joined(fmt.Sprintf("Relays of %q keep dying", subject), detail)
	case RuleVacuumBlocked:
		return joined(fmt.Sprintf("Database %q cannot clean up", subject), detail)
	case RuleUnserved:
		text := joined(fmt.Sprintf("Deliveries to %q are unserved", subject), detail)
		return fmt.Sprintf("%s, and no running relay has this destination. Add it to a relay's configuration and reload that relay (SIGHUP), or give them up: outbox-relay discard --destination %s",
			text, shellWord(a.Subject))
	case RuleRoutesChanged:
		text := joined(fmt.Sprintf("Routes of %q changed, and not every running relay is configured with them", subject), detail)
		return text + ". Give all relays the same configuration, or stop the one that is not meant to run"
	case RuleNeverDelivered:
		return joined(fmt.Sprintf("%q has accepted no delivery yet, and fails in a way that only a person mends", subject), detail)
	case RuleQuarantined:
		return joined("A relay is quarantined and sends nothing", a.FirstError, detail)
	case RuleTest:
		return "This is a test of the alert channels. Nothing is wrong"
	}
	return joined(fmt.Sprintf("%s of %q since %s", a.Rule, subject, moment(a.OpenedAt)), detail, a.first())
}

// first names the first event and its error, as far as they are known: the code that fires an alert may leave both out.
func (a Alert) first() string {
	event := ""
	if a.FirstEventID != 0 {
		event = fmt.Sprintf("event %d", a.FirstEventID)
	}
	return joined(event, a.FirstError)
}

// labelled returns "label: text", and without a text only what stands before the label's own sentence.
func labelled(label, text string) string {
	if text == "" {
		return label[:strings.LastIndex(label, ". ")]
	}
	return label + ": " + text
}

func (a Alert) ended() string {
	subject := a.Subject
	switch a.Rule {
	case RuleFailed:
		return fmt.Sprintf("no failed delivery to %q is left, of %d that failed", subject, a.Count)
	case RuleLag:
		return fmt.Sprintf("deliveries to %q no longer lag", subject)
	case RuleBreakerOpen:
		return fmt.Sprintf("%q accepts deliveries again, what was held is on its way", subject)
	case RuleParked:
		return fmt.Sprintf("every event of %q matches a route", subject)
	case RuleUndelivered:
		return fmt.Sprintf("every event of %q has its deliveries", subject)
	case RuleBlockedKeys:
		return fmt.Sprintf("no ordering key of %q is blocked", subject)
	case RuleWaitingKeys:
		return fmt.Sprintf("no ordering key of %q waits for long behind a delivery that is not due", subject)
	case RuleRescueStorm:
		return fmt.Sprintf("no relay of %q has died for a while", subject)
	case RuleVacuumBlocked:
		return fmt.Sprintf("database %q can clean up again", subject)
	case RuleUnserved:
		return fmt.Sprintf("no delivery to %q waits for a relay that serves it", subject)
	case RuleRoutesChanged:
		return fmt.Sprintf("all relays of %q have the same routes", subject)
	case RuleNeverDelivered:
		return fmt.Sprintf("%q accepts deliveries, or none waits for it", subject)
	case RuleQuarantined:
		return "the relay is no longer quarantined"
	}
	return fmt.Sprintf("%s of %q is over", a.Rule, subject)
}

// Happened says in one line what happened. Its texts are printable, and unlike those of [Alert.Text] not made for a chat.
func (a Alert) Happened() string { return strings.TrimSuffix(a.printable().happened(), ".") }

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
	case RuleTest:
		return "outbox-relay alert test"
	}
	return "outbox-relay status"
}

// RuleTest is that of a test of the channels.
const RuleTest = "test"

// NewTest returns an alert that says of itself that it is a test.
func NewTest(now time.Time) Alert {
	return Alert{Rule: RuleTest, Subject: "test", Count: 1, OpenedAt: now, Detail: "sent by outbox-relay alert test"}
}

// Title says in a few words which alert it is, for channels that show one above the text. It is as harmless as [Alert.Text].
func (a Alert) Title() string {
	a = a.forChat()
	return fmt.Sprintf("outbox-relay: %s %s: %s", a.Rule, a.Subject, a.State())
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
