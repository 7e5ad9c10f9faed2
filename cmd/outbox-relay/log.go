package main

import (
	"io"
	"maps"
	"sync/atomic"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
)

// logger writes to stderr: as JSON, or for people where a terminal is attached. What it writes follows level.
func (c *config) logger(inv *cli.Invocation) (log zerolog.Logger, level *logLevel) {
	level = &logLevel{}
	level.set(c.logLevel())
	return zerolog.New(logWriter(inv, c.logFormat)).Sample(level).With().Timestamp().Logger(), level
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
func logWriter(inv *cli.Invocation, format string) io.Writer {
	stderr, _ := output.Raw(inv.Stderr).(io.Writer)
	if format == "json" || format == "auto" && !output.IsTerminal(stderr) {
		return output.JSONWriter{Writer: stderr}
	}
	return zerolog.ConsoleWriter{
		Out:        stderr,
		NoColor:    !output.ShowsColors(stderr, inv.Env),
		TimeFormat: "15:04:05.000",
		FormatPrepare: func(line map[string]any) error { // its colours are the only control characters
			maps.Copy(line, output.Printable(line))
			return nil
		},
	}
}

// audit begins the line that says who changed something. It is logged at every level.
func (c *config) audit(inv *cli.Invocation, action string) *zerolog.Event {
	log, _ := c.logger(inv)
	//nolint:zerologlint // the caller sends it
	return log.Log().Str("action", action).Str("os_user", cli.OSUser()).Str("database_user", c.pool.ConnConfig.User).
		Str("database", c.database())
}
