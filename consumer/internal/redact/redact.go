// Package redact removes from texts of unknown origin what must not reach a table, a log or a
// terminal.
package redact

import (
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	// maxRedactedBytes bounds what is kept of an error's text.
	maxRedactedBytes = 1 << 10
	// maxScannedBytes bounds what is read: an error may hold a whole response.
	maxScannedBytes = 4 << 10

	masked = "***"
)

// Text makes a text of unknown origin fit for a table, a log and a terminal: valid UTF-8 on one
// line, without control characters, at most 1 KiB, and without what can be recognised as a
// credential. It hides too much rather than too little. Redacting twice changes nothing.
func Text(text string) string {
	text = flatten(head(text, maxScannedBytes))
	// A mask may be longer than what it hides, so that another cut is needed. That settles at once.
	for range 3 {
		next := strings.TrimSpace(cut(mask(text), maxRedactedBytes))
		if next == text {
			break
		}
		text = next
	}
	return text
}

// escapes are the sequences by which a text would command a terminal. None takes a line's end with
// it, which keeps words apart.
var escapes = regexp.MustCompile(`\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[^\[\]\s])`)

// flatten leaves one line of valid UTF-8. Invisible characters, such as a zero-width or a
// bidirectional mark, are removed: one within a credential would hide it from mask.
func flatten(text string) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	if strings.Contains(text, "\x1b") {
		text = escapes.ReplaceAllString(text, "")
	}
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.Is(unicode.Cf, r):
			return -1
		case unicode.IsControl(r), unicode.IsSpace(r):
			return ' '
		}
		return r
	}, text)
}

// head returns at most limit bytes of text. A word that would be cut is left out whole: the rest of
// a credential may be what makes it recognisable.
func head(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	text = text[:limit]
	if end := strings.LastIndexAny(text, " \t\r\n"); end >= 0 {
		return text[:end]
	}
	return masked
}

// cut shortens text to at most limit bytes without dividing a character.
func cut(text string, limit int) string {
	const sign = "…"
	if len(text) <= limit {
		return text
	}
	end := limit - len(sign)
	for !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + sign
}

// named is what stands before the value of a credential in connection strings, queries, JSON and
// YAML.
const named = `(?i)((?:(?:password|passwd|passphrase|pwd|secret|token|credential|` +
	`(?:api|access|private|account|signing|encryption)[ _-]?key)[\w-]*|\bpass|[?&](?:sig|key|auth|code))["'\\]*\s*[:=]\s*)`

// credentialNames are parts of what named matches, in lower case: without one of them there is
// nothing to find.
var credentialNames = []string{
	"pass", "pwd", "secret", "token", "credential", "api", "access", "private", "account", "signing", "encryption", "?", "&",
}

// unquoted values with a name end at a blank.
var unquoted = regexp.MustCompile(named + `(?:[^\s"'\\]|\\[^\s"])\S*`)

// prose are words that continue a sentence, as in "token: not found".
var prose = []string{
	"absent", "cannot", "could", "did", "does", "empty", "expired", "has", "invalid", "is", "malformed", "missing", "must", "no", "not",
	"refused", "rejected", "required", "revoked", "unknown", "was", "wrong",
}

func maskUnquoted(match string) string {
	name := match[:unquoted.FindStringSubmatchIndex(match)[3]]
	if strings.HasSuffix(name, ": ") && slices.Contains(prose, strings.TrimRight(match[len(name):], ".,;:")) {
		return match
	}
	return name + masked
}

// maskings are applied in this order: what may hold blanks comes before what ends at one. Each is
// searched only where a text holds its mark and one of its hints, in lower case, because most
// errors hold none.
var maskings = []struct {
	mark    string
	hints   []string
	find    *regexp.Regexp
	replace string
}{
	// A PEM block, also one whose end is missing.
	{"", []string{"-----begin "}, regexp.MustCompile(`-----BEGIN [^-]*-----.*?(?:-----END [^-]*-----|$)`), masked},
	// Headers: the scheme and the credential.
	{"", []string{"authorization", "cookie"}, regexp.MustCompile(`(?i)((?:authorization|cookie)["'\\]*\s*[:=]\s*)(?:["'\\\[]*[a-z][\w-]*\s+)?\S+`), "${1}" + masked},
	{"", []string{"bearer "}, regexp.MustCompile(`(?i)(bearer\s+)[^\s"'\])}]+`), "${1}" + masked},
	// Basic credentials are base64. "Basic authentication failed" holds none.
	{"", []string{"basic "}, regexp.MustCompile(`([Bb][Aa][Ss][Ii][Cc]\s+)[a-z]*[A-Z0-9+/=][\w+/=-]*`), "${1}" + masked},
	// User and password of a URL. A password may hold what a URL must not.
	{"@", []string{"://"}, regexp.MustCompile(`(://)(?:[^\s/?#@:]*:\S*|[^\s/?#]*)@`), "${1}" + masked + "@"},
	// Values with a name, unquoted ones last. They end at a blank only, because a password may hold
	// any other character; and so do quoted ones after whose end the text continues, since that
	// quote may have been the beginning.
	{`\"`, credentialNames, regexp.MustCompile(named + `\\".*?(?:\\"(?:\w\S*)?|$)`), `${1}\"` + masked + `\"`},
	{`"`, credentialNames, regexp.MustCompile(named + `"(?:[^"\\]|\\.)*(?:"(?:\w\S*)?|$)`), `${1}"` + masked + `"`},
	{`'`, credentialNames, regexp.MustCompile(named + `'(?:[^'\\]|\\.)*(?:'(?:\w\S*)?|$)`), `${1}'` + masked + `'`},
	{"", credentialNames, unquoted, ""},
	// Credentials known by their form.
	{"", []string{"hooks.slack.com"}, regexp.MustCompile(`(hooks\.slack\.com/)[^\s"'\\]+`), "${1}" + masked},
	{"", []string{"whsec_"}, regexp.MustCompile(`whsec_[\w+/=-]+`), "whsec_" + masked},
	{"", []string{"_live_", "_test_"}, regexp.MustCompile(`[a-z]+_(?:live|test)_[A-Za-z0-9]{8,}`), masked},
	{"", []string{"akia", "asia"}, regexp.MustCompile(`(?:AKIA|ASIA)[0-9A-Z]{16}`), masked},
	{"", []string{"gho_", "ghp_", "ghs_", "ghu_", "ghr_", "github_pat_", "glpat-", "xox", "aiza", "sk-"}, regexp.MustCompile(`(?:gh[opsur]_|github_pat_|glpat-|xox[a-z]-|AIza|sk-)[\w-]{16,}`), masked},
	// A JSON Web Token.
	{"", []string{"eyj"}, regexp.MustCompile(`eyJ[\w-]{4,}\.[\w-]+(?:\.[\w-]*)*`), masked},
}

// mask replaces what looks like a credential.
func mask(text string) string {
	lower := strings.ToLower(text)
	for _, m := range maskings {
		if strings.Contains(lower, m.mark) && slices.ContainsFunc(m.hints, func(hint string) bool { return strings.Contains(lower, hint) }) {
			if m.find == unquoted {
				text = unquoted.ReplaceAllStringFunc(text, maskUnquoted)
				continue
			}
			text = m.find.ReplaceAllString(text, m.replace)
		}
	}
	return text
}
