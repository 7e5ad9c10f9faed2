package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/mattn/go-isatty"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// show prints what a command found: as JSON with the data intact, or by write, which gets it as [printable] text.
func show[T any](w io.Writer, asJSON bool, found T, write func(io.Writer, T) error) error {
	if asJSON {
		return writeJSON(w, found)
	}
	return write(w, printable(found))
}

// printable returns a copy of a value in which every string is [plain.Line], however deep: no column of a table can
// be forgotten, and none can begin a line.
func printable[T any](value T) T {
	v := reflect.ValueOf(&value).Elem()
	v.Set(printableCopy(v))
	return value
}

func printableCopy(v reflect.Value) reflect.Value {
	c := reflect.New(v.Type()).Elem()
	c.Set(v)
	switch v.Kind() {
	case reflect.String:
		c.SetString(plain.Line(v.String()))
	case reflect.Pointer:
		if !v.IsNil() {
			c.Set(reflect.New(v.Type().Elem()))
			c.Elem().Set(printableCopy(v.Elem()))
		}
	case reflect.Interface:
		if !v.IsNil() {
			c.Set(printableCopy(v.Elem()))
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if c.Field(i).CanSet() {
				c.Field(i).Set(printableCopy(v.Field(i)))
			}
		}
	case reflect.Slice:
		if v.IsNil() {
			break
		}
		c.Set(reflect.AppendSlice(reflect.MakeSlice(v.Type(), 0, v.Len()), v))
		fallthrough
	case reflect.Array:
		for i := range v.Len() {
			c.Index(i).Set(printableCopy(v.Index(i)))
		}
	case reflect.Map:
		if v.IsNil() {
			break
		}
		c.Set(reflect.MakeMap(v.Type()))
		for key, value := range v.Seq2() {
			c.SetMapIndex(printableCopy(key), printableCopy(value))
		}
	}
	return c
}

// A textWriter passes on printable lines only. It wraps the output streams of the process, for texts that a command did not
// make printable itself.
type textWriter struct {
	io.Writer
	colored bool // it is a terminal that shows colours
}

// Colours of a terminal.
const (
	red       = "\x1b[31m"
	green     = "\x1b[32m"
	yellow    = "\x1b[33m"
	plainText = "\x1b[0m"
)

// paint makes what is written next appear in a colour, on a terminal that [showsColors].
func paint(w io.Writer, color string) {
	if text, ok := w.(textWriter); ok && text.colored {
		_, _ = io.WriteString(text.Writer, color)
	}
}

// showsColors reports whether a stream is a terminal whose user has not switched colours off, see https://no-color.org.
func showsColors(stream any, env []string) bool {
	return isTerminal(stream) && !slices.ContainsFunc(env, func(entry string) bool {
		value, found := strings.CutPrefix(entry, "NO_COLOR=")
		return found && value != "" || entry == "TERM=dumb"
	})
}

func (w textWriter) Write(p []byte) (int, error) {
	var b strings.Builder
	for line := range strings.Lines(string(p)) {
		text, ended := strings.CutSuffix(line, "\n")
		b.WriteString(plain.Line(text))
		if ended {
			b.WriteByte('\n')
		}
	}
	if _, err := io.WriteString(w.Writer, b.String()); err != nil {
		return 0, err
	}
	return len(p), nil
}

// raw returns the stream behind a textWriter, for a command's own control characters.
func raw(stream any) any {
	if text, ok := stream.(textWriter); ok {
		return text.Writer
	}
	return stream
}

// draw writes over the line that a terminal shows; next begins another line.
func draw(w io.Writer, text string, next bool) {
	if out, ok := raw(w).(io.Writer); ok {
		_, _ = fmt.Fprint(out, "\r\x1b[K", plain.Line(text), map[bool]string{true: "\n"}[next])
	}
}

// clearScreen empties a terminal, so that what follows stands at its top. Anywhere else it prints an empty line.
func clearScreen(w io.Writer) {
	if out, ok := raw(w).(io.Writer); ok && isTerminal(w) {
		_, _ = io.WriteString(out, "\x1b[H\x1b[2J")
		return
	}
	_, _ = fmt.Fprintln(w)
}

// A jsonWriter escapes the characters that are not printable in the JSON written to it. The strings decode to the same text, and
// a terminal that shows the JSON obeys none of them: encoders escape the control characters below U+0020 only.
type jsonWriter struct{ io.Writer }

func (w jsonWriter) Write(p []byte) (int, error) {
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

// writeJSON prints a value as indented JSON.
func writeJSON(w io.Writer, value any) error {
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(value); err != nil {
		return err
	}
	_, err := jsonWriter{w}.Write(b.Bytes())
	return err
}

// isTerminal reports whether a person may sit at the other end of a reader or writer.
func isTerminal(stream any) bool {
	f, ok := raw(stream).(*os.File)
	return ok && isatty.IsTerminal(f.Fd())
}
