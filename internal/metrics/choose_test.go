package metrics

import (
	"fmt"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay"
)

// destinationsOf returns the destinations that have series of a metric.
func destinationsOf(family *dto.MetricFamily) map[string]bool {
	names := map[string]bool{}
	for _, series := range family.GetMetric() {
		for _, label := range series.GetLabel() {
			if label.GetName() == "destination" {
				names[label.GetValue()] = true
			}
		}
	}
	return names
}

// Of many destinations the busiest and those in trouble get series, a bounded number has them, and
// nothing is counted twice or less than once.
func TestManyDestinationsHaveBoundedSeries(t *testing.T) {
	t.Parallel()
	const many, most = 1000, 5
	var names []string
	state := relay.State{Registered: true}
	for i := range many {
		names = append(names, fmt.Sprintf("d%03d", i))
		state.Lanes = append(state.Lanes, relay.LaneView{LaneState: relay.LaneState{Destination: names[i], Breaker: "closed"}, InFlight: 1})
	}
	m := serve(t, New(Config{Destinations: names, Most: most}))
	m.metrics.Follow(func() relay.State { return state }, nil)
	hooks := m.metrics.Hooks()
	const settled = "outbox_settled_deliveries_total"
	if families := m.scrape(); len(destinationsOf(families[settled])) != 1 || len(destinationsOf(families["outbox_in_flight_deliveries"])) != 1 {
		t.Errorf("at first %v have series", destinationsOf(families[settled]))
	}
	now, counted := time.Now(), 0
	deliver := func(name string, n int, outcome policy.Outcome, reason policy.Reason) {
		hooks.Settled(name, outcome, reason, n)
		counted += n
	}
	check := func(scrape string, wanted ...string) map[string]bool {
		t.Helper()
		now = now.Add(time.Hour)
		m.metrics.choose(now, nil)
		families := m.scrape()
		have := destinationsOf(families[settled])
		for _, name := range append(wanted, other) {
			if !have[name] {
				t.Errorf("%s: %s has no series", scrape, name)
			}
		}
		if len(have) > 2*most+1 {
			t.Errorf("%s: %d destinations have series", scrape, len(have))
		}
		if got := sumOf(families[settled]); got > float64(counted) {
			t.Errorf("%s: %v deliveries are counted of %d", scrape, got, counted)
		}
		if got := sumOf(families["outbox_in_flight_deliveries"]); got != many {
			t.Errorf("%s: %v are in flight", scrape, got)
		}
		return have
	}
	for round := range 20 { // all are about equally busy
		for i, name := range names {
			deliver(name, 1+(i+round)%2, policy.Delivered, policy.ReasonOK)
		}
		before := destinationsOf(m.scrape()[settled])
		after := check(fmt.Sprint("round ", round))
		for name := range before {
			if !after[name] {
				t.Errorf("round %d: the series of %s have ended", round, name)
			}
		}
	}
	if got := sumOf(m.scrape()[settled]); got != float64(counted) {
		t.Errorf("%v deliveries are counted of %d", got, counted)
	}
	deliver("d777", 10_000, policy.Delivered, policy.ReasonOK)
	deliver("d888", 100, policy.Retry, policy.ReasonTimeout)
	check("a busy one, and one in trouble", "d777", "d888")
	deliver("d888", 7, policy.Retry, policy.ReasonTimeout)
	if got, _ := value(m.scrape(), settled, "destination=d888", "outcome=retry", "reason=timeout"); got != 7 {
		t.Errorf("%v retries of the one in trouble", got)
	}
}

// sumOf adds up a metric.
func sumOf(family *dto.MetricFamily) (sum float64) {
	for _, series := range family.GetMetric() {
		sum += series.GetCounter().GetValue() + series.GetGauge().GetValue()
	}
	return sum
}
