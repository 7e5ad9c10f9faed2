// Package rulestest checks prometheus-rules.yaml and the dashboard with Prometheus's own parser,
// and each rule with series that must fire it and series that must not. It is its own module,
// because Prometheus brings several hundred others along.
package rulestest
