package run

import (
	"errors"
	"runtime/debug"
	"strings"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/outboxes"
	"github.com/outbox-relay/outbox-relay/relay"
)

// A reloader reads the configuration again whenever the process is sent SIGHUP, and puts it into
// effect. One with mistakes changes nothing.
type reloader struct {
	inv    *cli.Invocation
	apply  func(*config.Config, relay.Config) (changes []string, err error)
	refuse func(error)
	log    zerolog.Logger
	level  *config.Level
	// What stays until a restart: the format of the log, where metrics are served, the page, and
	// where spans go.
	format, metricsListen string
	metricsDestinations   int
	console               config.Admin
	traces                config.Traces
	// page shows what is in effect, but for the outboxes that refused it; nil: there is none.
	page    func(c *config.Config, refused []string)
	several bool // outboxes
}

func newReloader(inv *cli.Invocation, c *config.Config, r engine, level *config.Level) *reloader {
	return &reloader{
		inv: inv, refuse: r.RefuseReload, log: c.Log, level: level, format: c.LogFormat, metricsListen: c.MetricsListen,
		metricsDestinations: c.MetricsDestinations, console: c.Admin, traces: c.Traces, several: len(c.Outboxes) > 0,
	}
}

// run reloads at every signal until ended is closed. Signals that come meanwhile are one: what was
// read at the first of them is read again.
func (rl *reloader) run(ended <-chan struct{}) {
	for {
		select {
		case <-rl.inv.Hangups:
			rl.reload()
			debug.FreeOSMemory() // what reading the file has used
		case <-ended:
			return
		}
	}
}

func (rl *reloader) reload() {
	c := config.LoadAll(rl.inv)
	if (len(c.Outboxes) > 0) != rl.several {
		c.ProblemAt("databases", "one outbox in place of several, or several in place of one, need a restart")
	}
	for _, w := range c.Warnings {
		rl.log.Warn().Msg(w.String())
	}
	if len(c.Problems) > 0 {
		var problems []string
		for _, p := range c.Problems {
			rl.log.Error().Msg(p.String())
			problems = append(problems, p.String())
		}
		rl.log.Error().Int("problems", len(c.Problems)).Msg(unchanged)
		rl.refuse(errors.New(strings.Join(problems, "; ")))
		return
	}
	c.Log = rl.log
	cfg := c.Relay
	cfg.Version = rl.inv.Version
	changes, err := rl.apply(c, cfg)
	var refused []string
	if some, ok := errors.AsType[*outboxes.RefusedError](err); ok {
		refused = some.Names
		rl.log.Error().Err(err).Strs("databases", refused).Msg("some databases refused the new configuration and keep what they had; it is in effect for all others")
	} else if err != nil {
		rl.log.Error().Err(err).Msg(unchanged)
		return
	}
	stay := rl.needRestart(c)
	if rl.page != nil {
		rl.page(c, refused)
	}
	level := c.LogLevel()
	switch {
	case rl.level.Set(level):
		rl.log.Info().Str("level", level.String()).Msg("log.level changed")
	case err == nil && len(changes) == 0 && len(stay) == 0:
		rl.log.Info().Msg("configuration read again: nothing has changed")
	}
	if len(stay) > 0 {
		rl.log.Warn().Strs("settings", stay).Msg("some settings change only when the relay is restarted; all others are in effect")
	}
}

// needRestart returns the settings of the process that differ, and stay what they are.
func (rl *reloader) needRestart(c *config.Config) (stay []string) {
	if c.LogFormat != rl.format {
		stay = append(stay, "log.format")
	}
	if c.MetricsListen != rl.metricsListen {
		stay = append(stay, "metrics.listen")
	}
	if c.MetricsDestinations != rl.metricsDestinations {
		stay = append(stay, "metrics.destinations")
	}
	if !c.Admin.Equal(rl.console) {
		stay = append(stay, "admin")
	}
	if !c.Traces.Equal(rl.traces) {
		stay = append(stay, "traces")
	}
	return stay
}

const unchanged = "the configuration was read again and cannot be used; what was in effect stays"
