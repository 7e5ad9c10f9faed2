package config

import (
	"crypto/tls"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/metrics"
	"github.com/outbox-relay/outbox-relay/internal/notify"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/archive"
	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/settings"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/relay"
)

const (
	usualFile = "outbox-relay.yaml"
	// DefaultDestination is the destination that OUTBOX_DESTINATION_URL configures.
	DefaultDestination = "default"
	// defaultMetricsListen is where metrics and health are served. 9464 is what OpenTelemetry's
	// Prometheus exporters use.
	defaultMetricsListen = "127.0.0.1:9464"
	// defaultAdminListen is where the API and the page are served.
	defaultAdminListen = "127.0.0.1:9465"
)

// table describes every setting of this version, in the order in which config show prints them.
// hostname is the default of relay.name.
func (c *Config) table(hostname string) settings.Table {
	shared := policyRows(&destination{})
	return settings.Table{
		Prefix: "OUTBOX_", File: usualFile, Unnamed: DefaultDestination,
		Rows: slices.Concat(
			c.databaseRows(), settings.Under("databases[]", outboxRows(&outboxEntry{})), c.relayRows(hostname),
			settings.Under("defaults", shared),
			settings.Under("destinations.*", slices.Concat(targetRows(&destination{}), settings.Inherited(shared), credentialRows(&destination{}), brokerRows(&destination{}))),
			c.egressRows(),
			settings.Under("routes[]", routeRows(&relay.Route{})),
			settings.Under("alerts.channels[]", channelRows(nil, nil)),
			c.alertRows(), c.retentionRows(), c.metricsRows(), c.tracesRows(), c.adminRows(), c.logRows(),
		),
	}
}

func (c *Config) databaseRows() []settings.Row {
	return []settings.Row{
		{Path: "environment", Value: settings.One("production", settings.ParseText, settings.To(&c.Relay.Environment), "")},
		{Path: "database.url", FromFile: true, Value: settings.Showing(settings.One("postgres://…", settings.ParseSecret, settings.To(&c.databaseURL)), databasePart)},
		{Path: "database.listen_url", FromFile: true, Value: settings.Showing(settings.One("postgres://…", optional(settings.ParseSecret), settings.To(&c.listenURL)), databasePart)},
		{Path: "database.pooler", Value: settings.One("auto", orNone(settings.ParseChoice(relay.PoolerAuto, relay.PoolerNone, relay.PoolerTransaction)), settings.To(&c.Relay.Pooler.Mode), relay.PoolerAuto)},
		{Path: "database.schema", Flag: "schema", Value: settings.One("billing", optional(parseSchema), settings.To(&c.Relay.Schema), "")},
		{Path: "database.allow_superuser", Value: settings.One("true", settings.ParseBool, settings.To(&c.Relay.AllowSuperuser), false)},
	}
}

const defaultSleepAfter = time.Minute

func (c *Config) relayRows(hostname string) []settings.Row {
	r := &c.Relay
	return []settings.Row{
		{Path: "relay.name", Flag: "name", Value: settings.One("billing-1", settings.ParseText, settings.To(&r.Name), hostname)},
		{Path: "relay.poll_interval", Flag: "poll-interval", Value: settings.One("5s", settings.ParseDuration, settings.To(&r.PollInterval), relay.DefaultPollInterval)},
		{Path: "relay.sleep_after", Value: settings.One("1m", parseSleepAfter, settings.To(&c.SleepAfter), defaultSleepAfter)},
		{Path: "relay.lease", Flag: "lease", Value: settings.One("60s", settings.ParseDuration, settings.To(&r.Lease), relay.DefaultLease)},
		{Path: "relay.drain_timeout", Flag: "drain-timeout", Value: settings.One("20s", settings.ParseDuration, settings.To(&r.DrainTimeout), relay.DefaultDrainTimeout)},
		{Path: "relay.max_in_flight", Flag: "max-in-flight", Value: settings.One("256", settings.ParseCount, settings.To(&r.MaxInFlight), relay.DefaultMaxInFlight)},
		{Path: "relay.history", Value: settings.One("true", settings.ParseBool, func(on bool) {
			if r.History = nil; on {
				r.History = history.New()
			}
		}, true)},
		{Path: "relay.attempt_log", Value: settings.One("all", settings.ParseChoice("undelivered", "all"), func(which string) { r.LogDelivered = which == "all" }, "undelivered")},
	}
}

// policyRows are the settings that a destination inherits from the section defaults.
func policyRows(d *destination) []settings.Row {
	retry, breaker, wire := &d.Retry, &d.Breaker, &d.Wire
	return []settings.Row{
		{Path: "timeout", Flag: "timeout", Value: settings.One("10s", settings.ParseDuration, settings.To(&d.Timeout), relay.DefaultTimeout)},
		{Path: "max_in_flight", Value: settings.One("64", settings.ParseCount, settings.To(&d.MaxInFlight), relay.DefaultLaneInFlight)},
		{Path: "retry.schedule", Value: settings.Many("[5s, 30s, 5m]", settings.ParseDuration, settings.To(&retry.Schedule), policy.DefaultSchedule()).NotEmpty()},
		{Path: "retry.max_attempts", Value: settings.One("8", settings.ParseCount, settings.To(&retry.MaxAttempts), policy.DefaultMaxAttempts)},
		{Path: "retry.jitter", Value: settings.One("0.1", settings.ParseFraction("write one from 0 to 1"), func(share float64) { retry.Jitter = &share }, policy.DefaultJitter)},
		{Path: "retry.retry_after_max", Value: settings.One("24h", settings.ParseDuration, settings.To(&retry.RetryAfterMax), policy.DefaultRetryAfterMax)},
		{Path: "retry.not_after", Value: settings.One("720h", settings.ParseDuration, settings.To(&retry.NotAfter), policy.DefaultNotAfter)},
		{Path: "responses.retry", Value: settings.Many("[404]", settings.ParseNumber, settings.To(&d.Responses.Retry), []int{})},
		{Path: "responses.fail", Value: settings.Many("[404]", settings.ParseNumber, settings.To(&d.Responses.Fail), []int{})},

		{Path: "rate_limit", Value: settings.One("100", settings.ParseFraction("write requests per second, such as 100, or 0 for no limit"), settings.To(&d.RateLimit), 0)},
		{Path: "on_failure", Value: settings.One("block", settings.ParseChoice(policy.BlockFailed, policy.SkipFailed), settings.To(&d.OnFailure), policy.BlockFailed)},
		{Path: "breaker.enabled", Value: settings.One("true", settings.ParseBool, func(on bool) { breaker.Disabled = !on }, true)},
		{Path: "breaker.failures", Value: settings.One("5", settings.ParseCount, settings.To(&breaker.Failures), policy.DefaultBreakerFailures)},
		{Path: "breaker.probe_after", Value: settings.One("1s", settings.ParseDuration, settings.To(&breaker.ProbeAfter), policy.DefaultProbeAfter)},
		{Path: "breaker.probe_max", Value: settings.One("5s", settings.ParseDuration, settings.To(&breaker.ProbeMax), policy.DefaultProbeMax)},

		{Path: "batch.max", Value: settings.One("100", settings.ParseCount, settings.To(&d.Batch.Max))},
		{Path: "format", Value: settings.One("raw", settings.ParseChoice(relay.FormatRaw, relay.FormatCloudEvents), settings.To(&wire.Format), relay.FormatRaw)},
		{Path: "cloudevents.source", Value: settings.One("https://finance.internal/outbox", settings.ParseText, settings.To(&wire.Source))},
		{Path: "event_headers", Value: settings.Many("[x-event-*]", settings.ParseText, settings.To(&wire.EventHeaders), webhook.DefaultEventHeaders())},
		{Path: "max_payload_bytes", Value: settings.One("262144", settings.ParseNumber, func(n int) { wire.MaxPayloadBytes = int64(n) }, 0)},
		{Path: "excerpts", Value: settings.One("problem", orNone(settings.ParseChoice(relay.ExcerptsProblem, relay.ExcerptsText, relay.ExcerptsNone)), settings.To(&wire.Excerpts), relay.ExcerptsProblem)},
		{Path: "tls.ca_file", Value: settings.One("/etc/tls/ca.pem", settings.ParseText, settings.To(&d.caFile))},
		{Path: "tls.cert_file", Value: settings.One("/etc/tls/tls.crt", settings.ParseText, settings.To(&d.certFile))},
		{Path: "tls.key_file", Value: settings.One("/etc/tls/tls.key", settings.ParseText, settings.To(&d.keyFile))},
		{Path: "tls.min_version", Value: settings.One(`"1.2"`, settings.ParseChoice("1.2", "1.3"), func(version string) {
			wire.TLS.MinVersion = map[string]uint16{"1.3": tls.VersionTLS13}[version]
		}, "1.2")},
	}
}

// targetRows say where a destination's requests go, and what proves that they come from here.
func targetRows(d *destination) []settings.Row {
	return []settings.Row{
		{Path: "url", Flag: "destination-url", Make: addDefaultDestination, Value: settings.Showing(settings.One("https://logistics.internal/webhooks/finance", settings.ParseText, settings.To(&d.URL)), WithoutQuery)},
		{Path: "signing_secrets", Env: "SIGNING_SECRET", FromFile: true, Value: settings.Many("[whsec_…]", parseSigningSecret, settings.To(&d.SigningSecrets))},
		{Path: "headers.*", Value: settings.Each("Bearer …", settings.ParseSecret, headersTo(&d.Headers))},
	}
}

// headersTo returns a function that writes headers to a field, which is nil without any.
func headersTo(field *map[string]string) func(map[string]settings.Secret) {
	return func(values map[string]settings.Secret) {
		for name, value := range values {
			if *field == nil {
				*field = map[string]string{}
			}
			(*field)[name] = string(value)
		}
	}
}

// brokerRows are the settings of a destination of NATS or Kafka alone.
func brokerRows(d *destination) []settings.Row {
	return []settings.Row{
		{Path: "nats.subject", Value: settings.One("outbox.{type}", settings.ParseText, settings.To(&d.NATS.Subject))},
		{Path: "nats.partitions", Value: settings.One("16", settings.ParseCount, settings.To(&d.NATS.Partitions))},
		{Path: "nats.stream", Value: settings.One("EVENTS", settings.ParseText, settings.To(&d.NATS.Stream))},
		{Path: "nats.inbox_prefix", Value: settings.One("_INBOX_outbox", settings.ParseText, settings.To(&d.NATS.InboxPrefix))},
		{Path: "nats.credentials_file", Value: settings.One("/var/run/secrets/nats/outbox.creds", settings.ParseText, settings.To(&d.credentialsFile))},
		{Path: "nats.nkey_file", Value: settings.One("/var/run/secrets/nats/outbox.nk", settings.ParseText, settings.To(&d.seedFile))},
		{Path: "kafka.topic", Value: settings.One("invoices", settings.ParseText, settings.To(&d.Kafka.Topic))},
		{Path: "kafka.key", Value: settings.One("ordering_key", settings.ParseChoice(relay.KafkaKeyOrdering, relay.KafkaKeyIdempotency), settings.To(&d.Kafka.Key))},
		{Path: "kafka.sasl", Value: settings.One("scram-sha-512", settings.ParseChoice(relay.KafkaPlain, relay.KafkaScramSHA256, relay.KafkaScramSHA512), settings.To(&d.Kafka.Mechanism))},
	}
}

// credentialRows are the settings of a destination alone that say how its requests travel.
func credentialRows(d *destination) []settings.Row {
	return []settings.Row{
		{Path: "tls.server_name", Value: settings.One("logistics.internal", settings.ParseText, settings.To(&d.Wire.TLS.ServerName))},
		{Path: "bearer_token", Value: settings.One("${LOGISTICS_TOKEN}", parseBearer, settings.To(&d.bearer))},
		{Path: "bearer_token_file", Value: settings.One("/var/run/secrets/tokens/logistics", settings.ParseText, settings.To(&d.bearerFile))},
		{Path: "basic_auth.username", Value: settings.One("outbox", parseUsername, settings.To(&d.user))},
		{Path: "basic_auth.password", Value: settings.One("${LOGISTICS_PASSWORD}", settings.ParseSecret, settings.To(&d.password))},
		{Path: "basic_auth.password_file", Value: settings.One("/var/run/secrets/logistics/password", settings.ParseText, settings.To(&d.passwordFile))},
		{Path: "proxy", Value: settings.Showing(settings.One("http://proxy.internal:3128", orNone(settings.ParseText), settings.To(&d.Wire.Proxy)), withoutUser)},
	}
}

func (c *Config) egressRows() []settings.Row {
	return []settings.Row{
		{Path: "egress.allow_private", Value: settings.Many("[10.20.0.0/16]", parsePrefix, settings.To(&c.Relay.Egress.AllowPrivate))},
		{Path: "egress.proxy", FromFile: true, Value: settings.Showing(settings.One("http://proxy.internal:3128", settings.ParseText, settings.To(&c.Relay.Egress.Proxy)), withoutUser)},
	}
}

func routeRows(r *relay.Route) []settings.Row {
	return []settings.Row{
		{Path: "event", Value: settings.One("invoice.*", settings.ParseText, settings.To(&r.Event))},
		{Path: "to", Value: settings.Many("[logistics]", settings.ParseText, settings.To(&r.To))},
	}
}

// channelRows append the channel of each URL to made.
func channelRows(made *[]alert.Channel, transport *alert.Transport) []settings.Row {
	slack := func(url string) { *made = append(*made, alert.Slack(url, transport)) }
	webhook := func(url string) { *made = append(*made, alert.Webhook(url, transport)) }
	service := func(url settings.Secret) { *made = append(*made, notify.New(url, transport)) }
	return []settings.Row{
		{Path: "slack", Entry: true, FromFile: true, Value: settings.Showing(settings.One("https://hooks.slack.com/…", parseChannelURL, slack), onlyHost)},
		{Path: "webhook", Entry: true, FromFile: true, Value: settings.Showing(settings.One("https://ops.internal/hooks/outbox", parseChannelURL, webhook), WithoutSecrets)},
		{Path: "service", Entry: true, FromFile: true, Value: settings.Showing(settings.One("smtp://…", notify.ParseURL, service), onlyService)},
	}
}

func (c *Config) alertRows() []settings.Row {
	a := &c.Relay.Alerts
	return []settings.Row{
		{Path: "alerts.after", Value: settings.One("45s", parseWait, func(d time.Duration) {
			a.After = max(d, 1) // 0 would be the default
		}, alert.DefaultAfter)},
		{Path: "alerts.after_by_rule.*", Value: settings.Each("2m", parseWait, settings.To(&a.AfterByRule))},
		{Path: "alerts.repeat", Value: settings.One("1h", parseWait, func(d time.Duration) {
			if a.Repeat = d; d == 0 {
				a.Repeat = -1
			}
		}, alert.DefaultRepeat)},
		{Path: "alerts.lag_over", Value: settings.One("10m", settings.ParseDuration, settings.To(&a.LagOver), alert.DefaultLagOver)},
		{Path: "alerts.vacuum_blocked_over", Value: settings.One("5m", settings.ParseDuration, settings.To(&a.VacuumBlockedOver), alert.DefaultVacuumBlockedOver)},
	}
}

func (c *Config) retentionRows() []settings.Row {
	keep := &c.Relay.Retention
	return []settings.Row{
		{Path: "retention.archive_after", Value: settings.One("720h", parseWait, settings.To(&keep.ArchiveAfter), archive.DefaultArchiveAfter)},
		{Path: "retention.delete_after", Value: settings.One("8760h", parseWait, settings.To(&keep.DeleteAfter), archive.DefaultDeleteAfter)},
		{Path: "retention.attempts", Value: settings.One("2160h", parseWait, settings.To(&keep.Attempts), archive.DefaultKeepAttempts)},
		{Path: "retention.processed_events", Value: settings.One("2160h", parseWait, settings.To(&keep.ProcessedEvents), archive.DefaultKeepProcessed)},
		{Path: "retention.schedule", Value: settings.One(`"17 3 * * *"`, settings.ParseText, settings.To(&keep.Schedule), archive.DefaultArchiveSchedule)},
	}
}

func (c *Config) metricsRows() []settings.Row {
	return []settings.Row{
		{Path: "metrics.listen", Value: settings.One("127.0.0.1:9464", orNone(parseListen), settings.To(&c.MetricsListen), defaultMetricsListen)},
		{Path: "metrics.destinations", Value: settings.One("100", settings.ParseCount, settings.To(&c.MetricsDestinations), metrics.DefaultMost)},
	}
}

func (c *Config) logRows() []settings.Row {
	return []settings.Row{
		{Path: "log.level", Flag: "log-level", Value: settings.One("info", settings.ParseChoice("debug", "info", "warn", "error"), settings.To(&c.logLevelName), "info")},
		{Path: "log.format", Flag: "log-format", Value: settings.One("auto", settings.ParseChoice("auto", "json", "console"), settings.To(&c.LogFormat), "auto")},
	}
}
