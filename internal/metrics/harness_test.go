package metrics

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/relay"
)

// A monitored relay runs with its metrics served over HTTP.
type monitored struct {
	testing.TB
	metrics *Metrics
	relay   *relay.Relay
	url     string
	client  *http.Client
	log     *relaytest.Buffer
	stop    func()
}

// serve serves metrics until the test ends.
func serve(t testing.TB, m *Metrics) *monitored {
	t.Helper()
	server := httptest.NewServer(m.Handler())
	t.Cleanup(server.Close)
	return &monitored{TB: t, metrics: m, url: server.URL, client: server.Client(), log: &relaytest.Buffer{}}
}

// start runs a relay with metrics that sample as often as they can.
func start(t testing.TB, cfg relay.Config) *monitored {
	t.Helper()
	var names []string
	for _, d := range cfg.Destinations {
		names = append(names, d.Name)
	}
	m := serve(t, New(Config{Version: "v1", Destinations: names, PollInterval: time.Second, SampleInterval: time.Millisecond}))
	m.metrics.restFactor = 1 // a slow sample on a busy machine would be followed by a rest of a minute
	cfg.Hooks, cfg.Log = m.metrics.Hooks(), zerolog.New(m.log)
	var err error
	m.relay, err = relay.New(cfg)
	relaytest.Must(t, err)
	m.metrics.Follow(m.relay.State, m.relay.CountBacklog)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := m.relay.Run(ctx); err != nil {
			t.Errorf("run: %v", err)
		}
	})
	running.Go(func() { m.metrics.Sample(ctx) })
	m.stop = sync.OnceFunc(func() { cancel(); running.Wait() })
	t.Cleanup(m.stop)
	return m
}

func config(t testing.TB, db *relaytest.Database, destinations ...relay.Destination) relay.Config {
	t.Helper()
	pool, err := pgxpool.ParseConfig(db.DSN)
	relaytest.Must(t, err)
	return relay.Config{Pool: pool, Destinations: destinations, PollInterval: time.Second, Name: "test", AllowSuperuser: true}
}

func to(name, url string) relay.Destination {
	return relay.Destination{Name: name, URL: url, Retry: policy.RetryPolicy{Schedule: []time.Duration{time.Millisecond}}}
}

// get returns the answer to a request.
func (m *monitored) get(path string) (code int, body string) {
	m.Helper()
	response, err := m.client.Get(m.url + path)
	relaytest.Must(m, err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	relaytest.Must(m, err)
	return response.StatusCode, string(text)
}

// scrape returns the metrics, as Prometheus's own parser reads them.
func (m *monitored) scrape() map[string]*dto.MetricFamily {
	m.Helper()
	code, text := m.get("/metrics")
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil || code != http.StatusOK {
		m.Fatalf("status %d, %v in\n%s", code, err, text)
	}
	return families
}

// value returns the sum of a metric's series with the given labels ("destination=shop"); of a
// histogram, its count. have is false when there is no such series.
func value(families map[string]*dto.MetricFamily, name string, labels ...string) (sum float64, have bool) {
	for _, series := range families[name].GetMetric() {
		var own []string
		for _, pair := range series.GetLabel() {
			own = append(own, pair.GetName()+"="+pair.GetValue())
		}
		if slices.ContainsFunc(labels, func(l string) bool { return !slices.Contains(own, l) }) {
			continue
		}
		have = true
		sum += series.GetCounter().GetValue() + series.GetGauge().GetValue() + float64(series.GetHistogram().GetSampleCount())
	}
	return sum, have
}

// becomes waits until a metric has a value.
func (m *monitored) becomes(want float64, name string, labels ...string) {
	m.Helper()
	var got float64
	var have bool
	defer func() {
		if m.Failed() {
			m.Logf("%s %v is %v (%v), want %v", name, labels, got, have, want)
		}
	}()
	relaytest.Eventually(m, name, func() bool {
		got, have = value(m.scrape(), name, labels...)
		return have && got == want
	})
}

func (m *monitored) health(path string) (code int, h Health) {
	m.Helper()
	code, body := m.get(path)
	relaytest.Must(m, json.Unmarshal([]byte(body), &h))
	return code, h
}

// healthBecomes waits for a status code, and checks that the reasons hold a text.
func (m *monitored) healthBecomes(path string, want int, reason string) {
	m.Helper()
	var code int
	var h Health
	defer func() {
		if m.Failed() {
			m.Logf("%s: %d %+v, want %d and %q\n%s", path, code, h, want, reason, m.log)
		}
	}()
	relaytest.Eventually(m, path, func() bool {
		code, h = m.health(path)
		return code == want && strings.Contains(strings.Join(h.Reasons, "; "), reason)
	})
}
