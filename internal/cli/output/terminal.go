package output

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/mattn/go-isatty"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// IsTerminal reports whether a person may sit at the other end of a reader or writer.
func IsTerminal(stream any) bool {
	f, ok := Raw(stream).(*os.File)
	return ok && isatty.IsTerminal(f.Fd())
}

// Raw returns the stream behind a textWriter, for a command's own control characters.
func Raw(stream any) any {
	if text, ok := stream.(textWriter); ok {
		return text.Writer
	}
	return stream
}

// Colours of a terminal.
const (
	Red     = "\x1b[31m"
	Green   = "\x1b[32m"
	Yellow  = "\x1b[33m"
	NoColor = "\x1b[0m"
)

// Paint makes what is written next appear in a colour, on a terminal that [ShowsColors].
func Paint(w io.Writer, color string) {
	if text, ok := w.(textWriter); ok && text.colored {
		_, _ = io.WriteString(text.Writer, color)
	}
}

// ShowsColors reports whether a stream is a terminal whose user has not switched colours off, see
// https://no-color.org.
func ShowsColors(stream any, env []string) bool {
	return IsTerminal(stream) && !slices.ContainsFunc(env, func(entry string) bool {
		value, found := strings.CutPrefix(entry, "NO_COLOR=")
		return found && value != "" || entry == "TERM=dumb"
	})
}

// Draw writes over the line that a terminal shows; next begins another line.
func Draw(w io.Writer, text string, next bool) {
	if out, ok := Raw(w).(io.Writer); ok {
		_, _ = fmt.Fprint(out, "\r\x1b[K", plain.Line(text), map[bool]string{true: "\n"}[next])
	}
}

// ClearScreen empties a terminal, so that what follows stands at its top. Anywhere else it prints
// an empty line.
func ClearScreen(w io.Writer) {
	if out, ok := Raw(w).(io.Writer); ok && IsTerminal(w) {
		_, _ = io.WriteString(out, "\x1b[H\x1b[2J")
		return
	}
	_, _ = fmt.Fprintln(w)
}
