package promobserver

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/outbox-relay/outbox-relay/consumer/breaker"
)

// Breaker returns the collector of a [breaker.Breaker]'s state, which its caller registers:
//
//	prometheus.MustRegister(promobserver.Breaker("warehouse", b))
//
// It has one metric, inbox_breaker_state, with the labels breaker, which is name, and state, which
// is closed, open or half_open: 1 for the state that the breaker is in, 0 for the others. Two
// breakers with one name cannot be registered with the same registerer. It panics when name is
// empty or b is nil.
func Breaker(name string, b *breaker.Breaker) prometheus.Collector {
	if name == "" || b == nil {
		panic("promobserver: Breaker needs a name, for the label, and a breaker")
	}
	return &breakerCollector{
		breaker: b,
		desc: prometheus.NewDesc("inbox_breaker_state", "What a receiver's breaker does with requests: 1 for the state it is in.",
			[]string{"state"}, prometheus.Labels{"breaker": name}),
	}
}

type breakerCollector struct {
	breaker *breaker.Breaker
	desc    *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (c *breakerCollector) Describe(descs chan<- *prometheus.Desc) { descs <- c.desc }

// Collect implements prometheus.Collector.
func (c *breakerCollector) Collect(metrics chan<- prometheus.Metric) {
	is := c.breaker.State()
	for _, state := range []breaker.State{breaker.Closed, breaker.Open, breaker.HalfOpen} {
		value := 0.0
		if state == is {
			value = 1
		}
		metrics <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, value, string(state))
	}
}
