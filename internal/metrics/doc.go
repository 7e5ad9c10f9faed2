// Package metrics shows a running relay to Prometheus and to supervisors: /metrics, /healthz and
// /readyz.
//
// Counters and histograms grow with what the relay's hooks report. Gauges of the relay itself are
// read from its memory at each scrape. Gauges of the database come from the one [Metrics.Sample],
// so that no scrape runs a statement.
//
// Labels are destination, outcome, reason and class alone. A destination is one of the
// configuration, the others are closed sets, so that no event and no answer of a receiver adds a
// series or appears in one.
package metrics
