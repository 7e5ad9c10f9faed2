package relay

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Printable returns a text of unknown origin as one line that terminals, logs and chats show and none of them obeys.
// White space of every kind becomes a blank. Every other character without a glyph becomes U+FFFD, and so does what is
// not UTF-8: control and format characters, such as escape sequences, changes of the text's direction, zero-width and
// tag characters; separators of lines and paragraphs; private and unassigned characters.
//
// They are replaced and not removed. Removal would join the characters on both sides, which may deceive an earlier filter, and
// the reader would not see that the text had hidden characters.
func Printable(text string) string {
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

// maxMessage bounds what is stored of an error, in bytes.
const maxMessage = 4 << 10

// clip makes a text storable: [Printable], which leaves no NUL for PostgreSQL to refuse, and at most maxMessage bytes.
func clip(text string) string { return shorten(Printable(text), maxMessage) }

// shorten cuts a text to at most limit bytes of valid UTF-8, the sign of the cut included.
func shorten(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(text[:limit-len("…")], "") + "…"
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
