package main

import (
	"math"
	"strconv"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// flowPolicy lists the settings of how fast a destination is sent to, and of what its failures stop; defaults has them,
// too.
func flowPolicy() []field {
	return []field{
		{path: "rate_limit", env: "RATE_LIMIT", kind: one("100", parseRate), standard: 0.0},
		{path: "on_failure", env: "ON_FAILURE", kind: one("block", parseChoice(string(policy.BlockFailed), string(policy.SkipFailed))), standard: string(policy.BlockFailed)},
		{path: "breaker.enabled", env: "BREAKER_ENABLED", kind: one("true", parseBool), standard: true},
		{path: "breaker.failures", env: "BREAKER_FAILURES", kind: one("5", parseCount), standard: policy.DefaultBreakerFailures},
		{path: "breaker.probe_after", env: "BREAKER_PROBE_AFTER", kind: one("1s", parseDuration), standard: policy.DefaultProbeAfter},
		{path: "breaker.probe_max", env: "BREAKER_PROBE_MAX", kind: one("5s", parseDuration), standard: policy.DefaultProbeMax},
	}
}

// parseRate reads a number per second, which may be a fraction; the relay knows the bounds.
func parseRate(text string) (float64, string) {
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsNaN(f) || math.IsInf(f, 0) {
		return 0, quote(text) + " is not a number; write requests per second, such as 100, or 0 for no limit"
	}
	return f, ""
}

func (c *config) breaker(path string) policy.BreakerPolicy {
	return policy.BreakerPolicy{
		Off:        !get[bool](c, path+".breaker.enabled"),
		Failures:   get[int](c, path+".breaker.failures"),
		ProbeAfter: get[time.Duration](c, path+".breaker.probe_after"),
		ProbeMax:   get[time.Duration](c, path+".breaker.probe_max"),
	}
}
