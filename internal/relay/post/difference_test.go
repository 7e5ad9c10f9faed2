package post_test

import (
	"crypto/tls"
	"crypto/x509"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/kafkapost"
	"github.com/outbox-relay/outbox-relay/internal/relay/natspost"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// changes change one setting each, named as differences name it.
func changes(t *testing.T) map[string]func(*post.Destination) {
	half := 0.5
	certificate := &tls.Certificate{Certificate: [][]byte{[]byte("der")}}
	return map[string]func(*post.Destination){
		"url":                   func(d *post.Destination) { d.URL = "http://b" },
		"timeout":               func(d *post.Destination) { d.Timeout = time.Second },
		"max_in_flight":         func(d *post.Destination) { d.MaxInFlight = 3 },
		"rate_limit":            func(d *post.Destination) { d.RateLimit = 3 },
		"retry.schedule":        func(d *post.Destination) { d.Retry.Schedule = []time.Duration{1} },
		"retry.max_attempts":    func(d *post.Destination) { d.Retry.MaxAttempts = 3 },
		"retry.jitter":          func(d *post.Destination) { d.Retry.Jitter = &half },
		"retry.retry_after_max": func(d *post.Destination) { d.Retry.RetryAfterMax = 3 },
		"retry.not_after":       func(d *post.Destination) { d.Retry.NotAfter = 3 },
		"breaker":               func(d *post.Destination) { d.Breaker.Disabled = true },
		"on_failure":            func(d *post.Destination) { d.OnFailure = policy.SkipFailed },
		"responses.retry":       func(d *post.Destination) { d.Responses.Retry = []int{404} },
		"responses.fail":        func(d *post.Destination) { d.Responses.Fail = []int{404} },
		"event_headers":         func(d *post.Destination) { d.Wire.EventHeaders = []string{"x-a"} },
		"headers":               func(d *post.Destination) { d.Headers = map[string]string{"A": "b"} },
		"signing_secrets":       func(d *post.Destination) { d.SigningSecrets = []webhook.Secret{secret(t, testSecret)} },
		"batch.max":             func(d *post.Destination) { d.Batch.Max = 9 },
		"format":                func(d *post.Destination) { d.Wire.Format = post.FormatCloudEvents },
		"cloudevents.source":    func(d *post.Destination) { d.Wire.Source = "x" },
		"max_payload_bytes":     func(d *post.Destination) { d.Wire.MaxPayloadBytes = 3 },
		"excerpts":              func(d *post.Destination) { d.Wire.Excerpts = post.ExcerptsNone },
		"credential":            func(d *post.Destination) { d.Wire.Authorization = func() string { return "x" } },
		"tls.min_version":       func(d *post.Destination) { d.Wire.TLS.MinVersion = tls.VersionTLS13 },
		"tls.server_name":       func(d *post.Destination) { d.Wire.TLS.ServerName = "x" },
		"tls.ca_file":           func(d *post.Destination) { d.Wire.TLS.Roots = x509.NewCertPool },
		"tls.cert_file":         func(d *post.Destination) { d.Wire.TLS.Certificate = func() *tls.Certificate { return certificate } },
		"proxy":                 func(d *post.Destination) { d.Wire.Proxy = post.NoProxy },
		"nats.subject":          func(d *post.Destination) { d.NATS.Subject = "x" },
		"nats.partitions":       func(d *post.Destination) { d.NATS.Partitions = 8 },
		"kafka.topic":           func(d *post.Destination) { d.Kafka.Topic = "x" },
		"kafka.key":             func(d *post.Destination) { d.Kafka.Key = "x" },
		"kafka.sasl":            func(d *post.Destination) { d.Kafka.Mechanism = "x" },
		"nats.stream":           func(d *post.Destination) { d.NATS.Stream = "x" },
		"nats.inbox_prefix":     func(d *post.Destination) { d.NATS.InboxPrefix = "x" },
		"nats.credentials_file": func(d *post.Destination) { d.NATS.Credentials = func() string { return "x" } },
		"nats.nkey_file":        func(d *post.Destination) { d.NATS.Seed = func() string { return "x" } },
	}
}

// Each setting of a destination makes a difference, named as in the configuration.
func TestEverySettingOfADestinationMakesADifference(t *testing.T) {
	t.Parallel()
	base := post.Destination{Name: "a", URL: "http://a"}
	for name, change := range changes(t) {
		other := base
		change(&other)
		if got := base.WithDefaults(post.Egress{}).Differences(other.WithDefaults(post.Egress{})); len(got) != 1 || !strings.HasPrefix(got[0], name) {
			t.Errorf("%s: %q", name, got)
		}
	}
	relaytest.CheckFields(t, post.Destination{},
		"Name", "URL", "Timeout", "MaxInFlight", "RateLimit", "Retry", "Breaker", "OnFailure", "Responses", "Headers", "SigningSecrets", "Batch", "Wire", "NATS", "Kafka")
	relaytest.CheckFields(t, natspost.Settings{}, "Subject", "Partitions", "Stream", "InboxPrefix", "Credentials", "Seed")
	relaytest.CheckFields(t, kafkapost.Settings{}, "Topic", "Key", "Mechanism")
	relaytest.CheckFields(t, policy.RetryPolicy{}, "Schedule", "MaxAttempts", "Jitter", "RetryAfterMax", "NotAfter")
	relaytest.CheckFields(t, policy.Responses{}, "Retry", "Fail")
	relaytest.CheckFields(t, post.Wire{}, "Format", "Source", "MaxPayloadBytes", "Excerpts", "EventHeaders", "Authorization", "TLS", "Proxy", "egress")
	relaytest.CheckFields(t, post.TLS{}, "MinVersion", "ServerName", "Roots", "Certificate")
}

// Each setting makes a difference of the digests as well: what is secret in that of the secrets,
// without which the other is the same.
func TestEverySettingOfADestinationChangesADigest(t *testing.T) {
	t.Parallel()
	base := post.Destination{Name: "a", URL: "http://a"}
	secrets := []string{"signing_secrets", "credential", "proxy", "nats.credentials_file", "nats.nkey_file"}
	settingsBefore, secretsBefore := base.WithDefaults(post.Egress{}).Digests("salt")
	for name, change := range changes(t) {
		other := base
		change(&other)
		ofSettings, ofSecrets := other.WithDefaults(post.Egress{}).Digests("salt")
		wantSecret := slices.Contains(secrets, name) || name == "headers" // whose names are settings
		if isSetting := !slices.Contains(secrets, name); (ofSettings != settingsBefore) != isSetting || (ofSecrets != secretsBefore) != wantSecret {
			t.Errorf("%s: settings %s after %s, secrets %s after %s", name, ofSettings, settingsBefore, ofSecrets, secretsBefore)
		}
	}
	other, _ := base.WithDefaults(post.Egress{}).Digests("pepper")
	if other == settingsBefore || len(settingsBefore) != 4 {
		t.Errorf("digests %s and %s", settingsBefore, other)
	}
}

// The list of destinations is compared by name.
func TestDifferencesOfLists(t *testing.T) {
	t.Parallel()
	d := func(name, url string) post.Destination {
		return post.Destination{Name: name, URL: url}.WithDefaults(post.Egress{})
	}
	got := post.Differences([]post.Destination{d("kept", "http://a"), d("changed", "http://a"), d("gone", "http://a")},
		[]post.Destination{d("new", "http://a"), d("changed", "http://b"), d("kept", "http://a")})
	if want := []string{"destinations.new added", "destinations.changed changed: url", "destinations.gone removed"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
