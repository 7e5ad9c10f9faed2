package config

import (
	"io"
	"maps"
	"sync/atomic"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
)

// Logger writes to stderr: as JSON, or for people where a terminal is attached. What it writes
// follows level.
func (c *Config) Logger(inv *cli.Invocation) (log zerolog.Logger, level *Level) {
	level = &Level{}
	level.Set(c.LogLevel())
	return zerolog.New(logWriter(inv, c.LogFormat)).Sample(level).With().Timestamp().Logger(), level
}

// LogLevel returns the level of log.level.
func (c *Config) LogLevel() zerolog.Level {
	level, err := zerolog.ParseLevel(c.logLevelName)
	if err != nil {
		return zerolog.InfoLevel
	}
	return level
}

// A Level is the lowest level that is written, which may change at any time. A logger's own level
// cannot; but a logger asks its sampler before it makes a line.
type Level struct{ lowest atomic.Int32 }

// Set changes the level and reports whether it was another one.
func (l *Level) Set(level zerolog.Level) bool { return l.lowest.Swap(int32(level)) != int32(level) }

// Sample implements [zerolog.Sampler].
func (l *Level) Sample(level zerolog.Level) bool { return int32(level) >= l.lowest.Load() }

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

// Audit begins the line that says who changed something. It is logged at every level. On a terminal
// it is left out unless log.format asks for it: the person there would take it for an error, and no
// terminal keeps it.
func (c *Config) Audit(inv *cli.Invocation, action string) *zerolog.Event {
	if c.LogFormat == "auto" && output.IsTerminal(inv.Stderr) {
		return nil // zerolog's methods do nothing with it
	}
	log, _ := c.Logger(inv)
	//nolint:zerologlint // the caller sends it
	return log.Log().Str("action", action).Str("os_user", cli.OSUser()).Str("database_user", c.Pool.ConnConfig.User).
		Str("database", c.DatabaseName())
}
