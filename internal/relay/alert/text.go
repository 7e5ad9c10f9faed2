package alert

import (
	"cmp"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/outbox-relay/outbox-relay/internal/mask"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// An Alert tells that something needs a person, or no longer does. Empty fields are not known, and
// left out of JSON.
type Alert struct {
	Rule         string     `json:"rule"`      // one of the constants
	Subject      string     `json:"subject"`   // the destination, the relay, or the database
	Count        int64      `json:"count"`     // how often it happened since OpenedAt
	OpenedAt     time.Time  `json:"opened_at"` // when it began, or returned last
	FirstEventID int64      `json:"first_event_id,string,omitempty"`
	FirstError   string     `json:"first_error,omitempty"`
	LastError    string     `json:"last_error,omitempty"`  // of what lasts: a destination that is held, trouble with the database
	Detail       string     `json:"detail,omitempty"`      // the latest state, in words
	ResolvedAt   *time.Time `json:"resolved_at,omitempty"` // when it ended; nil while it lasts
	Returned     int        `json:"returned,omitempty"`    // how often it returned soon after its end, since BeganAt
	BeganAt      time.Time  `json:"began_at"`              // when it began first
	// AcknowledgedBy has seen it and ends its repetitions, until it returns.
	AcknowledgedBy string `json:"acknowledged_by,omitempty"`
	// SilentUntil is until when nothing is sent of it; nil: it is not silenced.
	SilentUntil *time.Time `json:"silent_until,omitempty"`
	Database    string     `json:"database,omitempty"`
	// Untried is why no relay tries a destination that is held; empty: one does.
	Untried Untried `json:"-"`
	// Pending deliveries of the destination when the alert was composed, up to 10,001.
	Pending int64 `json:"pending,omitempty"`

	Source
}

// A Source says whose an alert is, and where to continue. The relay that sends it fills it in.
type Source struct {
	Entry       string `json:"entry,omitempty" db:"-"` // name of the outbox, of several that one process serves
	Environment string `json:"environment,omitempty" db:"-"`
	Relay       string `json:"relay,omitempty" db:"-"`
	Page        string `json:"page,omitempty" db:"-"`     // address of the page of alerts
	Runbook     string `json:"runbook,omitempty" db:"-"`  // address of the rule's heading in the runbook
	Repeated    bool   `json:"repeated,omitempty" db:"-"` // it was sent before, and lasts
}

// Untried is why no relay tries a destination that is held.
type Untried string

// What keeps relays from trying it.
const (
	UntriedPaused   Untried = "paused"
	UntriedUnserved Untried = "unserved"      // no living relay has the destination
	UntriedAsked    Untried = "asked_to_wait" // its Retry-After has not passed
)

func (u Untried) text() string {
	switch u {
	case UntriedPaused:
		return "it is paused, and no relay tries it before it is resumed"
	case UntriedUnserved:
		return "no running relay has it, so that none tries it"
	case UntriedAsked:
		return "it has asked to wait (Retry-After), for a minute at most, and no relay tries it before"
	}
	return "a relay tries it every few seconds, with what is due"
}

// runbook is where the headings of all rules are.
const runbook = "https://github.com/outbox-relay/outbox-relay/blob/main/docs/operations.md#alert-"

func (a Alert) latest() string { return cmp.Or(a.LastError, a.FirstError) }

// State is "firing", or "resolved" once it has ended.
func (a Alert) State() string {
	if a.ResolvedAt != nil {
		return "resolved"
	}
	return "firing"
}

// Flaps reports whether it returns so often that single returns are no news.
func (a Alert) Flaps() bool { return a.Returned >= flapsAfter }

// Bounds of each text that an alert repeats, in bytes. Chats refuse a message of more than 4,096,
// or of 2,000 characters: the alert about a receiver with a long answer would not arrive.
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

// slackVoice shows what others wrote, and what people copy, as code: Slack obeys and links nothing
// there, and shows it as it is.
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

// Text says in one line what happened, or that it is over, whose it is, what to do, and which
// command shows more. It is made for chats: the texts of others in it are [plain.Line], and no
// mention or link in them works.
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

// whose says which database, environment and relay it is about, and links to the page and the
// runbook.
func (a Alert) whose(v voice) string {
	var of []string
	for _, part := range []struct{ what, name string }{{"database", a.Database}, {"entry", a.Entry}, {"environment", a.Environment}, {"relay", a.Relay}} {
		if part.name != "" {
			of = append(of, part.what+" "+v.name(part.name))
		}
	}
	text := strings.Join(of, ", ")
	if text != "" {
		text = plain.Capital(text) + "."
	}
	for _, link := range []struct{ what, address string }{{"Page", a.Page}, {"Runbook", a.Runbook}} {
		if link.address != "" {
			text += " " + link.what + ": " + link.address
		}
	}
	return strings.TrimSpace(text)
}

// printable returns the alert with every text that others may have written made printable and
// bounded.
func (a Alert) printable() Alert {
	for _, text := range []*string{&a.Rule, &a.Subject, &a.FirstError, &a.LastError, &a.Detail, &a.AcknowledgedBy, &a.Database, &a.Environment, &a.Relay} {
		*text = plain.Clip(*text)
	}
	return a
}

// Happened says in one line what happened. Its texts are printable, and unlike those of
// [Alert.Text] not made for a chat.
func (a Alert) Happened() string { return a.happened(plainVoice()) }

// command is [Alert.Command], fit for a voice.
func (a Alert) command(v voice) string {
	a.Subject = strings.Trim(v.inert(a.Subject, maxChatName), "`")
	return a.Command()
}

// NewTest returns an alert that says of itself that it is a test.
func NewTest(now time.Time) Alert {
	return Alert{Rule: RuleTest, Subject: "test", Count: 1, OpenedAt: now, BeganAt: now, Detail: "sent by outbox-relay alerts test"}
}

// Title says in a few words which alert it is, for channels that show one above the text. It is as
// harmless as [Alert.Text].
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

// defang returns a printable text in which no mention, no link and no tag works, in whatever chat
// it is shown: @everyone, <!channel>, <users/all>, [text](target), https://, evil.example. It
// breaks them in the way of security advisories, which people recognise and can undo: [@]everyone,
// https[:]//evil[.]example.
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
