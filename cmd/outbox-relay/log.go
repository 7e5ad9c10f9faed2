package main

import (
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/mattn/go-isatty"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/notify"
)

// setUpLibraries sets what libraries keep for the whole process: zerolog's field names and times, and the guarded transport of
// alerts. A log that cannot be written, its disk full or its reader gone, stops nothing; stderr has no room for a
// message about itself.
func setUpLibraries() {
	notify.GuardLibraries()
	zerolog.MessageFieldName = "msg"
	zerolog.TimeFieldFormat = "2006-01-02T15:04:05.000Z07:00"
	zerolog.TimestampFunc = func() time.Time { return time.Now().UTC() }
	zerolog.ErrorHandler = func(error) {}
}

// logger writes to stderr: as JSON, or for people where a terminal is attached. What it writes follows level.
func (inv *invocation) logger(c *config) (log zerolog.Logger, level *logLevel) {
	level = &logLevel{}
	level.set(c.logLevel())
	return zerolog.New(inv.logWriter(c.logFormat)).Sample(level).With().Timestamp().Logger(), level
}

func (c *config) logLevel() zerolog.Level {
	level, err := zerolog.ParseLevel(c.logLevelName)
	if err != nil {
		return zerolog.InfoLevel
	}
	return level
}

// A logLevel is the lowest level that is written, which may change at any time. A logger's own level cannot; but a
// logger asks its sampler before it makes a line.
type logLevel struct{ lowest atomic.Int32 }

// set changes the level and reports whether it was another one.
func (l *logLevel) set(level zerolog.Level) bool { return l.lowest.Swap(int32(level)) != int32(level) }

// Sample implements [zerolog.Sampler].
func (l *logLevel) Sample(level zerolog.Level) bool { return int32(level) >= l.lowest.Load() }

// logWriter returns where zerolog writes its JSON to in a log.format.
func (inv *invocation) logWriter(format string) io.Writer {
	stderr, _ := raw(inv.Stderr).(io.Writer)
	if format == "json" || format == "auto" && !isTerminal(stderr) {
		return jsonWriter{stderr}
	}
	return zerolog.ConsoleWriter{
		Out:        stderr,
		NoColor:    !isTerminal(stderr) || inv.hasEnv("NO_COLOR") || slices.Contains(inv.Env, "TERM=dumb"),
		TimeFormat: "15:04:05.000",
		FormatPrepare: func(line map[string]any) error { // its colours are the only control characters
			maps.Copy(line, printable(line))
			return nil
		},
	}
}

// hasEnv reports whether a variable is set and not empty.
func (inv *invocation) hasEnv(name string) bool {
	return slices.ContainsFunc(inv.Env, func(entry string) bool {
		value, ok := strings.CutPrefix(entry, name+"=")
		return ok && value != ""
	})
}

// isTerminal reports whether a person may sit at the other end of a reader or writer.
func isTerminal(stream any) bool {
	f, ok := raw(stream).(*os.File)
	return ok && isatty.IsTerminal(f.Fd())
}

// A foreignLog takes what libraries tell the standard logger: net/http that a receiver sent an answer without a request.
// It would stand between the lines of JSON as it is.
type foreignLog struct{ log zerolog.Logger }

func (f foreignLog) Write(line []byte) (int, error) {
	// net/http quotes what the receiver sent, which belongs into no log.
	text, _, _ := strings.Cut(strings.TrimSpace(string(line)), " starting with ")
	f.log.Warn().Str("from", "library").Msg(text)
	return len(line), nil
}
