package config

import (
	"crypto/x509"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localcert"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/relay"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// certificate makes a certificate that signs itself, and its key, in PEM format.
func certificate(end time.Time) (cert, key string) {
	made := localcert.NewAuthority(func(c *x509.Certificate) { c.NotBefore, c.NotAfter = end.Add(-365*24*time.Hour), end })
	c, k := localcert.PEM(made.Certificate)
	return string(c), string(k)
}

func TestWireMistakes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, text string) { writeFile(t, filepath.Join(dir, name), text) }
	cert, key := certificate(time.Now().Add(365 * 24 * time.Hour))
	_, otherKey := certificate(time.Now().Add(365 * 24 * time.Hour))
	write("cert", cert)
	write("key", key)
	write("other", otherKey)
	write("text", "hunter2\n")
	write("empty", "\n")
	write("blank", "hunter2 hunter2\n")
	write("bearer", "Bearer hunter2\n")
	write("broken", "-----BEGIN CERTIFICATE-----\naHVudGVyMg==\n-----END CERTIFICATE-----\n")
	const pair = "are no certificate and key that belong together, in PEM format and unencrypted: "
	for settings, want := range map[string]string{
		"format: json":                                                        `destinations.a.format: "json" is not known; write one of raw, cloudevents`,
		"format: cloudevent":                                                  `destinations.a.format: "cloudevent" is not known; did you mean "cloudevents"?`,
		"format: cloudevents":                                                 `destinations.a.cloudevents.source: is not set, and with an event's id it is what receivers of CloudEvents know the event by; write the URI of the producing service, such as "https://finance.internal/outbox"`,
		"cloudevents: {source: 'a b'}":                                        `destinations.a.cloudevents.source: is not a URI reference; write one such as "https://finance.internal/outbox" or "/finance/outbox"`,
		"cloudevents: {source: 'http://%zz'}":                                 `destinations.a.cloudevents.source: is not a URI reference; write one such as "https://finance.internal/outbox" or "/finance/outbox"`,
		"max_payload_bytes: 1MB":                                              `destinations.a.max_payload_bytes: "1MB" is not a whole number`,
		"batch: {max: 0}":                                                     `destinations.a.batch.max: "0" is too small; write 1 or more`,
		"max_in_flight: 1, batch: {max: 1000}":                                "destinations.a.batch.max: 1000 has no effect while max_in_flight is 1, which counts events; raise that to some multiples of batch.max, or write batch: {max: 1}",
		"excerpts: html":                                                      `destinations.a.excerpts: "html" is not known; write one of problem, text, none`,
		"max_payload_bytes: -1":                                               `destinations.a.max_payload_bytes: -1 is negative; write a number of bytes, or 0 for no limit of its own`,
		"tls: {min_version: 1.1}":                                             `destinations.a.tls.min_version: "1.1" is not known; did you mean "1.2"?`,
		"tls: {insecure: true}":                                               `unknown key "destinations.a.tls.insecure"`,
		"tls: {server_name: 'a b'}":                                           `destinations.a.tls.server_name: "a b" is neither a DNS name nor an IPv4 address`,
		"tls: {ca_file: DIR/none}":                                            `destinations.a.tls.ca_file: cannot read DIR/none: no such file or directory`,
		"tls: {ca_file: DIR}":                                                 `destinations.a.tls.ca_file: cannot read DIR: it is a directory`,
		"tls: {ca_file: DIR/text}":                                            `destinations.a.tls.ca_file: DIR/text holds no certificate in PEM format (-----BEGIN CERTIFICATE-----)`,
		"tls: {ca_file: DIR/key}":                                             `destinations.a.tls.ca_file: DIR/key holds no certificate in PEM format (-----BEGIN CERTIFICATE-----)`,
		"tls: {ca_file: DIR/broken}":                                          `destinations.a.tls.ca_file: DIR/broken holds a certificate that cannot be read: x509: malformed certificate`,
		"tls: {cert_file: DIR/cert}":                                          `destinations.a.tls.cert_file: is set without tls.key_file; set both`,
		"tls: {key_file: DIR/key}":                                            `destinations.a.tls.key_file: is set without tls.cert_file; set both`,
		"tls: {cert_file: DIR/cert, key_file: DIR/other}":                     `destinations.a.tls.cert_file: DIR/cert and DIR/other ` + pair + `private key does not match public key`,
		"tls: {cert_file: DIR/key, key_file: DIR/cert}":                       `destinations.a.tls.cert_file: DIR/key and DIR/cert ` + pair + `failed to find certificate PEM data in certificate input, but did find a private key; PEM inputs may have been switched`,
		"tls: {cert_file: DIR/cert, key_file: DIR/none}":                      `destinations.a.tls.cert_file: cannot read DIR/none: no such file or directory`,
		"bearer_token: Bearer hunter2":                                        `destinations.a.bearer_token: begins with "Bearer "; write only what follows it`,
		"bearer_token: hunter2 hunter2":                                       `destinations.a.bearer_token: contains a blank, a line break or another character that a token cannot have`,
		"bearer_token_file: DIR/none":                                         `destinations.a.bearer_token_file: cannot read DIR/none: no such file or directory`,
		"bearer_token_file: DIR/empty":                                        `destinations.a.bearer_token_file: DIR/empty is empty`,
		"bearer_token_file: DIR/blank":                                        `destinations.a.bearer_token_file: DIR/blank contains a blank, a line break or another character that a token cannot have`,
		"bearer_token_file: DIR/bearer":                                       `destinations.a.bearer_token_file: DIR/bearer begins with "Bearer "; write only what follows it`,
		"bearer_token_file: /dev/zero":                                        `destinations.a.bearer_token_file: cannot read /dev/zero: it is not a regular file`,
		"basic_auth: {password: hunter2}":                                     `destinations.a.basic_auth: has no username; write {username: …, password: "${…}"}`,
		"basic_auth: {username: u}":                                           `destinations.a.basic_auth: has neither password nor password_file; set one of them`,
		"basic_auth: {username: 'u:v', password: p}":                          `destinations.a.basic_auth.username: contains a colon, which ends a user name`,
		"basic_auth: {username: u, password: p, password_file: x}":            `destinations.a.basic_auth.password_file: is set beside password; remove one of them`,
		"basic_auth: {username: u, password_file: DIR/empty}":                 `destinations.a.basic_auth.password_file: DIR/empty is empty`,
		"bearer_token: x, bearer_token_file: DIR/text":                        `destinations.a.bearer_token_file: is set beside bearer_token, and one request can carry one credential; remove one of them`,
		"bearer_token: x, basic_auth: {username: u, password: p}":             `destinations.a.basic_auth: is set beside bearer_token, and one request can carry one credential; remove one of them`,
		"bearer_token: x, headers: {authorization: hunter2}":                  `destinations.a.headers.authorization: is set beside a credential, which goes into the same header; remove one of them`,
		"format: cloudevents, cloudevents: {source: /s}, headers: {ce-id: x}": `destinations.a.headers.ce-id: is set by format cloudevents; remove it`,
		"proxy: 'https://u:hunter2@p:1'":                                      `destinations.a.proxy: does not begin with http://, the only way of speaking to a proxy that is supported; write one such as http://proxy.internal:3128`,
		"proxy: 'http://u:hunter2@p'":                                         `destinations.a.proxy: has no port; write one such as http://proxy.internal:3128`,
		"proxy: 'http://p:1/hunter2'":                                         `destinations.a.proxy: has something behind the port; write one such as http://proxy.internal:3128`,
		"proxy: 'hunter2'":                                                    `destinations.a.proxy: is not a URL; write one such as http://proxy.internal:3128`,
		"proxy: 'http://169.254.169.254:80'":                                  `destinations.a.proxy: address 169.254.169.254 is never dialled: it is link-local, a cloud's metadata service, or otherwise not a host's own`,
	} {
		t.Run(settings, func(t *testing.T) {
			testsize.OneIn(t, 4)
			t.Parallel()
			r := check(t, "destinations:\n  a: {url: 'https://a', "+strings.ReplaceAll(settings, "DIR", dir)+"}\n", twoSettings[:1])
			r.stderr = strings.ReplaceAll(r.stderr, dir, "DIR")
			r.expect(t, cli.ExitConfig, "", mistakes("outbox-relay.yaml:2: "+want))
			if strings.Contains(r.stderr, "hunter2") && !strings.Contains(settings, "headers") {
				t.Error("the secret is repeated")
			}
		})
	}
}

func TestWireMistakesBeyondADestination(t *testing.T) {
	t.Parallel()
	for file, want := range map[string]string{
		"destinations: {a: {url: 'http://a', tls: {server_name: b}}}":                                                        `destinations.a.tls.server_name: has no effect, as the url begins with http://; write https://, or remove tls`,
		"egress: {allow_private: [10.0.0.1]}\ndestinations: {a: {url: 'http://a'}}":                                          `egress.allow_private[0]: "10.0.0.1" is an address; write the network "10.0.0.1/32"`,
		"egress: {allow_private: [10.0.0.1/8]}\ndestinations: {a: {url: 'http://a'}}":                                        `egress.allow_private[0]: "10.0.0.1/8" has bits behind its length; write "10.0.0.0/8"`,
		"egress: {allow_private: [ten]}\ndestinations: {a: {url: 'http://a'}}":                                               `egress.allow_private[0]: "ten" is not a network; write one such as "10.20.0.0/16"`,
		"egress: {allow_private: [0.0.0.0/0]}\ndestinations: {a: {url: 'http://a'}}":                                         `egress.allow_private[0]: 0.0.0.0/0 is not a private network; write parts of 10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, 100.64.0.0/10, 127.0.0.0/8, fc00::/7 or ::1/128 (public addresses need no entry)`,
		"egress: {allow_private: [10.0.0.0/8, 169.254.0.0/16]}\ndestinations: {a: {url: 'http://a'}}":                        `egress.allow_private[1]: 169.254.0.0/16 is not a private network; write parts of 10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, 100.64.0.0/10, 127.0.0.0/8, fc00::/7 or ::1/128 (public addresses need no entry)`,
		"egress: {allow_private: []}\ndestinations: {a: {url: 'http://10.1.2.3'}}":                                           `destinations.a.url: address 10.1.2.3 is private and not within egress.allow_private`,
		"egress: {allow_private: [10.0.0.0/8], proxy: 'http://127.0.0.1:3128'}\ndestinations: {a: {url: 'http://10.1.2.3'}}": `egress.proxy: address 127.0.0.1 is private and not within egress.allow_private`,
	} {
		t.Run(file, func(t *testing.T) {
			t.Parallel()
			r := check(t, file+"\n", twoSettings[:1])
			if got := r.stderr; r.code != cli.ExitConfig || !strings.Contains(got, ": "+want+"\n") {
				t.Errorf("exit code %d\n%s", r.code, got)
			}
		})
	}
	r := check(t, "destinations: {a: {url: 'http://a'}}\n", append(twoSettings[:1:1], "OUTBOX_DESTINATION_BEARER_TOKEN=hunter2"))
	r.expect(t, cli.ExitConfig, "", mistakes(`env OUTBOX_DESTINATION_BEARER_TOKEN: is only for the destination "default", and there is none; write bearer_token for each destination that needs it`))
}

// What is shared by defaults does not hold for destinations without encryption.
func TestSharedTLS(t *testing.T) {
	t.Parallel()
	ca, _ := certificate(time.Now().Add(time.Hour))
	file := writeFile(t, filepath.Join(t.TempDir(), "ca"), ca)
	c := loadFrom(sources{Env: twoSettings[:1], Flags: map[string]string{"config": writeFile(t, filepath.Join(t.TempDir(), usualFile),
		"defaults: {tls: {ca_file: "+file+"}}\ndestinations: {a: {url: 'http://a'}, b: {url: 'https://b'}}\n")}})
	testkit.Must(t, c.Err())
	if d := c.Relay.Destinations; d[0].Wire.TLS.Roots != nil || d[1].Wire.TLS.Roots == nil {
		t.Error("the authorities are not those of b alone")
	}
}

// A certificate that ends soon is reported at the start.
func TestCertificateThatEndsSoon(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cert, key := certificate(time.Date(2020, 1, 2, 3, 4, 5, 0, time.UTC))
	names := []string{writeFile(t, filepath.Join(dir, "cert"), cert), writeFile(t, filepath.Join(dir, "key"), key)}
	r := check(t, "destinations:\n  a: {url: 'https://a', tls: {cert_file: "+names[0]+", key_file: "+names[1]+"}}\n", twoSettings[:1])
	want := "tls.cert_file: the certificate in " + names[0] + " ends at 2020-01-02 03:04 UTC; replace it before, which needs no restart"
	if r.code != 0 || strings.Count(r.stderr, want) != 1 {
		t.Errorf("exit code %d, %q", r.code, r.stderr)
	}
}

// The credentials of a destination, and that those from files follow them.
func TestCredentials(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	token := writeFile(t, filepath.Join(dir, "token"), "one\n")
	password := writeFile(t, filepath.Join(dir, "password"), "päss word\r\n")
	c := loadFrom(sources{Env: append(twoSettings[:1:1], "TOKEN=t0"), Flags: map[string]string{"config": writeFile(t, filepath.Join(dir, usualFile), `
destinations:
  none: {url: "https://a"}
  token: {url: "https://a", bearer_token: "${TOKEN}"}
  token_file: {url: "https://a", bearer_token_file: `+token+`}
  basic: {url: "https://a", basic_auth: {username: u, password: p}}
  basic_file: {url: "https://a", basic_auth: {username: u, password_file: `+password+`}}
`)}})
	testkit.Must(t, c.Err())
	got := map[string]string{}
	for _, d := range c.Relay.Destinations {
		if d.Wire.Authorization != nil {
			got[d.Name] = d.Wire.Authorization()
		}
	}
	want := map[string]string{"token": "Bearer t0", "token_file": "Bearer one", "basic": "Basic dTpw", "basic_file": "Basic dTpww6RzcyB3b3Jk"}
	for name, value := range want {
		testkit.Equal(t, name, got[name], value)
	}
	if len(got) != len(want) {
		t.Errorf("credentials: %q", got)
	}
	i := slices.IndexFunc(c.Relay.Destinations, func(d relay.Destination) bool { return d.Name == "token_file" })
	follow := c.Relay.Destinations[i].Wire.Authorization
	writeFile(t, token, "two\n")
	testkit.Equal(t, "after a change", follow(), "Bearer two")
}

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
			twoSettings[0], "OUTBOX_DEFAULTS_ON_FAILURE=skip", "OUTBOX_DEFAULTS_BREAKER_FAILURES=9", "OUTBOX_DEFAULTS_BREAKER_PROBE_MAX=1m",
		},
		Flags: map[string]string{"config": file}, Hostname: "host",
	})
	testkit.Must(t, c.Err())
	list := c.Relay.Destinations
	a, b := list[0], list[1]
	if a.RateLimit != 12.5 || a.OnFailure != policy.SkipFailed || a.Breaker != (policy.BreakerPolicy{Failures: 9, ProbeAfter: time.Second, ProbeMax: time.Minute}) {
		t.Errorf("%g %s %+v", a.RateLimit, a.OnFailure, a.Breaker)
	}
	if b.RateLimit != 0 || b.OnFailure != policy.BlockFailed || b.Breaker != (policy.BreakerPolicy{Disabled: true, Failures: 9, ProbeAfter: 2 * time.Second, ProbeMax: time.Minute}) {
		t.Errorf("%g %s %+v", b.RateLimit, b.OnFailure, b.Breaker)
	}
}

func TestKafkaMistakes(t *testing.T) {
	t.Parallel()
	const usable = "url: 'kafka://a', kafka: {topic: invoices"
	for settings, want := range map[string]string{
		usable + "}": "",
		"url: 'kafka+ssl://a:9093,b', kafka: {topic: 'outbox.{type}'}, tls: {server_name: a}": "",
		usable + ", key: idempotency_key}, headers: {X-Tenant: a}, proxy: none":               "",
		usable + ", sasl: scram-sha-512}, basic_auth: {username: u, password: p}":             "",
		usable + "}, bearer_token: x, format: cloudevents, cloudevents: {source: /a}":         "",
		"url: 'kafka://a'": `kafka.topic: is not set; write one such as "invoices" or "outbox.{type}"`,
		"url: 'kafka://a', kafka: {topic: 'a.{tpye}'}":                       `kafka.topic: "a.{tpye}" holds a { that begins neither {type} nor {destination}; write one such as "invoices" or "outbox.{type}"`,
		"url: 'kafka://a', kafka: {topic: 'a b'}":                            `kafka.topic: "a b" is not 1 to 249 letters, digits, '.', '_' and '-'; write one such as "invoices" or "outbox.{type}"`,
		"url: 'kafka://a,,b', kafka: {topic: a}":                             "url: names a server that cannot be used: has no host; write host:port",
		usable + ", key: event_type}":                                        `kafka.key: "event_type" is not known; write one of ordering_key, idempotency_key`,
		"url: 'kafka://a', kafka: {topic: '..'}":                             `kafka.topic: ".." is not a name of a topic; write one such as "invoices" or "outbox.{type}"`,
		"url: 'kafka://a', kafka: {topic: " + strings.Repeat("a", 250) + "}": `kafka.topic: "` + strings.Repeat("a", 250) + `" is not 1 to 249 letters, digits, '.', '_' and '-'; write one such as "invoices" or "outbox.{type}"`,
		"url: 'kafka://', kafka: {topic: a}":                                 "url: names a server that cannot be used: has no host; write host:port",
		"url: 'kafka+ssl:a', kafka: {topic: a}":                              "url: names no server; write one such as kafka+ssl://kafka.internal",
		"url: 'kafka://u:hunter2@a', kafka: {topic: a}":                      "url: contains user info; move it to basic_auth, bearer_token, nats.credentials_file or nats.nkey_file",
		usable + "}, basic_auth: {username: u, password: hunter2}":           "kafka.sasl: is not set beside basic_auth; write plain, scram-sha-256 or scram-sha-512, as the brokers have it",
		usable + ", sasl: plain}, bearer_token: hunter2":                     "kafka.sasl: has no effect on bearer_token, which is sent by the mechanism oauthbearer; remove it",
		usable + ", sasl: plain}":                                            `kafka.sasl: is set without basic_auth; write {username: …, password: "${…}"} there`,
		usable + ", sasl: gssapi}":                                           `kafka.sasl: "gssapi" is not known; write one of plain, scram-sha-256, scram-sha-512`,
		usable + "}, nats: {subject: x}":                                     "nats.subject: is for destinations of NATS, whose url begins with nats:// or tls://; remove it",
		"url: 'nats://a', nats: {subject: s, stream: s}, kafka: {topic: a}":  "kafka.topic: is for destinations of Kafka, whose url begins with kafka:// or kafka+ssl://; remove it",
		"url: 'nats://a', nats: {subject: 's.{partition}', stream: s}":       "nats.partitions: is not set, and the subject holds {partition}; write as many as readers shall work at once, such as 16",
		"url: 'nats://a', nats: {subject: s, stream: s, partitions: 16}":     "nats.partitions: has no effect: the subject holds no {partition}",
		"url: 'http://a', kafka: {topic: a}":                                 "kafka.topic: is for destinations of Kafka, whose url begins with kafka:// or kafka+ssl://; remove it",
		usable + "}, headers: {authorization: hunter2}":                      "headers.authorization: does not identify the relay to Kafka; write basic_auth or bearer_token",
		usable + "}, tls: {server_name: a}":                                  "tls.server_name: has no effect, as the url begins with kafka://; write kafka+ssl://, or remove tls",
	} {
		t.Run(settings, func(t *testing.T) {
			t.Parallel()
			r := check(t, "destinations:\n  a: {"+settings+"}\n", twoSettings[:1])
			switch {
			case want == "" && r.code != 0:
				t.Errorf("exit code %d\n%s", r.code, r.stderr)
			case want != "":
				r.expect(t, cli.ExitConfig, "", mistakes("outbox-relay.yaml:2: destinations.a."+want))
			}
			if strings.Contains(r.stderr, "hunter2") {
				t.Error("the secret is repeated")
			}
		})
	}
}

// A user's credentials as nsc writes them, of an account that exists nowhere.
const (
	natsJWT  = "eyJ0eXAiOiJKV1QiLCJhbGciOiJlZDI1NTE5LW5rZXkifQ.eyJuYW1lIjoidGVzdCJ9.c2lnbmF0dXJl"
	natsSeed = "SUADAMJSGM2DKNRXHA4TAMJSGM2DKNRXHA4TAMJSGM2DKNRXHA4TAMMLDU"
	natsFile = "-----BEGIN NATS USER JWT-----\n" + natsJWT + "\n------END NATS USER JWT------\n\n-----BEGIN USER NKEY SEED-----\n" + natsSeed + "\n------END USER NKEY SEED------\n"
)

func TestNATSMistakes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "creds"), natsFile)
	writeFile(t, filepath.Join(dir, "nk"), natsSeed+"\n")
	writeFile(t, filepath.Join(dir, "text"), "hunter2\n")
	const usable = "url: 'nats://a', nats: {subject: 'outbox.{type}', stream: EVENTS"
	for settings, want := range map[string]string{
		usable + "}": "",
		"url: 'tls://a:4222,tls://b', nats: {subject: 'outbox.{destination}.{type}', stream: EVENTS}, tls: {server_name: a}": "",
		usable + ", credentials_file: DIR/creds}":                                                            "",
		usable + ", nkey_file: DIR/nk, inbox_prefix: _INBOX_a.b}, headers: {X-Tenant: a}, proxy: none":       "",
		usable + "}, format: cloudevents, cloudevents: {source: /a}, basic_auth: {username: u, password: p}": "",
		"url: 'kafak://a'": `url: scheme "kafak" is not supported; it may be http:// or https://, nats:// or tls:// (NATS), kafka:// or kafka+ssl:// (Kafka): write one such as https://logistics.internal/webhooks/finance`,
		"url: 'nats:a', nats: {subject: s, stream: s}":                   "url: names no server; write one such as nats://nats.internal",
		"url: 'nats://', nats: {subject: s, stream: s}":                  "url: names a server that cannot be used: has no host; write host:port",
		"url: 'nats://u:hunter2@a', nats: {subject: s, stream: s}":       "url: contains user info; move it to basic_auth, bearer_token, nats.credentials_file or nats.nkey_file",
		"url: 'nats://a,tls://b', nats: {subject: s, stream: s}":         "url: names servers with another scheme than the first; write one scheme, and a comma between servers",
		"url: 'nats://a/b', nats: {subject: s, stream: s}":               "url: has something behind the servers, which would be ignored; remove it",
		"url: 'nats://a,169.254.169.254', nats: {subject: s, stream: s}": "url: names a server that cannot be used: address 169.254.169.254 is never dialled: it is link-local, a cloud's metadata service, or otherwise not a host's own",
		"url: 'nats://a:99999', nats: {subject: s, stream: s}":           "url: names a server that cannot be used: port 99999 is out of range; write 1 to 65535",
		"url: 'nats://a', nats: {stream: s}":                             `nats.subject: is not set; write one such as "outbox.{type}"`,
		"url: 'nats://a', nats: {subject: 'a.{tpye}', stream: s}":        `nats.subject: "a.{tpye}" holds a { that begins neither {type}, {destination} nor {partition}; write one such as "outbox.{type}"`,
		"url: 'nats://a', nats: {subject: 'a.>', stream: s}":             `nats.subject: "a.>" holds a wildcard, '*' or '>'; write one such as "outbox.{type}"`,
		"url: 'nats://a', nats: {subject: '$JS.{type}', stream: s}":      `nats.subject: "$JS.{type}" begins with a sign of the server's own subjects, '$' or '_'; write one such as "outbox.{type}"`,
		"url: 'nats://a', nats: {subject: 'a b', stream: s}":             `nats.subject: "a b" holds a blank or a character beyond printable ASCII; write one such as "outbox.{type}"`,
		"url: 'nats://a', nats: {subject: 'a..b', stream: s}":            `nats.subject: "a..b" has an empty word between its dots; write one such as "outbox.{type}"`,
		"url: 'nats://a', nats: {subject: s}":                            "nats.stream: is not set; write the name of the stream that stores the events",
		"url: 'nats://a', nats: {subject: s, stream: a.b}":               `nats.stream: "a.b" is not the name of a stream: it holds a blank, '.', '*', '>' or a slash`,
		usable + ", inbox_prefix: 'a.>'}":                                `nats.inbox_prefix: "a.>" is not usable; write words of letters, digits, '-' and '_' with dots between them`,
		usable + ", credentials_file: DIR/none}":                         "nats.credentials_file: cannot read DIR/none: no such file or directory",
		usable + ", credentials_file: DIR/text}":                         "nats.credentials_file: DIR/text holds no user's JWT (-----BEGIN NATS USER JWT-----); write it with: nsc generate creds",
		usable + ", nkey_file: DIR/text}":                                "nats.nkey_file: DIR/text holds no seed of a user's NKey, which begins with SU; write one with: nsc generate nkey --user",
		usable + ", credentials_file: DIR/creds, nkey_file: DIR/nk}":     "nats.nkey_file: is set beside credentials_file, and a connection can have one identity; remove one of them",
		usable + ", credentials_file: DIR/creds}, bearer_token: x":       "nats.credentials_file: is set beside basic_auth or bearer_token, and a connection can have one identity; remove one of them",
		usable + "}, headers: {authorization: hunter2}":                  "headers.authorization: does not identify the relay to NATS; write nats.credentials_file, nats.nkey_file, basic_auth or bearer_token",
		usable + "}, headers: {nats-rollup: all}":                        "headers.nats-rollup: is a command to the server; remove it",
		usable + "}, proxy: 'http://p:1'":                                "proxy: has no effect: NATS is not reached through a proxy of HTTP; remove it",
		usable + "}, responses: {fail: [404]}":                           "responses.fail: has no effect: NATS answers without a status code of HTTP; remove it",
		usable + "}, excerpts: text":                                     "excerpts: has no effect: NATS and Kafka answer without a body; remove it",
		usable + "}, tls: {server_name: a}":                              "tls.server_name: has no effect, as the url begins with nats://; write tls://, or remove tls",
		"url: 'http://a', nats: {subject: s}":                            "nats.subject: is for destinations of NATS, whose url begins with nats:// or tls://; remove it",
		"url: 'http://a', nats: {credentials_file: DIR/creds}":           "nats.credentials_file: is for destinations of NATS, whose url begins with nats:// or tls://; remove it",
	} {
		t.Run(settings, func(t *testing.T) {
			t.Parallel()
			file := "defaults: {responses: {fail: [404]}, excerpts: text, tls: {min_version: \"1.3\"}}\ndestinations:\n  a: {" + strings.ReplaceAll(settings, "DIR", dir) + "}\n"
			r := check(t, file, twoSettings[:1])
			r.stderr = strings.ReplaceAll(r.stderr, dir, "DIR")
			switch {
			case want == "" && r.code != 0:
				t.Errorf("exit code %d\n%s", r.code, r.stderr)
			case want != "":
				r.expect(t, cli.ExitConfig, "", mistakes("outbox-relay.yaml:3: destinations.a."+want))
			}
			if strings.Contains(r.stderr, "hunter2") {
				t.Error("the secret is repeated")
			}
		})
	}
	for file, want := range map[string]string{
		"egress: {proxy: 'http://p:1'}\ndestinations: {a: {" + usable + "}}}":                                     "destinations.a.proxy: is not none, although egress.proxy names a proxy through which NATS is not reached; write proxy: none to connect directly",
		"egress: {allow_private: []}\ndestinations: {a: {url: 'nats://10.1.2.3', nats: {subject: s, stream: s}}}": "destinations.a.url: names a server that cannot be used: address 10.1.2.3 is private and not within egress.allow_private",
	} {
		if r := check(t, file+"\n", twoSettings[:1]); r.code != cli.ExitConfig || !strings.Contains(r.stderr, ": "+want+"\n") {
			t.Errorf("%s: exit code %d\n%s", file, r.code, r.stderr)
		}
	}
	r := check(t, "destinations: {a: {url: 'http://a'}}\n", append(twoSettings[:1:1], "OUTBOX_DESTINATION_NATS_STREAM=EVENTS"))
	r.expect(t, cli.ExitConfig, "", mistakes(`env OUTBOX_DESTINATION_NATS_STREAM: is only for the destination "default", and there is none; write nats.stream for each destination that needs it`))
}
