package metrics

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// samplesAtOnce bounds how many outboxes are sampled at once: a scrape would otherwise ask for hundreds of samples of one server.
const samplesAtOnce = 8

// Several observes the relays of several outboxes in one process. Every series of a relay has the label database.
type Several struct {
	// Of holds the metrics of each outbox, in the given order.
	Of []*Metrics

	names    []string
	registry *prometheus.Registry
	spans    map[bool]prometheus.Counter
	allows   func(string) bool
}

// NewSeveral returns metrics for the outboxes with these names.
func NewSeveral(cfg Config, names []string) *Several {
	s := &Several{names: names, registry: prometheus.NewRegistry(), allows: cfg.Allows}
	defineProcess(s.registry, cfg.Version)
	s.spans = definer{s.registry}.spans()
	turns, log := make(chan struct{}, samplesAtOnce), cfg.Log
	for _, name := range names {
		cfg.Log = log.With().Str("database", name).Logger()
		m := newMetrics(cfg, s.registry, prometheus.WrapRegistererWith(prometheus.Labels{"database": name}, s.registry))
		m.spans, m.turns = s.spans, turns
		s.Of = append(s.Of, m)
	}
	return s
}

// Handler returns what serves /metrics, /healthz and /readyz: they are well when every outbox is, and their reasons name those that are not.
func (s *Several) Handler() http.Handler {
	return handler(s.registry, s.allows, s.scraped,
		func(now time.Time) []string {
			return s.reasons(func(m *Metrics) []string { return m.live(now, m.state()) })
		},
		func(now time.Time) []string {
			if m := s.Of[0]; m.health.isStopping() {
				return m.ready(now, m.state())
			}
			return s.reasons(func(m *Metrics) []string { return m.ready(now, m.state()) })
		})
}

// scraped notes that the gauges are read.
func (s *Several) scraped(ctx context.Context) {
	var waiting sync.WaitGroup
	for _, m := range s.Of {
		waiting.Go(func() { m.sampler.scraped(ctx) })
	}
	waiting.Wait()
}

// reasons returns what is wrong with each outbox, with its name.
func (s *Several) reasons(of func(*Metrics) []string) (all []string) {
	for i, m := range s.Of {
		for _, reason := range of(m) {
			all = append(all, "database "+s.names[i]+": "+reason)
		}
	}
	return all
}

// CountSpans counts spans of attempts that were exported, or dropped. It is safe for concurrent use.
func (s *Several) CountSpans(exported bool, spans int) { s.spans[exported].Add(float64(spans)) }
