package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/mattn/go-isatty"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// isTerminal reports whether a person may sit at the other end of a reader or writer.
func isTerminal(stream any) bool {
	f, ok := raw(stream).(*os.File)
	return ok && isatty.IsTerminal(f.Fd())
}

// raw returns the stream behind a textWriter, for a command's own control characters.
func raw(stream any) any {
	if text, ok := stream.(textWriter); ok {
		return text.Writer
	}
	return stream
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
