package run

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/admin"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/metrics"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/relay"
)

// metricsWriteTimeout bounds one answer of the monitor.
const metricsWriteTimeout = 30 * time.Second

// A monitor serves metrics and health beside the relay. Without a server it is off, and costs the
// relay nothing.
type monitor struct {
	server  *admin.Server
	metrics *metrics.Metrics // nil: of several outboxes
	several *metrics.Several // nil: of one outbox
}

// openMonitor opens metrics.listen.
func openMonitor(ctx context.Context, c *config.Config, version string) (m monitor, err error) {
	m.server, err = admin.Listen(ctx, admin.Listener{
		Setting: "metrics.listen", Address: c.MetricsListen, Configured: c.Given("metrics.listen"), WriteTimeout: metricsWriteTimeout, Log: c.Log,
	})
	if m.server == nil {
		return m, err
	}
	cfg := metrics.Config{
		Version: version, Destinations: post.Names(c.Relay.Destinations), Most: c.MetricsDestinations, PollInterval: c.Relay.PollInterval, Allows: c.Guard().Allows, Log: c.Log,
	}
	if len(c.Outboxes) > 0 {
		m.several = metrics.NewSeveral(cfg)
	} else {
		m.metrics = metrics.New(cfg)
	}
	return m, nil
}

// hooks returns what the relay calls; the zero value when the monitor is off.
func (m monitor) hooks() relay.Hooks {
	if m.server == nil {
		return relay.Hooks{}
	}
	return m.metrics.Hooks()
}

// countSpans returns what counts spans that were exported, or dropped; nil when the monitor is off.
func (m monitor) countSpans() func(exported bool, spans int) {
	if m.server == nil {
		return nil
	}
	if m.several != nil {
		return m.several.CountSpans
	}
	return m.metrics.CountSpans
}

// start serves until end is called, also while the relay drains after stopping is done.
func (m monitor) start(stopping context.Context, r *relay.Relay) (end func()) {
	if m.server == nil {
		return func() {}
	}
	m.metrics.Follow(r.State, r.CountBacklog)
	m.metrics.StopsWhen(func() bool { return stopping.Err() != nil })
	return m.serve(stopping, m.metrics.Handler(), m.metrics.Sample)
}

// startSeveral is start for the relays of several outboxes.
func (m monitor) startSeveral(stopping context.Context) (end func()) {
	if m.server == nil {
		return func() {}
	}
	return m.serve(stopping, m.several.Handler(), m.several.Sample)
}

func (m monitor) serve(stopping context.Context, handler http.Handler, sample func(context.Context)) (end func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(stopping))
	sampling, stopSampling := context.WithCancel(stopping)
	var running sync.WaitGroup
	running.Go(func() { sample(sampling) })
	running.Go(func() { m.server.Run(ctx, handler) })
	return func() {
		stopSampling()
		cancel()
		running.Wait()
	}
}
