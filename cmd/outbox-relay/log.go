package main

import (
	"os"
	"slices"
	"strings"
	"time"

	"github.com/mattn/go-isatty"
	"github.com/rs/zerolog"
)

// setUpLogging sets what zerolog keeps for the whole process: field names and times. A log that cannot be written, its
// disk full or its reader gone, must not be told of on the same stderr, and stops nothing.
func setUpLogging() {
	zerolog.MessageFieldName = "msg"
	zerolog.TimeFieldFormat = "2006-01-02T15:04:05.000Z07:00"
	zerolog.TimestampFunc = func() time.Time { return time.Now().UTC() }
	zerolog.ErrorHandler = func(error) {}
}

// logger writes to stderr: as JSON, or for people where a terminal is attached.
func (inv *invocation) logger(c *config) zerolog.Logger {
	level, err := zerolog.ParseLevel(get[string](c, "log.level"))
	if err != nil {
		level = zerolog.InfoLevel
	}
	format := get[string](c, "log.format")
	w := inv.Stderr
	if format == "console" || format == "auto" && isTerminal(w) {
		w = zerolog.ConsoleWriter{
			Out:        w,
			NoColor:    !isTerminal(w) || inv.hasEnv("NO_COLOR") || slices.Contains(inv.Env, "TERM=dumb"),
			TimeFormat: "15:04:05.000",
		}
	}
	return zerolog.New(w).Level(level).With().Timestamp().Logger()
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
	f, ok := stream.(*os.File)
	return ok && isatty.IsTerminal(f.Fd())
}
