package metrics

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// samplesAtOnce bounds how many outboxes are sampled at once: a scrape would otherwise ask for
// hundreds of samples of one server.
const samplesAtOnce = 8

// Several observes the relays of several outboxes in one process. Every series of a relay has the
// label database. It is safe for concurrent use.
type Several struct {
	cfg      Config
	registry *prometheus.Registry // of what the process has once
	spans    map[bool]prometheus.Counter
	turns    chan struct{}

	mu       sync.Mutex
	outboxes []*outbox // by name
	running  sync.WaitGroup
	sampling context.Context // of Sample; nil before it, and after its end
}

// An outbox is one of several.
type outbox struct {
	name    string
	metrics *Metrics
	end     context.CancelFunc // ends its samples
}

// NewSeveral returns metrics of no outbox yet.
func NewSeveral(cfg Config) *Several {
	s := &Several{cfg: cfg, registry: prometheus.NewRegistry(), turns: make(chan struct{}, samplesAtOnce)}
	defineProcess(s.registry, cfg.Version)
	s.spans = definer{s.registry}.spans()
	return s
}

// Add returns metrics of one more outbox. If there are metrics of this name already, they are shown
// no more.
func (s *Several) Add(name string) *Metrics {
	cfg := s.cfg
	cfg.Log = cfg.Log.With().Str("database", name).Logger()
	registry := prometheus.NewRegistry()
	m := newMetrics(cfg, registry, prometheus.WrapRegistererWith(prometheus.Labels{"database": name}, registry))
	m.spans, m.turns = s.spans, s.turns
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remove(func(o *outbox) bool { return o.name == name })
	o := &outbox{name: name, metrics: m, end: func() {}}
	s.outboxes = append(s.outboxes, o)
	slices.SortFunc(s.outboxes, func(a, b *outbox) int { return cmp.Compare(a.name, b.name) })
	s.sample(o)
	return m
}

// Remove ends what Add began, unless other metrics have taken their place.
func (s *Several) Remove(m *Metrics) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remove(func(o *outbox) bool { return o.metrics == m })
}

func (s *Several) remove(gone func(*outbox) bool) {
	s.outboxes = slices.DeleteFunc(s.outboxes, func(o *outbox) bool {
		if gone(o) {
			o.end()
		}
		return gone(o)
	})
}

func (s *Several) all() []*outbox {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.outboxes)
}

// Sample samples all outboxes, see [Metrics.Sample], until ctx is done; then /readyz says that the
// relay stops.
func (s *Several) Sample(ctx context.Context) {
	s.mu.Lock()
	s.sampling = ctx
	for _, o := range s.outboxes {
		s.sample(o)
	}
	s.mu.Unlock()
	<-ctx.Done()
	s.mu.Lock()
	s.sampling = nil
	s.mu.Unlock()
	s.running.Wait()
}

// sample begins to sample an outbox, if the others are.
func (s *Several) sample(o *outbox) {
	if s.sampling == nil {
		return
	}
	stopping := s.sampling
	o.metrics.StopsWhen(func() bool { return stopping.Err() != nil })
	var ctx context.Context
	ctx, o.end = context.WithCancel(stopping)
	s.running.Go(func() { o.metrics.Sample(ctx) })
}

// Gather returns the series of the process and of all outboxes.
func (s *Several) Gather() ([]*dto.MetricFamily, error) {
	all := prometheus.Gatherers{s.registry}
	for _, o := range s.all() {
		all = append(all, o.metrics.registry)
	}
	return all.Gather()
}

// Handler returns what serves /metrics, /healthz and /readyz: they are well when every outbox is,
// and their reasons name those that are not.
func (s *Several) Handler() http.Handler {
	return handler(s, s.cfg.Allows, s.scraped,
		func(now time.Time) []string {
			return s.reasons(func(m *Metrics) []string { return m.live(now, m.state()) })
		},
		func(now time.Time) []string {
			if all := s.all(); len(all) > 0 && all[0].metrics.health.isStopping() {
				return all[0].metrics.ready(now, all[0].metrics.state())
			}
			return s.reasons(func(m *Metrics) []string { return m.ready(now, m.state()) })
		})
}

// scraped notes that the gauges are read.
func (s *Several) scraped(ctx context.Context) {
	var waiting sync.WaitGroup
	for _, o := range s.all() {
		waiting.Go(func() { o.metrics.sampler.scraped(ctx) })
	}
	waiting.Wait()
}

// reasons returns what is wrong with each outbox, with its name.
func (s *Several) reasons(of func(*Metrics) []string) (all []string) {
	for _, o := range s.all() {
		for _, reason := range of(o.metrics) {
			all = append(all, "database "+o.name+": "+reason)
		}
	}
	return all
}

// CountSpans counts spans of attempts that were exported, or dropped. It is safe for concurrent
// use.
func (s *Several) CountSpans(exported bool, spans int) { s.spans[exported].Add(float64(spans)) }
