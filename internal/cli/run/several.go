package run

import (
	"context"
	"slices"

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
	cfg.SleepAfter = c.SleepAfter
	tidy, tuner := &tidier{}, newGCTuner()
	pages, err := openConsoles(inv.Ctx, c, inv.Version)
	if err != nil {
		monitor.server.Close()
		return err
	}
	of := outboxObservers{monitor: monitor, pages: pages, tidy: tidy, tuner: tuner, config: c}
	group, err := outboxes.New(cfg, outboxesOf(c), func(name string) (outboxes.Observer, error) { return of.observe(inv.Ctx, name) })
	if err != nil {
		monitor.server.Close()
		pages.close()
		return cli.ExitError{Code: cli.ExitConfig, Err: err}
	}
	c.Log.Info().Str("name", cfg.Name).Str("version", cfg.Version).Str("config", c.File).
		Strs("databases", outboxNames(c)).Strs("destinations", hosts(cfg.Destinations)).Str("metrics", monitor.server.Address()).Str("page", pages.server.Address()).Msg("starting")
	if names := c.Unsigned(); len(names) > 0 {
		c.Log.Warn().Strs("destinations", names).Msg("requests to these destinations are not signed: they have no signing_secrets")
	}
	rl := newReloader(inv, c, group, level)
	rl.apply = func(c *config.Config, cfg relay.Config) ([]string, error) {
		of.config = c
		cfg.SleepAfter = c.SleepAfter
		return group.Reload(cfg, outboxesOf(c))
	}
	rl.page = pages.reloaded
	c.Release()
	defer monitor.startSeveral(inv.Ctx)()
	defer pages.start(inv.Ctx)()
	return runBeside(inv, group, rl, tidy)
}

// outboxObservers make what observes each of several outboxes.
type outboxObservers struct {
	monitor monitor
	pages   *consoles
	tidy    *tidier
	tuner   *gcTuner
	config  *config.Config // with the outboxes that are observed next
}

func (all *outboxObservers) observe(ctx context.Context, name string) (o outboxes.Observer, err error) {
	var follow []func(state func() relay.State, count outboxes.Count)
	var ended []func()
	if all.monitor.server != nil {
		of := all.monitor.several.Add(name)
		o.Hooks = of.Hooks()
		follow = append(follow, func(state func() relay.State, count outboxes.Count) { of.Follow(state, count) })
		ended = append(ended, func() { all.monitor.several.Remove(of) })
	}
	if all.pages.server != nil {
		at := slices.IndexFunc(all.config.Outboxes, func(o config.Outbox) bool { return o.Name == name })
		one := all.config.With(all.config.Outboxes[at])
		if one.Relay.History != nil {
			one.Relay.History = relay.NewHistory()
		}
		site, err := all.pages.add(ctx, one, name)
		if err != nil {
			return outboxes.Observer{}, err
		}
		one.Release()
		o.Hooks, o.History = site.control.Hooks(o.Hooks), one.Relay.History
		follow = append(follow, func(state func() relay.State, _ outboxes.Count) { all.pages.follow(site, state) })
		ended = append(ended, func() { all.pages.remove(site) })
	}
	o.Follow = func(state func() relay.State, count outboxes.Count) {
		for _, call := range follow {
			call(state, count)
		}
	}
	o.Ended = func() {
		for _, call := range ended {
			call()
		}
	}
	idle := o.Hooks.Idle
	o.Hooks = all.tidy.hooks(all.tuner.hooks(o.Hooks))
	o.Hooks.Idle = idle // one idle outbox says nothing of the others: the tuner sees by the claims when all are quiet
	return o, nil
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
