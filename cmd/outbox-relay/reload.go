package main

import (
	"os"
	"os/signal"
	"syscall"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/relay"
)

// hangups returns the signals that ask run to reload, from the very start: one that came earlier would end the process.
// To any other command a closed terminal is the end.
func hangups(args []string) <-chan os.Signal {
	if len(args) == 0 || args[0] != "run" {
		return nil
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGHUP)
	return signals
}

// A reloader reads the configuration again whenever the process is sent SIGHUP, and puts it into effect. One with
// mistakes changes nothing.
type reloader struct {
	inv   *invocation
	apply func(relay.Config) (changes []string, err error)
	hooks relay.Hooks
	log   zerolog.Logger
	level *logLevel
	// What stays until a restart: the format of the log, where metrics are served, the page, and where spans go.
	format, metricsListen string
	console               consoleConfig
	traces                tracesConfig
	page                  *console
}

// run reloads at every signal until ended is closed. Signals that come meanwhile are one: what was read at the first of
// them is read again.
func (rl *reloader) run(ended <-chan struct{}) {
	for {
		select {
		case <-rl.inv.Hangups:
			rl.reload()
		case <-ended:
			return
		}
	}
}

func (rl *reloader) reload() {
	c := rl.inv.load()
	for _, w := range c.Warnings {
		rl.log.Warn().Msg(w.String())
	}
	if err := c.Err(); err != nil {
		for _, p := range c.Problems {
			rl.log.Error().Msg(p.String())
		}
		rl.log.Error().Int("problems", len(c.Problems)).Msg(unchanged)
		if rl.hooks.Reloaded != nil {
			rl.hooks.Reloaded(nil, err)
		}
		return
	}
	c.log = rl.log
	cfg := c.relay
	cfg.Version = buildInfo().Version
	changes, err := rl.apply(cfg)
	if err != nil {
		rl.log.Error().Err(err).Msg(unchanged)
		return
	}
	var stay []string
	if c.logFormat != rl.format {
		stay = append(stay, "log.format")
	}
	if c.metricsListen != rl.metricsListen {
		stay = append(stay, "metrics.listen")
	}
	if !c.console.equal(rl.console) {
		stay = append(stay, "admin")
	}
	if !c.traces.equal(rl.traces) {
		stay = append(stay, "traces")
	}
	rl.page.reloaded(c)
	level := c.logLevel()
	switch {
	case rl.level.set(level):
		rl.log.Info().Str("level", level.String()).Msg("log.level changed")
	case len(changes) == 0 && len(stay) == 0:
		rl.log.Info().Msg("configuration read again: nothing has changed")
	}
	if len(stay) > 0 {
		rl.log.Warn().Strs("settings", stay).Msg("some settings change only when the relay is restarted; all others are in effect")
	}
}

const unchanged = "the configuration was read again and cannot be used; what was in effect stays"
