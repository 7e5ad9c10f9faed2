package run

import (
	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/outboxes"
	"github.com/outbox-relay/outbox-relay/relay"
)

// runSeveral serves all outboxes of the configuration.
func runSeveral(inv *cli.Invocation, c *config.Config, cfg relay.Config, monitor monitor, level *config.Level) error {
	var endTraces func()
	cfg.Spans, endTraces = openTraces(c, inv.Version, monitor)
	defer endTraces()
	tidy, tuner := &tidier{}, newGCTuner()
	observe := func(name string) (o outboxes.Observer) {
		if monitor.server != nil {
			of := monitor.several.Add(name)
			o.Hooks = of.Hooks()
			o.Follow = func(r *relay.Relay) { of.Follow(r.State, r.CountBacklog) }
			o.Ended = func() { monitor.several.Remove(of) }
		}
		idle := o.Hooks.Idle
		o.Hooks = tidy.hooks(tuner.hooks(o.Hooks))
		o.Hooks.Idle = idle // one idle outbox says nothing of the others: the tuner sees by the claims when all are quiet
		return o
	}
	group, err := outboxes.New(cfg, outboxesOf(c), observe)
	if err != nil {
		monitor.server.Close()
		return cli.ExitError{Code: cli.ExitConfig, Err: err}
	}
	c.Log.Info().Str("name", cfg.Name).Str("version", cfg.Version).Str("config", c.File).
		Strs("databases", outboxNames(c)).Strs("destinations", hosts(cfg.Destinations)).Str("metrics", monitor.server.Address()).Msg("starting")
	if names := c.Unsigned(); len(names) > 0 {
		c.Log.Warn().Strs("destinations", names).Msg("requests to these destinations are not signed: they have no signing_secrets")
	}
	rl := newReloader(inv, c, group, level)
	rl.apply = func(c *config.Config, cfg relay.Config) ([]string, error) { return group.Reload(cfg, outboxesOf(c)) }
	c.Release()
	defer monitor.startSeveral(inv.Ctx)()
	return runBeside(inv, group, rl, tidy)
}

func outboxesOf(c *config.Config) (all []outboxes.Outbox) {
	for _, o := range c.Outboxes {
		all = append(all, outboxes.Outbox{Name: o.Name, Pool: o.Pool, Schema: o.Schema})
	}
	return all
}

// outboxNames returns the names of databases; nil unless there are several.
func outboxNames(c *config.Config) (names []string) {
	for _, o := range c.Outboxes {
		names = append(names, o.Name)
	}
	return names
}
