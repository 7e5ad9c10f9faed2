package metrics

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/watch"
	"github.com/outbox-relay/outbox-relay/relay"
)

// followed is the relay.
type followed struct {
	state func() relay.State
	count func(ctx context.Context, limit int) (watch.Backlog, error)
}

// Follow says where the gauges come from: [relay.Relay.State] and [relay.Relay.CountBacklog].
// Without it there are none.
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

// A gauge reads one figure of a T.
type gauge[T any] struct {
	desc  *prometheus.Desc
	value func(T) float64
	// join makes the figure of several destinations of theirs. nil: there is none for the
	// destination "other".
	join func(a, b float64) float64
}

func add(a, b float64) float64     { return a + b }
func largest(a, b float64) float64 { return max(a, b) }

// total is a gauge of the relay or of its database, and byDestination one of a destination.
func total[T any](name, help string, value func(T) float64) gauge[T] {
	return gauge[T]{desc: prometheus.NewDesc(name, help, nil, nil), value: value}
}

func byDestination[T any](name, help string, value func(T) float64, join func(a, b float64) float64) gauge[T] {
	return gauge[T]{prometheus.NewDesc(name, help, []string{"destination"}, nil), value, join}
}

// present is what the relay says of itself.
type present struct {
	relay.State
	quarantined bool
}

var relayGauges = []gauge[present]{
	total("outbox_relay_registered", "1 while the relay is registered in its database, and may claim.", func(p present) float64 { return truth(p.Registered) }),
	total("outbox_relay_quarantined", "1 while the relay does nothing because the database is not the one that relays were accepted on.", func(p present) float64 { return truth(p.quarantined) }),
	total("outbox_relay_last_heartbeat_timestamp_seconds", "When the database last took a heartbeat of the relay, in seconds since 1970; 0: never.", func(p present) float64 { return seconds(p.Beat) }),
}

var laneGauges = []gauge[relay.LaneView]{
	byDestination("outbox_in_flight_deliveries", "Deliveries that this relay has claimed and not settled.", func(l relay.LaneView) float64 { return float64(l.InFlight) }, add),
	byDestination("outbox_max_in_flight_requests", "How many requests this relay may have in flight; 0 while the breaker is open.", func(l relay.LaneView) float64 { return float64(l.Concurrency) }, nil),
	byDestination("outbox_rate_limit_requests_per_second", "Requests per second that this relay may make, configured or learnt from the receiver; 0: no limit.", func(l relay.LaneView) float64 { return l.RateLimit }, nil),
	byDestination("outbox_retry_after_remaining_seconds", "For how much longer this relay sends the destination nothing, as it has asked (Retry-After); 0: it sends.", func(l relay.LaneView) float64 { return max(0, time.Until(l.WaitUntil).Seconds()) }, largest),
	byDestination("outbox_breaker_state", "Circuit breaker as this relay sees it: 0 closed, 1 half-open, also of a relay that was refused and has sent nothing there since others were accepted, 2 open.", func(l relay.LaneView) float64 {
		return map[string]float64{"closed": 0, "half_open": 1, "open": 2}[l.Breaker]
	}, largest),
}

var backlogGauges = []gauge[watch.LaneBacklog]{
	byDestination("outbox_backlog_deliveries", "Deliveries that are pending. Counted up to outbox_sample_limit.", func(l watch.LaneBacklog) float64 { return float64(l.Pending) }, add),
	byDestination("outbox_held_deliveries", "Pending deliveries of a destination that is paused or whose breaker is not closed. Counted up to outbox_sample_limit.", func(l watch.LaneBacklog) float64 { return float64(l.Pending) * truth(l.Held) }, add),
	byDestination("outbox_failed_deliveries", "Deliveries that failed for good, and wait for an operator. Counted up to 1000, or outbox_sample_limit if that is less.", func(l watch.LaneBacklog) float64 { return float64(l.Failed) }, add),
	byDestination("outbox_lag_seconds", "Age of the oldest due delivery that no earlier one of its ordering key blocks, or event that no relay has taken yet; 0 without one. Replays do not count.", func(l watch.LaneBacklog) float64 { return l.LagSeconds }, largest),
	byDestination("outbox_waiting_deliveries", "Pending deliveries that relays have marked as behind an earlier one of their ordering key, which failed or is retried later. Counted up to outbox_sample_limit.", func(l watch.LaneBacklog) float64 { return float64(l.Waiting) }, add),
	byDestination("outbox_blocked_keys", "Ordering keys that wait behind a failed delivery. Counted up to outbox_sample_limit.", func(l watch.LaneBacklog) float64 { return float64(l.BlockedKeys) }, add),
	byDestination("outbox_destination_paused", "1 while an operator, or a 410 of the receiver, has paused the destination.", func(l watch.LaneBacklog) float64 { return truth(l.Paused) }, largest),
}

var databaseGauges = []gauge[sample]{
	total("outbox_parked_deliveries", "Deliveries that match no route. Counted up to outbox_sample_limit.", func(s sample) float64 { return float64(s.backlog.Parked) }),
	total("outbox_untaken_events", "Events that are not routed yet: no relay has taken them. Counted up to outbox_sample_limit.", func(s sample) float64 { return float64(s.backlog.Untaken) }),
	total("outbox_unserved_destinations", "Destinations with pending deliveries that no registered relay serves.", func(s sample) float64 { return float64(s.backlog.Unserved) }),
	total("outbox_undelivered_events", "Events without deliveries that relays have found so far. Counted up to 1001.", func(s sample) float64 { return float64(s.backlog.Undelivered) }),
	total("outbox_sample_limit", "Where the counts of a sample stop: a gauge with this value stands for at least as many.", func(s sample) float64 { return float64(s.backlog.Limit) }),
	total("outbox_sample_timestamp_seconds", "When the database was last sampled, in seconds since 1970. Gauges older than 5 minutes are left out.", func(s sample) float64 { return seconds(s.at) }),
	total("outbox_sample_duration_seconds", "How long the last sample of the database took.", func(s sample) float64 { return s.took.Seconds() }),
}

// gauges collects them from memory.
type gauges struct{ *Metrics }

// Describe implements [prometheus.Collector].
func (gauges) Describe(to chan<- *prometheus.Desc) {
	describe(to, relayGauges)
	describe(to, laneGauges)
	describe(to, backlogGauges)
	describe(to, databaseGauges)
}

func describe[T any](to chan<- *prometheus.Desc, all []gauge[T]) {
	for _, g := range all {
		to <- g.desc
	}
}

// Collect implements [prometheus.Collector].
func (g gauges) Collect(to chan<- prometheus.Metric) {
	state := g.state()
	s, recent := g.sampler.recent(time.Now())
	if !recent {
		s = sample{}
	}
	crowded := g.destinations.crowded(len(state.Lanes))
	if crowded {
		g.choose(time.Now(), troubled(state.Lanes, s.backlog.Lanes))
	}
	collect(to, relayGauges, present{state, g.health.quarantined.Load()})
	lanes, backlogs := joint[relay.LaneView]{all: laneGauges}, joint[watch.LaneBacklog]{all: backlogGauges}
	for _, l := range state.Lanes {
		if !crowded {
			g.lock(l.Destination) // of a reload
			g.destinations.mu.RUnlock()
		}
		if crowded && !g.destinations.chosen(l.Destination) {
			lanes.add(l)
		} else {
			collect(to, laneGauges, l, l.Destination)
		}
	}
	lanes.collect(to)
	if !recent {
		return
	}
	for _, l := range s.backlog.Lanes {
		if crowded && !g.destinations.chosen(l.Destination) {
			backlogs.add(l)
		} else {
			collect(to, backlogGauges, l, l.Destination)
		}
	}
	backlogs.collect(to)
	collect(to, databaseGauges, s)
}

// troubled returns the destinations that an operator has to look at.
func troubled(lanes []relay.LaneView, backlogs []watch.LaneBacklog) (names []string) {
	for i := range lanes {
		if lanes[i].Breaker != policy.BreakerClosed.String() {
			names = append(names, lanes[i].Destination)
		}
	}
	for i := range backlogs {
		if b := &backlogs[i]; b.Held || b.Failed > 0 || b.BlockedKeys > 0 {
			names = append(names, b.Destination)
		}
	}
	return names
}

// joint are the gauges of the destination "other".
type joint[T any] struct {
	all    []gauge[T]
	values []float64 // nil: there is none
}

func (j *joint[T]) add(of T) {
	first := j.values == nil
	if first {
		j.values = make([]float64, len(j.all))
	}
	for i, g := range j.all {
		if value := g.value(of); first || g.join == nil {
			j.values[i] = value
		} else {
			j.values[i] = g.join(j.values[i], value)
		}
	}
}

func (j *joint[T]) collect(to chan<- prometheus.Metric) {
	for i, g := range j.all {
		if j.values != nil && g.join != nil {
			to <- prometheus.MustNewConstMetric(g.desc, prometheus.GaugeValue, j.values[i], other)
		}
	}
}

func collect[T any](to chan<- prometheus.Metric, all []gauge[T], of T, labels ...string) {
	for _, g := range all {
		to <- prometheus.MustNewConstMetric(g.desc, prometheus.GaugeValue, g.value(of), labels...)
	}
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
