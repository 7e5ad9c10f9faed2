package metrics

import (
	"cmp"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay"
)

// Config is what New needs.
type Config struct {
	// Version of the program.
	Version string
	// Destinations of the configuration. Unless there are more than Most, they get their series at
	// once. Those of a later configuration get theirs when they are first seen.
	Destinations []string
	// Most bounds how many destinations have their own series. All others are counted together,
	// as the destination "other". 0: 100. See choose.go.
	Most int
	// PollInterval of the relay. /healthz expects a turn of the claimer at least so often, and some
	// time more.
	PollInterval time.Duration
	// SampleInterval is the time between two samples. 0: 15 s. A sample that takes long makes the
	// next one later: all of them together take at most a hundredth of the time.
	SampleInterval time.Duration
	// Allows reports whether a request for /metrics may name a host. nil: any.
	Allows func(host string) bool
	// Log for failed samples.
	Log zerolog.Logger
}

// Bounds of the histograms, in seconds and in deliveries. Each bound costs a series per
// destination, outcome or class.
var (
	latencyBounds  = []float64{0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 0.5, 1, 5, 10, 60, 600, 3600, 86400}
	durationBounds = []float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30}
	sizeBounds     = []float64{0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000}
)

// Metrics observes one relay. It is safe for concurrent use.
type Metrics struct {
	cfg      Config
	registry *prometheus.Registry
	register prometheus.Registerer // for the registry
	turns    chan struct{}         // a place for each sample at once; nil: any number

	restFactor int // see the constant; less in tests

	settled                             *prometheus.CounterVec
	claimed, duplicates, droppedHeaders *prometheus.CounterVec
	latency, dueLatency, answer         *prometheus.HistogramVec
	claimTime, claimSize                prometheus.Histogram
	settleTime, settleSize, batchSize   prometheus.Histogram
	stale, rescues, errors              prometheus.Counter
	archived                            prometheus.Counter
	wakes                               map[relay.Wake]prometheus.Counter
	notified, reloads                   map[string]prometheus.Counter
	spans                               map[bool]prometheus.Counter // by whether they were exported

	destinations destinations

	follows atomic.Pointer[followed]
	health  health
	sampler sampler
}

// A result is what becomes of a delivery.
type result struct {
	outcome policy.Outcome
	reason  policy.Reason
}

// results of what is not about a destination.
const (
	succeeded = "success"
	failed    = "failure"
)

// New returns metrics. Every series of the configured destinations is at zero, unless there are
// more than may have their own.
func New(cfg Config) *Metrics {
	registry := prometheus.NewRegistry()
	defineProcess(registry, cfg.Version)
	spans := definer{registry}.spans()
	m := newMetrics(cfg, registry, registry)
	m.spans = spans
	return m
}

// newMetrics returns metrics of a relay alone, without those of the process.
func newMetrics(cfg Config, registry *prometheus.Registry, register prometheus.Registerer) *Metrics {
	m := &Metrics{cfg: cfg, registry: registry, register: register, restFactor: restFactor}
	m.define()
	m.destinations = destinations{most: cmp.Or(cfg.Most, DefaultMost), known: map[string]*destination{}}
	m.begin(cfg.Destinations)
	m.sampler = newSampler()
	m.register.MustRegister(gauges{m})
	return m
}

// defineProcess registers what the process has once, however many outboxes it serves.
func defineProcess(registry *prometheus.Registry, version string) {
	build := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "outbox_build_info", Help: "1, labelled with the version of the relay."}, []string{"version"})
	build.WithLabelValues(version).Set(1)
	registry.MustRegister(build, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
}

// spans are counters of spans, by whether they were exported.
func (d definer) spans() map[bool]prometheus.Counter {
	spans := d.counters("outbox_trace_spans_total", "Spans of attempts that the collector has taken (success), or that were lost (failure).", "result")
	return map[bool]prometheus.Counter{true: spans.WithLabelValues(succeeded), false: spans.WithLabelValues(failed)}
}

func (m *Metrics) define() {
	factory := definer{m.register}
	m.claimed = factory.counters("outbox_claimed_deliveries_total", "Deliveries that this relay has claimed.", "destination")
	m.duplicates = factory.counters("outbox_duplicate_deliveries_total", "Deliveries that a stream acknowledged as duplicates: it had stored an earlier attempt.", "destination")
	m.droppedHeaders = factory.counters("outbox_dropped_headers_total", "Headers of events that were not sent: event_headers of the destination does not name them.", "destination")
	m.settled = factory.counters("outbox_settled_deliveries_total",
		"Deliveries whose outcome this relay has written: delivered, retry, fail or hold (given back without spending an attempt).", "destination", "outcome", "reason")
	m.answer = factory.histograms("outbox_attempt_duration_seconds", "Duration of the POSTs, by what became of them.", durationBounds, "destination", "outcome")
	m.latency = factory.histograms("outbox_delivery_latency_seconds",
		"Time from when the event became due (its created_at, or a later available_at) until its receiver accepted it, with all waits and attempts.",
		latencyBounds, "destination", "class")
	m.dueLatency = factory.histograms("outbox_delivery_due_latency_seconds",
		"Time from when a delivery became due until its receiver accepted it: what relay and receiver add.", latencyBounds, "destination", "class")
	m.claimTime = factory.histograms("outbox_claim_duration_seconds", "Duration of the statements that claim.", durationBounds).WithLabelValues().(prometheus.Histogram)
	m.claimSize = factory.histograms("outbox_claim_size_deliveries", "Deliveries that a claim brought.", sizeBounds).WithLabelValues().(prometheus.Histogram)
	m.batchSize = factory.histograms("outbox_batch_size_events", "Events in one request of destinations with batch.", sizeBounds).WithLabelValues().(prometheus.Histogram)
	m.settleTime = factory.histograms("outbox_settle_duration_seconds", "Duration of the writes of outcomes, one batch each.", durationBounds).WithLabelValues().(prometheus.Histogram)
	m.settleSize = factory.histograms("outbox_settle_size_deliveries", "Deliveries in one batch of outcomes.", sizeBounds).WithLabelValues().(prometheus.Histogram)
	m.stale = factory.counters("outbox_stale_settles_total", "Outcomes that came too late: another relay had claimed the delivery meanwhile.").WithLabelValues()
	m.rescues = factory.counters("outbox_rescues_total", "Dead relays whose claims this relay has given back.").WithLabelValues()
	m.errors = factory.counters("outbox_database_errors_total", "Failed statements, which the relay repeats.").WithLabelValues()
	m.archived = factory.counters("outbox_archived_events_total", "Events that this relay has moved into the archive.").WithLabelValues()

	wakes := factory.counters("outbox_wakeups_total", "Waits of the claimer, by what ended them: notify, poll, or room in a destination that was full.", "cause")
	m.wakes = map[relay.Wake]prometheus.Counter{}
	for _, by := range relay.Wakes() {
		m.wakes[by] = wakes.WithLabelValues(string(by))
	}
	m.notified = ended(factory.counters("outbox_alert_notifications_total", "Alerts that this relay has sent to a channel (success), or could not send (failure).", "result"))
	m.reloads = ended(factory.counters("outbox_reloads_total", "Reloads of the configuration that took effect (success), or changed nothing because of a mistake (failure).", "result"))
}

// ended returns the counters of both ways in which something ends.
func ended(of *prometheus.CounterVec) map[string]prometheus.Counter {
	return map[string]prometheus.Counter{succeeded: of.WithLabelValues(succeeded), failed: of.WithLabelValues(failed)}
}

// A definer registers metrics.
type definer struct{ registry prometheus.Registerer }

func (d definer) counters(name, help string, labels ...string) *prometheus.CounterVec {
	return promauto.With(d.registry).NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
}

func (d definer) histograms(name, help string, bounds []float64, labels ...string) *prometheus.HistogramVec {
	return promauto.With(d.registry).NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: bounds}, labels)
}
