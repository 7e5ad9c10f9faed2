package relay

import (
	"crypto/tls"
	"crypto/x509"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// inspect fails the test for a field that differences may not know: a setting that is forgotten there would need a
// restart in silence.
func inspect(t *testing.T, of any, known []string) {
	t.Helper()
	typ := reflect.TypeOf(of)
	for i := range typ.NumField() {
		if name := typ.Field(i).Name; !slices.Contains(known, name) {
			t.Errorf("%s.%s: let a reload compare it, then name it here", typ.Name(), name)
		}
	}
}

// changesOfADestination changes one setting each, named as differences name it.
func changesOfADestination(t *testing.T) map[string]func(*post.Destination) {
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
		"breaker":               func(d *post.Destination) { d.Breaker.Off = true },
		"on_failure":            func(d *post.Destination) { d.OnFailure = policy.SkipFailed },
		"responses.retry":       func(d *post.Destination) { d.Responses.Retry = []int{404} },
		"responses.fail":        func(d *post.Destination) { d.Responses.Fail = []int{404} },
		"headers":               func(d *post.Destination) { d.Headers = map[string]string{"A": "b"} },
		"signing_secrets":       func(d *post.Destination) { d.SigningSecrets = []webhook.Secret{signingSecret(t, 1)} },
		"format":                func(d *post.Destination) { d.Wire.Format = post.FormatCloudEvents },
		"cloudevents_source":    func(d *post.Destination) { d.Wire.Source = "x" },
		"max_payload_bytes":     func(d *post.Destination) { d.Wire.MaxPayloadBytes = 3 },
		"excerpts":              func(d *post.Destination) { d.Wire.Excerpts = post.ExcerptsNone },
		"credential":            func(d *post.Destination) { d.Wire.Authorization = func() string { return "x" } },
		"tls.min_version":       func(d *post.Destination) { d.Wire.TLS.MinVersion = tls.VersionTLS13 },
		"tls.server_name":       func(d *post.Destination) { d.Wire.TLS.ServerName = "x" },
		"tls.ca_file":           func(d *post.Destination) { d.Wire.TLS.Roots = x509.NewCertPool },
		"tls.cert_file":         func(d *post.Destination) { d.Wire.TLS.Certificate = func() *tls.Certificate { return certificate } },
		"proxy":                 func(d *post.Destination) { d.Wire.Proxy = post.NoProxy },
		"subject":               func(d *post.Destination) { d.NATS.Subject = "x" },
		"partitions":            func(d *post.Destination) { d.NATS.Partitions = 8 },
		"topic":                 func(d *post.Destination) { d.Kafka.Topic = "x" },
		"key":                   func(d *post.Destination) { d.Kafka.Key = "x" },
		"sasl":                  func(d *post.Destination) { d.Kafka.Mechanism = "x" },
		"stream":                func(d *post.Destination) { d.NATS.Stream = "x" },
		"inbox_prefix":          func(d *post.Destination) { d.NATS.InboxPrefix = "x" },
		"credentials_file":      func(d *post.Destination) { d.NATS.Credentials = func() string { return "x" } },
		"nkey_file":             func(d *post.Destination) { d.NATS.Seed = func() string { return "x" } },
	}
}

// What follows files is compared by what it returns now, and made anew whatever that is: the files may be others.
func TestWhatFollowsFilesIsMadeAnew(t *testing.T) {
	t.Parallel()
	token := func(text string) post.Destination {
		d := post.Destination{Name: "default", URL: "http://receiver.invalid"}
		d.Wire.Authorization = func() string { return text }
		return d
	}
	db := newDatabase(t)
	r := prepared(t, db.config(token("a")))
	before := r.lane("default").current()
	if got := r.reload(db.config(token("a"))); got != nil {
		t.Errorf("the same token changes %v", got)
	}
	if r.lane("default").current() == before {
		t.Error("it follows the files of before")
	}
	if got := r.reload(db.config(token("b"))); !slices.Equal(got, []string{"destinations.default changed: credential"}) {
		t.Errorf("another token changes %v", got)
	}
}
