package metrics

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outbox-relay/outbox-relay/relay"
	"github.com/outbox-relay/outbox-relay/relay/watch"
)

// followed is the relay.
type followed struct {
	state func() relay.State
	count func(ctx context.Context, limit int) (watch.Backlog, error)
}

// Follow says where the gauges come from: [relay.Relay.State] and [relay.Relay.CountBacklog]. Without it there are none.
func (m *Metrics) Follow(state func() relay.State, count func(ctx context.Context, limit int) (watch.Backlog, error)) {
	m.follows.Store(&followed{state, count})
}

// state returns the relay's; the zero value before Follow.
func (m *Metrics) state() relay.State {
	if f := m.follows.Load(); f != nil {
		return f.state()
	}
	return relay.State{}
}

func gauge(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

// described are the gauges: of the relay itself, of the database by destination, and of the database.
type described struct {
	registered, quarantined, beat        *prometheus.Desc
	inFlight, concurrency, rate, breaker *prometheus.Desc

	backlog, held, failed, lag, blocked, paused             *prometheus.Desc
	parked, unserved, undelivered, limit, sampled, duration *prometheus.Desc
}

func describe() described {
	const destination = "destination"
	return described{
		registered:  gauge("outbox_relay_registered", "1 while the relay is registered in its database, and may claim."),
		quarantined: gauge("outbox_relay_quarantined", "1 while the relay does nothing because the database is not the one that relays were accepted on."),
		beat:        gauge("outbox_relay_last_heartbeat_timestamp_seconds", "When the database last took a heartbeat of the relay, in seconds since 1970; 0: never."),
		inFlight:    gauge("outbox_in_flight_deliveries", "Deliveries that this relay has claimed and not settled.", destination),
		concurrency: gauge("outbox_concurrency_limit", "How many requests this relay may have in flight; 0 while the breaker is open.", destination),
		rate:        gauge("outbox_rate_limit", "Requests per second that this relay may make, configured or learnt from the receiver; 0: no limit.", destination),
		breaker:     gauge("outbox_breaker_state", "Circuit breaker as this relay sees it: 0 closed, 1 half-open, 2 open.", destination),
		backlog:     gauge("outbox_backlog_deliveries", "Deliveries that are pending. Counted up to outbox_sample_limit.", destination),
		held:        gauge("outbox_held_deliveries", "Pending deliveries of a destination that is paused or whose breaker is not closed. Counted up to outbox_sample_limit.", destination),
		failed:      gauge("outbox_failed_deliveries", "Deliveries that failed for good, and wait for an operator. Counted up to 1000, or outbox_sample_limit if that is less.", destination),
		lag:         gauge("outbox_lag_seconds", "Age of the oldest due delivery that no earlier one of its ordering key blocks; 0 without one. Replays do not count.", destination),
		blocked:     gauge("outbox_blocked_keys", "Ordering keys that wait behind a failed delivery. Counted up to outbox_sample_limit.", destination),
		paused:      gauge("outbox_destination_paused", "1 while an operator, or a 410 of the receiver, has paused the destination.", destination),
		parked:      gauge("outbox_parked_deliveries", "Deliveries that match no route. Counted up to outbox_sample_limit."),
		unserved:    gauge("outbox_unserved_destinations", "Destinations with pending deliveries that no registered relay serves."),
		undelivered: gauge("outbox_undelivered_events", "Events without deliveries that relays have found so far. Counted up to 1001."),
		limit:       gauge("outbox_sample_limit", "Where the counts of a sample stop: a gauge with this value stands for at least as many."),
		sampled:     gauge("outbox_sample_timestamp_seconds", "When the database was last sampled, in seconds since 1970. Gauges older than 5 minutes are left out."),
		duration:    gauge("outbox_sample_duration_seconds", "How long the last sample of the database took."),
	}
}

// gauges collects them from memory.
type gauges struct {
	*Metrics
	described
}

// Describe implements [prometheus.Collector].
func (g gauges) Describe(to chan<- *prometheus.Desc) {
	d := g.described
	for _, each := range []*prometheus.Desc{
		d.registered, d.quarantined, d.beat, d.inFlight, d.concurrency, d.rate, d.breaker, d.backlog, d.held, d.failed, d.lag, d.blocked,
		d.paused, d.parked, d.unserved, d.undelivered, d.limit, d.sampled, d.duration,
	} {
		to <- each
	}
}

// Collect implements [prometheus.Collector].
func (g gauges) Collect(to chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, value float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	d, state := g.described, g.state()
	send(d.registered, truth(state.Registered))
	send(d.quarantined, truth(g.health.quarantined.Load()))
	send(d.beat, seconds(state.Beat))
	for _, l := range state.Lanes {
		g.of(l.Destination)
		send(d.inFlight, float64(l.InFlight), l.Destination)
		send(d.concurrency, float64(l.Concurrency), l.Destination)
		send(d.rate, l.RateLimit, l.Destination)
		send(d.breaker, map[string]float64{"closed": 0, "half_open": 1, "open": 2}[l.Breaker], l.Destination)
	}
	s, recent := g.sampler.recent(time.Now())
	if !recent {
		return
	}
	for _, l := range s.backlog.Lanes {
		send(d.backlog, float64(l.Pending), l.Destination)
		send(d.held, float64(l.Pending)*truth(l.Held), l.Destination)
		send(d.failed, float64(l.Failed), l.Destination)
		send(d.lag, l.LagSeconds, l.Destination)
		send(d.blocked, float64(l.BlockedKeys), l.Destination)
		send(d.paused, truth(l.Paused), l.Destination)
	}
	send(d.parked, float64(s.backlog.Parked))
	send(d.unserved, float64(s.backlog.Unserved))
	send(d.undelivered, float64(s.backlog.Undelivered))
	send(d.limit, float64(s.backlog.Limit))
	send(d.sampled, seconds(s.at))
	send(d.duration, s.took.Seconds())
}

func truth(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

// seconds returns a time as Prometheus has it; 0 for the zero time.
func seconds(at time.Time) float64 {
	if at.IsZero() {
		return 0
	}
	return float64(at.UnixMilli()) / 1000
}
