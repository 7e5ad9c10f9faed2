package output

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// WriteJSON prints a value as indented JSON.
func WriteJSON(w io.Writer, value any) error {
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(value); err != nil {
		return err
	}
	_, err := JSONWriter{w}.Write(b.Bytes())
	return err
}

// A JSONWriter escapes the characters that are not printable in the JSON written to it. The strings
// decode to the same text, and a terminal that shows the JSON obeys none of them: encoders escape
// the control characters below U+0020 only.
type JSONWriter struct{ io.Writer }

func (w JSONWriter) Write(p []byte) (int, error) {
	escaped := make([]byte, 0, len(p))
	for rest := p; len(rest) > 0; {
		r, size := utf8.DecodeRune(rest)
		if char := string(rest[:size]); r == '\n' || plain.Line(char) == char {
			escaped = append(escaped, char...)
		} else {
			escaped = appendEscape(escaped, r)
		}
		rest = rest[size:]
	}
	if _, err := w.Writer.Write(escaped); err != nil {
		return 0, err
	}
	return len(p), nil
}

func appendEscape(b []byte, r rune) []byte {
	if high, low := utf16.EncodeRune(r); high != utf8.RuneError {
		return fmt.Appendf(b, `\u%04x\u%04x`, high, low)
	}
	return fmt.Appendf(b, `\u%04x`, r)
}
