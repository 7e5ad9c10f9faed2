package config

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

func TestFlowMistakes(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		file string
		want []string
	}{
		"a rate with a unit":     {"defaults: {rate_limit: 100/s}\n", []string{`outbox-relay.yaml:1: defaults.rate_limit: "100/s" is not a number; write requests per second, such as 100, or 0 for no limit`}},
		"no rate":                {"defaults: {rate_limit: ''}\n", []string{`outbox-relay.yaml:1: defaults.rate_limit: "" is not a number; write requests per second, such as 100, or 0 for no limit`}},
		"an endless rate":        {"defaults: {rate_limit: .inf}\n", []string{`outbox-relay.yaml:1: defaults.rate_limit: ".inf" is not a number; write requests per second, such as 100, or 0 for no limit`}},
		"a negative rate":        {"defaults: {rate_limit: -1}\n", []string{`outbox-relay.yaml:1: defaults.rate_limit: -1 is out of range; write requests per second, 0.01 to 1000000, or 0 for no limit`}},
		"a rate too low":         {"defaults: {rate_limit: 0.001}\n", []string{`outbox-relay.yaml:1: defaults.rate_limit: 0.001 is out of range; write requests per second, 0.01 to 1000000, or 0 for no limit`}},
		"another policy":         {"defaults: {on_failure: blok}\n", []string{`outbox-relay.yaml:1: defaults.on_failure: "blok" is not known; did you mean "block"?`}},
		"a breaker of one word":  {"defaults: {breaker: off}\n", []string{`outbox-relay.yaml:1: defaults.breaker: is not a section; write its settings on the lines below it, indented`}},
		"a breaker set to no":    {"defaults: {breaker: {enabled: no}}\n", []string{`outbox-relay.yaml:1: defaults.breaker.enabled: "no" is neither true nor false`}},
		"no failures":            {"defaults: {breaker: {failures: 0}}\n", []string{`outbox-relay.yaml:1: defaults.breaker.failures: "0" is too small; write 1 or more`}},
		"too many failures":      {"defaults: {breaker: {failures: 2000}}\n", []string{`outbox-relay.yaml:1: defaults.breaker.failures: 2000 is out of range; write 1 to 1000`}},
		"a first probe too late": {"defaults: {breaker: {probe_after: 45s}}\n", []string{`outbox-relay.yaml:1: defaults.breaker.probe_after: 45s is out of range; write more than 0 and at most probe_max (5s)`}},
		"probes too rare":        {"defaults: {breaker: {probe_max: 2h}}\n", []string{`outbox-relay.yaml:1: defaults.breaker.probe_max: 2h0m0s is out of range; write more than 0 and at most 1h`}},
	} {
		t.Run(name, func(t *testing.T) {
			testsize.OneIn(t, 3)
			t.Parallel()
			check(t, test.file, twoSettings).expect(t, cli.ExitConfig, "", mistakes(test.want...))
		})
	}
}

// What stands under a destination wins over defaults, those over the environment's names for them.
func TestFlowSettings(t *testing.T) {
	t.Parallel()
	file := writeFile(t, filepath.Join(t.TempDir(), usualFile), `
defaults:
  rate_limit: 12.5
  breaker: {failures: 7}
destinations:
  a: {url: http://a}
  b: {url: http://b, rate_limit: 0, on_failure: block, breaker: {enabled: false, probe_after: 2s}}
`)
	c := loadFrom(sources{
		Env: []string{
			twoSettings[0], "OUTBOX_ON_FAILURE=skip", "OUTBOX_BREAKER_FAILURES=9", "OUTBOX_BREAKER_PROBE_MAX=1m",
		},
		Flags: map[string]string{"config": file}, Hostname: "host",
	})
	must(t, c.Err())
	list := c.Relay.Destinations
	a, b := list[0], list[1]
	if a.RateLimit != 12.5 || a.OnFailure != policy.SkipFailed || a.Breaker != (policy.BreakerPolicy{Failures: 9, ProbeAfter: time.Second, ProbeMax: time.Minute}) {
		t.Errorf("%g %s %+v", a.RateLimit, a.OnFailure, a.Breaker)
	}
	if b.RateLimit != 0 || b.OnFailure != policy.BlockFailed || b.Breaker != (policy.BreakerPolicy{Off: true, Failures: 9, ProbeAfter: 2 * time.Second, ProbeMax: time.Minute}) {
		t.Errorf("%g %s %+v", b.RateLimit, b.OnFailure, b.Breaker)
	}
}
