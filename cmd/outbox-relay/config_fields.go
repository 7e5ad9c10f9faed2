package main

import (
	"slices"
	"strings"

	"github.com/outbox-relay/outbox-relay/relay"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// A field is one setting: where it stands in the file, its other names, and how it is read.
type field struct {
	path     string // as the file spells it; "*" stands for a name, "[]" for a position
	env      string // variable, without OUTBOX_; empty: none
	flag     string // without --; empty: none
	fromFile bool   // the variable may instead be given as …_FILE, the name of a file that holds the value
	kind     kind
	standard any // the default; nil: none, or that of defaults
}

const envPrefix = "OUTBOX_"

// variable is the field's full environment name.
func (f field) variable() string { return envPrefix + f.env }

// allFields lists every setting of this version, in the order in which config show prints them.
func allFields() []field {
	fields := []field{
		{path: "environment", env: "ENVIRONMENT", kind: one("production", parseText), standard: ""},
		{path: "database.url", env: "DATABASE_URL", fromFile: true, kind: one("postgres://…", parseSecretText)},
		{path: "database.listen_url", env: "DATABASE_LISTEN_URL", fromFile: true, kind: one("postgres://…", parseOptionalSecretText)},
		{path: "database.pooler", env: "DATABASE_POOLER", kind: one("auto", parseChoice("auto", "none", "transaction")), standard: "auto"},
		{path: "database.schema", env: "DATABASE_SCHEMA", flag: "schema", kind: one("billing", parseSchema), standard: ""},

		{path: "relay.name", env: "NAME", flag: "name", kind: one("billing-1", parseText)},
		{path: "relay.poll_interval", env: "POLL_INTERVAL", flag: "poll-interval", kind: one("5s", parseDuration), standard: relay.DefaultPollInterval},
		{path: "relay.lease", env: "LEASE", flag: "lease", kind: one("60s", parseDuration), standard: relay.DefaultLease},
		{path: "relay.drain_timeout", env: "DRAIN_TIMEOUT", flag: "drain-timeout", kind: one("20s", parseDuration), standard: relay.DefaultDrainTimeout},
		{path: "relay.max_in_flight", env: "MAX_IN_FLIGHT", flag: "max-in-flight", kind: one("256", parseCount), standard: relay.DefaultMaxInFlight},
		{path: "relay.log_delivered", env: "LOG_DELIVERED", kind: one("true", parseBool), standard: false},
	}
	policy := []field{
		{path: "timeout", env: "TIMEOUT", flag: "timeout", kind: one("10s", parseDuration), standard: post.DefaultTimeout},
		{path: "max_in_flight", env: "DESTINATION_MAX_IN_FLIGHT", kind: one("64", parseCount), standard: post.DefaultLaneInFlight},
		{path: "retry.schedule", env: "RETRY_SCHEDULE", kind: many("[5s, 30s, 5m]", parseDuration).notEmpty(), standard: policy.DefaultSchedule()},
		{path: "retry.max_attempts", env: "MAX_ATTEMPTS", kind: one("8", parseCount), standard: policy.DefaultMaxAttempts},
		{path: "retry.jitter", env: "RETRY_JITTER", kind: one("0.1", parseShare), standard: policy.DefaultJitter},
		{path: "retry.retry_after_max", env: "RETRY_AFTER_MAX", kind: one("24h", parseDuration), standard: policy.DefaultRetryAfterMax},
		{path: "retry.horizon", env: "RETRY_HORIZON", kind: one("720h", parseDuration), standard: policy.DefaultPromise},
		{path: "responses.retry", env: "RESPONSES_RETRY", kind: many("[404]", parseNumber), standard: []int{}},
		{path: "responses.fail", env: "RESPONSES_FAIL", kind: many("[404]", parseNumber), standard: []int{}},
	}
	policy = append(policy, flowPolicy()...)
	policy = append(policy, wirePolicy()...)
	for _, f := range policy {
		f.path = "defaults." + f.path
		fields = append(fields, f)
	}
	fields = append(fields,
		field{path: "destinations.*.url", env: "DESTINATION_URL", flag: "destination-url", kind: one("https://logistics.internal/webhooks/finance", parseText)},
		field{path: "destinations.*.signing_secrets", env: "SIGNING_SECRET", fromFile: true, kind: many("[whsec_…]", parseSigningSecret)},
		field{path: "destinations.*.headers.*", kind: one("Bearer …", parseSecretText)},
	)
	for _, f := range policy {
		fields = append(fields, field{path: "destinations.*." + f.path, kind: f.kind})
	}
	fields = append(fields, wireFields()...)
	fields = append(fields, egressFields()...)
	fields = append(fields,
		field{path: "routes[].event", kind: one("invoice.*", parseText)},
		field{path: "routes[].to", kind: many("[logistics]", parseText)},
		field{path: "alerts.channels[].slack", env: "SLACK_WEBHOOK_URL", fromFile: true, kind: one("https://hooks.slack.com/…", parseChannelURL)},
		field{path: "alerts.channels[].webhook", env: "ALERT_WEBHOOK_URL", fromFile: true, kind: one("https://ops.internal/hooks/outbox", parseChannelURL)},
		field{path: "alerts.channels[].service", env: "ALERT_SERVICE_URL", fromFile: true, kind: one("smtp://…", parseServiceURL)},
		field{path: "alerts.window", env: "ALERT_WINDOW", kind: one("15m", parseDuration), standard: alert.DefaultWindow},
		field{path: "alerts.lag_over", env: "ALERT_LAG_OVER", kind: one("10m", parseDuration), standard: alert.DefaultLagOver},
		field{path: "alerts.horizon_over", env: "ALERT_HORIZON_OVER", kind: one("5m", parseDuration), standard: alert.DefaultHorizonOver},
	)
	fields = append(fields, retentionFields()...)
	return append(fields,
		field{path: "log.level", env: "LOG_LEVEL", flag: "log-level", kind: one("info", parseChoice("debug", "info", "warn", "error")), standard: "info"},
		field{path: "log.format", env: "LOG_FORMAT", flag: "log-format", kind: one("auto", parseChoice("auto", "json", "console")), standard: "auto"},
	)
}

// unsupported reports whether a key that no field has is promised for a later version. Accepting one in silence would
// promise what this version does not do.
func unsupported(key string) bool {
	return slices.Contains([]string{
		"admin",
	}, key)
}

// A shape is the tree that the fields make. Its nodes are named by patterns, in which the position in a list is a step
// of its own: "routes.[].event".
type shape struct {
	fields   map[string]field
	children map[string][]string // the steps below a section, in order
}

func newShape(fields []field) shape {
	s := shape{fields: map[string]field{}, children: map[string][]string{}}
	for _, f := range fields {
		pattern := ""
		for step := range strings.SplitSeq(strings.ReplaceAll(f.path, "[]", ".[]"), ".") {
			if !slices.Contains(s.children[pattern], step) {
				s.children[pattern] = append(s.children[pattern], step)
			}
			pattern = below(pattern, step)
		}
		s.fields[pattern] = f
	}
	return s
}

// step returns the pattern of key in the section at pattern, and whether there is such a key.
func (s shape) step(pattern, key string) (string, bool) {
	switch children := s.children[pattern]; {
	case slices.Contains(children, "*"):
		return below(pattern, "*"), true
	case slices.Contains(children, key) && key != "[]":
		return below(pattern, key), true
	}
	return below(pattern, key), false
}

func (s shape) isList(pattern string) bool { return slices.Contains(s.children[pattern], "[]") }

// guess returns the key that was probably meant by an unknown one: the same in another section, which a wrong
// indentation makes of it, or a neighbour spelled alike. Empty: none.
func (s shape) guess(pattern, key string) string {
	for _, f := range allFields() {
		for path := f.path; path != "" && !strings.ContainsAny(path, "*["); path = parent(path) {
			if strings.HasSuffix(path, "."+key) {
				return path
			}
		}
	}
	return nearest(key, s.children[pattern])
}

// below appends a step to a pattern or path.
func below(path, step string) string {
	if path == "" {
		return step
	}
	return path + "." + step
}
