// Package plain makes text for people: one line, bounded, in which nothing is obeyed by a terminal,
// a log or a chat.
package plain

import (
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Line returns a text of unknown origin as one line that terminals, logs and chats show and none of
// them obeys. White space of every kind becomes a blank. Every other character without a glyph
// becomes U+FFFD, and so does what is not UTF-8: control and format characters, such as escape
// sequences, changes of the text's direction, zero-width and tag characters; separators of lines
// and paragraphs; private and unassigned characters.
//
// They are replaced and not removed. Removal would join the characters on both sides, which may
// deceive an earlier filter, and the reader would not see that the text had hidden characters.
func Line(text string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r), r == brailleBlank:
			return ' '
		case !unicode.IsPrint(r), unicode.In(r, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector):
			return utf8.RuneError
		}
		return r
	}, strings.ToValidUTF8(text, string(utf8.RuneError)))
}

// brailleBlank is a symbol by its category, and shown as nothing.
const brailleBlank = '\u2800'

// MaxBytes bounds what is stored of an error, in bytes.
const MaxBytes = 4 << 10

// Capital returns the text with its first letter, which is of ASCII, in upper case.
func Capital(text string) string { return strings.ToUpper(text[:1]) + text[1:] }

// OrBlank returns a text, an absent one as nothing.
func OrBlank(text *string) string {
	if text == nil {
		return ""
	}
	return *text
}

// Clip makes a text storable: [Line], which leaves no NUL for PostgreSQL to refuse, and at most
// [MaxBytes].
func Clip(text string) string { return Shorten(Line(text), MaxBytes) }

// Shorten cuts a text to at most limit bytes of valid UTF-8, the sign of the cut included.
func Shorten(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(text[:limit-len("…")], "") + "…"
}

// Plural returns a count and what is counted: "1 delivery", "2 deliveries".
func Plural[N int | int16 | int32 | int64](n N, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, more)
}

// Thousands sets thousands apart in a number that is written without them: 12,345.6.
func Thousands(text string) string {
	whole, _, _ := strings.Cut(text, ".")
	for at := len(whole) - 3; at > 0 && whole[at-1] != '-'; at -= 3 {
		text = text[:at] + "," + text[at:]
	}
	return text
}

// IsASCII reports whether s is printable ASCII, which can travel in a header and arrive unchanged.
func IsASCII(s string) bool {
	for i := range len(s) {
		if s[i] < 0x20 || s[i] > 0x7e {
			return false
		}
	}
	return true
}

// Span writes a duration, rounded, in at most two units: 45s, 1m55s, 12m, 2h5m, 3d4h.
func Span(d time.Duration) string {
	seconds := int(max(d, 0).Round(time.Second).Seconds())
	minutes := (seconds + 30) / 60
	hours := (seconds + 1800) / 3600
	switch {
	case seconds < 60:
		return fmt.Sprintf("%ds", seconds)
	case seconds < 600 && seconds%60 != 0:
		return fmt.Sprintf("%dm%ds", seconds/60, seconds%60)
	case minutes < 60:
		return fmt.Sprintf("%dm", minutes)
	case minutes < 24*60:
		return fmt.Sprintf("%dh%dm", minutes/60, minutes%60)
	}
	return fmt.Sprintf("%dd%dh", hours/24, hours%24)
}

// Some lists the first of names, shown at most, and says how many more there are.
func Some(names []string, shown int) string {
	more := len(names) - shown
	if more <= 0 {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:shown], ", "), more)
}

// UpTo writes what was counted up to a bound.
func UpTo[N int | int64](n, bound N) string {
	if n > bound {
		return fmt.Sprintf("more than %d", bound)
	}
	return fmt.Sprint(n)
}

// ShellFlag writes a flag with its value for a shell, such as --key value. A value that begins with
// a hyphen is bound to its flag by an equals sign: otherwise it would be read as a flag itself.
func ShellFlag(name, value string) string {
	if strings.HasPrefix(value, "-") {
		return name + "=" + ShellWord(value)
	}
	return name + " " + ShellWord(value)
}

// ShellWord quotes a word for a shell, unless it needs no quotes.
func ShellWord(word string) string {
	if strings.Trim(word, "abcdefghijklmnopqrstuvwxyz0123456789_-") == "" && word != "" && word[0] != '-' {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}
