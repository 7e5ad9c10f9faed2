package run

import (
	"context"
	"errors"
	"fmt"
	"os/signal"
	"sync"
	"syscall"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/relay"
)

// Command is the command run.
type Command struct {
	config.SettingFlags
}

func (Command) Help() string {
	return `Runs until SIGTERM or SIGINT, then takes no more, waits up to relay.drain_timeout for requests in flight, and
exits 0. A second signal ends that wait: what was in flight is sent again later.

Its routes are added to those of the other relays that run, and go when the last relay that has them stops.

SIGHUP reads the configuration again, with the files and secrets it names, and puts it into effect without a stop:
destinations, routes, alerts, retention, log.level. One with mistakes changes nothing. The log says what changed, why
nothing did, and what needs a restart.

While the database is away it waits and tries again, for ever. It exits 5 if the database has another schema than this
version works with; run "outbox-relay migrate up" first. With several entries in databases it serves them all: one that
is away or has another schema is logged and tried again, and delays no other one. Deliveries that wait for a destination which no running relay
has are logged and alerted as unserved. Logs go to stderr.`
}

func (Command) Run(inv *cli.Invocation) error {
	// The log's reader may go away; a write to a closed pipe is then an error and not the end of
	// the process.
	signal.Ignore(syscall.SIGPIPE)

	c := config.LoadAll(inv)
	if err := c.Err(); err != nil {
		return err
	}
	log, level := c.Logger(inv)
	c.Log = log
	if inv.StandardLog != nil {
		inv.StandardLog(foreignLog{log})
	}
	for _, w := range c.Warnings {
		log.Warn().Msg(w.String())
	}
	cfg := c.Relay
	cfg.Version, cfg.Log = inv.Version, log
	monitor, err := openMonitor(inv.Ctx, c, inv.Version)
	if err != nil {
		return err
	}
	if len(c.Outboxes) > 0 {
		return runSeveral(inv, c, cfg, monitor, level)
	}
	page, err := openConsole(inv.Ctx, c, inv.Version)
	if err != nil {
		monitor.server.Close()
		return err
	}
	var endTraces func()
	cfg.Spans, endTraces = openTraces(c, inv.Version, monitor)
	defer endTraces()
	tidy := &tidier{}
	cfg.Hooks = tidy.hooks(newGCTuner().hooks(page.hooks(monitor.hooks())))
	r, err := relay.New(cfg)
	if err != nil {
		monitor.server.Close()
		page.close()
		return fmt.Errorf("start relay: %w", err)
	}

	log.Info().Str("name", cfg.Name).Str("version", cfg.Version).Str("config", c.File).
		Str("database", c.DatabaseName()).Strs("destinations", hosts(cfg.Destinations)).Str("metrics", monitor.server.Address()).
		Str("page", page.server.Address()).Msg("starting")
	if names := c.Unsigned(); len(names) > 0 {
		log.Warn().Strs("destinations", names).Msg("requests to these destinations are not signed: they have no signing_secrets")
	}
	rl := newReloader(inv, c, r, level)
	rl.apply = func(_ *config.Config, cfg relay.Config) ([]string, error) { return r.Reload(cfg) }
	if page.server != nil {
		rl.page = func(c *config.Config, _ []string) { page.reloaded(c) }
	}
	c.Release() // with thousands of destinations, it is more than all else that the relay has
	defer monitor.start(inv.Ctx, r)()
	defer page.start(inv.Ctx, r)()
	return runBeside(inv, r, rl, tidy)
}

// An engine delivers: a [relay.Relay], or a group of them.
type engine interface {
	Run(ctx context.Context) error
	Abort()
	RefuseReload(err error)
}

// runBeside runs the relay, and beside it what reloads its configuration, what gives memory back,
// and what ends its drain at a second signal.
func runBeside(inv *cli.Invocation, r engine, rl *reloader, tidy *tidier) error {
	ended, aborted := make(chan struct{}), false
	var beside sync.WaitGroup
	beside.Go(func() { rl.run(ended) })
	beside.Go(func() { tidy.run(ended) })
	beside.Go(func() {
		select {
		case <-inv.Aborted:
			aborted = true
			r.Abort()
		case <-ended:
		}
	})
	err := r.Run(inv.Ctx)
	close(ended)
	beside.Wait()
	if err == nil && aborted {
		return cli.ExitError{Code: cli.ExitInterrupted, Err: errors.New("a second signal ended the drain; requests that were in flight will be sent again")}
	}
	return err
}

// hosts names each destination with the host it leads to; the rest of a URL may hold a token.
func hosts(destinations []relay.Destination) []string {
	var all []string
	for _, d := range destinations {
		if u, err := post.ParseURL(d.URL); err == nil {
			all = append(all, d.Name+"="+u.Host)
		}
	}
	return all
}
