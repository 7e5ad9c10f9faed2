package post

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"maps"
	"slices"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// Differences describes what changes from one list of destinations to the next. It holds no secret.
func Differences(list, next []Destination) (all []string) {
	old, wanted := byName(list), byName(next)
	for i := range next {
		name := next[i].Name
		if before := old[name]; before == nil {
			all = append(all, "destinations."+name+" added")
		} else if names := before.Differences(next[i]); len(names) > 0 {
			all = append(all, "destinations."+name+" changed: "+strings.Join(names, ", "))
		}
	}
	for i := range list {
		if name := list[i].Name; wanted[name] == nil {
			all = append(all, "destinations."+name+" removed")
		}
	}
	return all
}

// byName returns pointers into a list of destinations, by their names.
func byName(list []Destination) map[string]*Destination {
	all := make(map[string]*Destination, len(list))
	for i := range list {
		all[list[i].Name] = &list[i]
	}
	return all
}

// Differences returns the names of the settings in which the next configuration of a destination is
// another one.
func (d Destination) Differences(next Destination) []string {
	a, b := d.Wire, next.Wire
	var v check.Differences
	v.Compare("url", d.URL == next.URL)
	v.Compare("timeout", d.Timeout == next.Timeout)
	v.Compare("max_in_flight", d.MaxInFlight == next.MaxInFlight)
	v.Compare("rate_limit", d.RateLimit == next.RateLimit)
	v.Compare("retry.schedule", slices.Equal(d.Retry.Schedule, next.Retry.Schedule))
	v.Compare("retry.max_attempts", d.Retry.MaxAttempts == next.Retry.MaxAttempts)
	v.Compare("retry.jitter", *d.Retry.Jitter == *next.Retry.Jitter)
	v.Compare("retry.retry_after_max", d.Retry.RetryAfterMax == next.Retry.RetryAfterMax)
	v.Compare("retry.not_after", d.Retry.NotAfter == next.Retry.NotAfter)
	v.Compare("breaker", d.Breaker == next.Breaker)
	v.Compare("on_failure", d.OnFailure == next.OnFailure)
	v.Compare("responses.retry", slices.Equal(d.Responses.Retry, next.Responses.Retry))
	v.Compare("responses.fail", slices.Equal(d.Responses.Fail, next.Responses.Fail))
	v.Compare("headers", maps.Equal(d.Headers, next.Headers))
	v.Compare("event_headers", slices.Equal(a.EventHeaders, b.EventHeaders))
	v.Compare("signing_secrets", slices.EqualFunc(d.SigningSecrets, next.SigningSecrets, webhook.Secret.Equal))
	v.Compare("batch.max", d.Batch == next.Batch)
	v.Compare("format", a.Format == b.Format)
	v.Compare("cloudevents.source", a.Source == b.Source)
	v.Compare("max_payload_bytes", a.MaxPayloadBytes == b.MaxPayloadBytes)
	v.Compare("excerpts", a.Excerpts == b.Excerpts)
	v.Compare("credential", sameNow(a.Authorization, b.Authorization, func(x, y string) bool { return x == y }))
	v.Compare("tls.min_version", a.TLS.MinVersion == b.TLS.MinVersion)
	v.Compare("tls.server_name", a.TLS.ServerName == b.TLS.ServerName)
	v.Compare("tls.ca_file", sameNow(a.TLS.Roots, b.TLS.Roots, (*x509.CertPool).Equal))
	v.Compare("tls.cert_file", sameNow(a.TLS.Certificate, b.TLS.Certificate, sameCertificate))
	v.Compare("proxy", a.Proxy == b.Proxy)
	v.Compare("nats.subject", d.NATS.Subject == next.NATS.Subject)
	v.Compare("nats.partitions", d.NATS.Partitions == next.NATS.Partitions)
	v.Compare("kafka.topic", d.Kafka.Topic == next.Kafka.Topic)
	v.Compare("kafka.key", d.Kafka.Key == next.Kafka.Key)
	v.Compare("kafka.sasl", d.Kafka.Mechanism == next.Kafka.Mechanism)
	v.Compare("nats.stream", d.NATS.Stream == next.NATS.Stream)
	v.Compare("nats.inbox_prefix", d.NATS.InboxPrefix == next.NATS.InboxPrefix)
	v.Compare("nats.credentials_file", sameNow(d.NATS.Credentials, next.NATS.Credentials, func(x, y string) bool { return x == y }))
	v.Compare("nats.nkey_file", sameNow(d.NATS.Seed, next.NATS.Seed, func(x, y string) bool { return x == y }))
	return v
}

// sameNow reports whether two functions return the same now, or are both missing.
func sameNow[T any](a, b func() T, same func(T, T) bool) bool {
	if a == nil || b == nil {
		return (a == nil) == (b == nil)
	}
	return same(a(), b())
}

// sameCertificate compares what is shown to a destination; any holder of a certificate's key can
// show it.
func sameCertificate(a, b *tls.Certificate) bool {
	if a == nil || b == nil {
		return a == b
	}
	return slices.EqualFunc(a.Certificate, b.Certificate, bytes.Equal)
}
