package relay

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/post"
	"github.com/outbox-relay/outbox-relay/relay/routes"
)

// A comparison is one setting of two configurations.
type comparison struct {
	name string
	same bool
}

// changed returns the names of the settings that differ.
func changed(list ...comparison) (names []string) {
	for _, c := range list {
		if !c.same {
			names = append(names, c.name)
		}
	}
	return names
}

// restarts returns which settings differ that a running relay cannot change.
func (c *Config) restarts(next *Config) []string {
	return changed(
		comparison{"database.url", samePool(c.Pool, next.Pool)},
		comparison{"database.pooler", c.Pooler.Mode == next.Pooler.Mode},
		comparison{"database.listen_url", samePool(c.Pooler.Session, next.Pooler.Session)},
		comparison{"database.schema", c.Schema == next.Schema},
		comparison{"environment", c.Environment == next.Environment},
		comparison{"relay.name", c.Name == next.Name},
		comparison{"relay.poll_interval", c.PollInterval == next.PollInterval},
		comparison{"relay.lease", c.Lease == next.Lease},
		comparison{"watching", c.Watching == next.Watching},
	)
}

// stay gives a configuration what the one at the start decided for good.
func (c *Config) stay(start *Config) {
	c.Pool, c.Pooler, c.Schema, c.Environment = start.Pool, start.Pooler, start.Schema, start.Environment
	c.Name, c.Version = start.Name, start.Version
	c.PollInterval, c.Lease, c.Watching = start.PollInterval, start.Lease, start.Watching
	c.Log, c.Hooks, c.Spans = start.Log, start.Hooks, start.Spans
}

// fixed returns what of a configuration a reload does not change. The rest is empty, so that no code reads what was true
// at the start.
func (c Config) fixed() (f Config) {
	f.stay(&c)
	return f
}

// differences describes what changes from one configuration to the next, but for what needs a restart. It holds no
// secret.
func (c *Config) differences(next *Config) (all []string) {
	for _, d := range next.Destinations {
		i := slices.IndexFunc(c.Destinations, func(old post.Destination) bool { return old.Name == d.Name })
		if i < 0 {
			all = append(all, "destinations."+d.Name+" added")
		} else if names := destinationDifferences(c.Destinations[i], d); len(names) > 0 {
			all = append(all, "destinations."+d.Name+" changed: "+strings.Join(names, ", "))
		}
	}
	for _, name := range missing(c.Destinations, next.Destinations) {
		all = append(all, "destinations."+name+" removed")
	}
	all = append(all, routes.Differences(c.Routes, next.Routes)...)
	return append(all, changed(
		comparison{"egress.allow_private", (c.Egress.AllowPrivate == nil) == (next.Egress.AllowPrivate == nil) && slices.Equal(c.Egress.AllowPrivate, next.Egress.AllowPrivate)},
		comparison{"egress.proxy", c.Egress.Proxy == next.Egress.Proxy},
		comparison{"alerts.channels", slices.Equal(channelNames(c.Alerts), channelNames(next.Alerts))},
		comparison{"alerts.window", c.Alerts.Window == next.Alerts.Window},
		comparison{"alerts.lag_over", c.Alerts.LagOver == next.Alerts.LagOver},
		comparison{"alerts.vacuum_blocked_over", c.Alerts.VacuumBlockedOver == next.Alerts.VacuumBlockedOver},
		comparison{"retention", c.Retention == next.Retention},
		comparison{"relay.drain_timeout", c.DrainTimeout == next.DrainTimeout},
		comparison{"relay.max_in_flight", c.MaxInFlight == next.MaxInFlight},
		comparison{"relay.log_delivered", c.LogDelivered == next.LogDelivered},
	)...)
}

// channelNames returns the sorted names of the channels.
func channelNames(a alert.Config) (names []string) {
	for _, channel := range a.Channels {
		names = append(names, channel.Name())
	}
	slices.Sort(names)
	return names
}

// destinationDifferences returns the settings in which the next configuration of a destination is another one.
func destinationDifferences(d, next post.Destination) []string {
	a, b := d.Wire, next.Wire
	return changed(
		comparison{"url", d.URL == next.URL},
		comparison{"timeout", d.Timeout == next.Timeout},
		comparison{"max_in_flight", d.MaxInFlight == next.MaxInFlight},
		comparison{"rate_limit", d.RateLimit == next.RateLimit},
		comparison{"retry.schedule", slices.Equal(d.Retry.Schedule, next.Retry.Schedule)},
		comparison{"retry.max_attempts", d.Retry.MaxAttempts == next.Retry.MaxAttempts},
		comparison{"retry.jitter", *d.Retry.Jitter == *next.Retry.Jitter},
		comparison{"retry.retry_after_max", d.Retry.RetryAfterMax == next.Retry.RetryAfterMax},
		comparison{"retry.not_after", d.Retry.NotAfter == next.Retry.NotAfter},
		comparison{"breaker", d.Breaker == next.Breaker},
		comparison{"on_failure", d.OnFailure == next.OnFailure},
		comparison{"responses.retry", slices.Equal(d.Responses.Retry, next.Responses.Retry)},
		comparison{"responses.fail", slices.Equal(d.Responses.Fail, next.Responses.Fail)},
		comparison{"headers", maps.Equal(d.Headers, next.Headers)},
		comparison{"signing_secrets", slices.EqualFunc(d.SigningSecrets, next.SigningSecrets, webhook.Secret.Equal)},
		comparison{"format", a.Format == b.Format},
		comparison{"cloudevents_source", a.Source == b.Source},
		comparison{"max_payload_bytes", a.MaxPayloadBytes == b.MaxPayloadBytes},
		comparison{"excerpts", a.Excerpts == b.Excerpts},
		comparison{"credential", sameNow(a.Authorization, b.Authorization, func(x, y string) bool { return x == y })},
		comparison{"tls.min_version", a.TLS.MinVersion == b.TLS.MinVersion},
		comparison{"tls.server_name", a.TLS.ServerName == b.TLS.ServerName},
		comparison{"tls.ca_file", sameNow(a.TLS.Roots, b.TLS.Roots, (*x509.CertPool).Equal)},
		comparison{"tls.cert_file", sameNow(a.TLS.Certificate, b.TLS.Certificate, sameCertificate)},
		comparison{"proxy", a.Proxy == b.Proxy},
		comparison{"subject", d.NATS.Subject == next.NATS.Subject},
		comparison{"partitions", d.NATS.Partitions == next.NATS.Partitions},
		comparison{"topic", d.Kafka.Topic == next.Kafka.Topic},
		comparison{"key", d.Kafka.Key == next.Kafka.Key},
		comparison{"sasl", d.Kafka.Mechanism == next.Kafka.Mechanism},
		comparison{"stream", d.NATS.Stream == next.NATS.Stream},
		comparison{"inbox_prefix", d.NATS.InboxPrefix == next.NATS.InboxPrefix},
		comparison{"credentials_file", sameNow(d.NATS.Credentials, next.NATS.Credentials, func(x, y string) bool { return x == y })},
		comparison{"nkey_file", sameNow(d.NATS.Seed, next.NATS.Seed, func(x, y string) bool { return x == y })},
	)
}

// sameNow reports whether two functions return the same now, or are both missing.
func sameNow[T any](a, b func() T, same func(T, T) bool) bool {
	if a == nil || b == nil {
		return (a == nil) == (b == nil)
	}
	return same(a(), b())
}

// samePool reports whether two pools lead to the same database, with the same credential.
func samePool(a, b *pgxpool.Config) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.ConnString() == b.ConnString() && a.MaxConns == b.MaxConns
}

// sameCertificate compares what is shown to a destination; any holder of a certificate's key can show it.
func sameCertificate(a, b *tls.Certificate) bool {
	if a == nil || b == nil {
		return a == b
	}
	return slices.EqualFunc(a.Certificate, b.Certificate, bytes.Equal)
}

// missing returns the names of the destinations that others do not have.
func missing(destinations, others []post.Destination) (names []string) {
	for _, d := range destinations {
		if !slices.ContainsFunc(others, func(o post.Destination) bool { return o.Name == d.Name }) {
			names = append(names, d.Name)
		}
	}
	return names
}
