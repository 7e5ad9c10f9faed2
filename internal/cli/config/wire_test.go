package config

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// certificate makes a certificate that signs itself, and its key, in PEM format.
func certificate(t *testing.T, name string, end time.Time) (cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: end.Add(-365 * 24 * time.Hour), NotAfter: end,
		IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	must(t, err)
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	must(t, err)
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}))
}

func TestWireMistakes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, text string) { writeFile(t, filepath.Join(dir, name), text) }
	cert, key := certificate(t, "client", time.Now().Add(365*24*time.Hour))
	_, otherKey := certificate(t, "other", time.Now().Add(365*24*time.Hour))
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
		"format: json":                                                     `destinations.a.format: "json" is not known; write one of raw, cloudevents`,
		"format: cloudevent":                                               `destinations.a.format: "cloudevent" is not known; did you mean "cloudevents"?`,
		"format: cloudevents":                                              `destinations.a.cloudevents_source: is not set, and with an event's id it is what receivers of CloudEvents know the event by; write the URI of the producing service, such as "https://finance.internal/outbox"`,
		"cloudevents_source: 'a b'":                                        `destinations.a.cloudevents_source: is not a URI reference; write one such as "https://finance.internal/outbox" or "/finance/outbox"`,
		"cloudevents_source: 'http://%zz'":                                 `destinations.a.cloudevents_source: is not a URI reference; write one such as "https://finance.internal/outbox" or "/finance/outbox"`,
		"max_payload_bytes: 1MB":                                           `destinations.a.max_payload_bytes: "1MB" is not a whole number`,
		"excerpts: html":                                                   `destinations.a.excerpts: "html" is not known; write one of problem, text, none`,
		"max_payload_bytes: -1":                                            `destinations.a.max_payload_bytes: -1 is negative; write a number of bytes, or 0 for no limit of its own`,
		"tls: {min_version: 1.1}":                                          `destinations.a.tls.min_version: "1.1" is not known; did you mean "1.2"?`,
		"tls: {insecure: true}":                                            `unknown key "destinations.a.tls.insecure"`,
		"tls: {server_name: 'a b'}":                                        `destinations.a.tls.server_name: "a b" is neither a DNS name nor an IPv4 address`,
		"tls: {ca_file: DIR/none}":                                         `destinations.a.tls.ca_file: cannot read DIR/none: no such file or directory`,
		"tls: {ca_file: DIR}":                                              `destinations.a.tls.ca_file: cannot read DIR: it is a directory`,
		"tls: {ca_file: DIR/text}":                                         `destinations.a.tls.ca_file: DIR/text holds no certificate in PEM format (-----BEGIN CERTIFICATE-----)`,
		"tls: {ca_file: DIR/key}":                                          `destinations.a.tls.ca_file: DIR/key holds no certificate in PEM format (-----BEGIN CERTIFICATE-----)`,
		"tls: {ca_file: DIR/broken}":                                       `destinations.a.tls.ca_file: DIR/broken holds a certificate that cannot be read: x509: malformed certificate`,
		"tls: {cert_file: DIR/cert}":                                       `destinations.a.tls.cert_file: is set without tls.key_file; set both`,
		"tls: {key_file: DIR/key}":                                         `destinations.a.tls.key_file: is set without tls.cert_file; set both`,
		"tls: {cert_file: DIR/cert, key_file: DIR/other}":                  `destinations.a.tls.cert_file: DIR/cert and DIR/other ` + pair + `private key does not match public key`,
		"tls: {cert_file: DIR/key, key_file: DIR/cert}":                    `destinations.a.tls.cert_file: DIR/key and DIR/cert ` + pair + `failed to find certificate PEM data in certificate input, but did find a private key; PEM inputs may have been switched`,
		"tls: {cert_file: DIR/cert, key_file: DIR/none}":                   `destinations.a.tls.cert_file: cannot read DIR/none: no such file or directory`,
		"bearer_token: Bearer hunter2":                                     `destinations.a.bearer_token: begins with "Bearer "; write only what follows it`,
		"bearer_token: hunter2 hunter2":                                    `destinations.a.bearer_token: contains a blank, a line break or another character that a token cannot have`,
		"bearer_token_file: DIR/none":                                      `destinations.a.bearer_token_file: cannot read DIR/none: no such file or directory`,
		"bearer_token_file: DIR/empty":                                     `destinations.a.bearer_token_file: DIR/empty is empty`,
		"bearer_token_file: DIR/blank":                                     `destinations.a.bearer_token_file: DIR/blank contains a blank, a line break or another character that a token cannot have`,
		"bearer_token_file: DIR/bearer":                                    `destinations.a.bearer_token_file: DIR/bearer begins with "Bearer "; write only what follows it`,
		"bearer_token_file: /dev/zero":                                     `destinations.a.bearer_token_file: cannot read /dev/zero: it is not a regular file`,
		"basic_auth: {password: hunter2}":                                  `destinations.a.basic_auth: has no username; write {username: …, password: "${…}"}`,
		"basic_auth: {username: u}":                                        `destinations.a.basic_auth: has neither password nor password_file; set one of them`,
		"basic_auth: {username: 'u:v', password: p}":                       `destinations.a.basic_auth.username: contains a colon, which ends a user name`,
		"basic_auth: {username: u, password: p, password_file: x}":         `destinations.a.basic_auth.password_file: is set beside password; remove one of them`,
		"basic_auth: {username: u, password_file: DIR/empty}":              `destinations.a.basic_auth.password_file: DIR/empty is empty`,
		"bearer_token: x, bearer_token_file: DIR/text":                     `destinations.a.bearer_token_file: is set beside bearer_token, and one request can carry one credential; remove one of them`,
		"bearer_token: x, basic_auth: {username: u, password: p}":          `destinations.a.basic_auth: is set beside bearer_token, and one request can carry one credential; remove one of them`,
		"bearer_token: x, headers: {authorization: hunter2}":               `destinations.a.headers.authorization: is set beside a credential, which goes into the same header; remove one of them`,
		"format: cloudevents, cloudevents_source: /s, headers: {ce-id: x}": `destinations.a.headers.ce-id: is set by format cloudevents; remove it`,
		"proxy: 'https://u:hunter2@p:1'":                                   `destinations.a.proxy: does not begin with http://, the only way of speaking to a proxy that is supported; write one such as http://proxy.internal:3128`,
		"proxy: 'http://u:hunter2@p'":                                      `destinations.a.proxy: has no port; write one such as http://proxy.internal:3128`,
		"proxy: 'http://p:1/hunter2'":                                      `destinations.a.proxy: has something behind the port; write one such as http://proxy.internal:3128`,
		"proxy: 'hunter2'":                                                 `destinations.a.proxy: is not a URL; write one such as http://proxy.internal:3128`,
		"proxy: 'http://169.254.169.254:80'":                               `destinations.a.proxy: address 169.254.169.254 is never dialled: it is link-local, a cloud's metadata service, or otherwise not a host's own`,
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
	r := check(t, "destinations: {a: {url: 'http://a'}}\n", append(twoSettings[:1:1], "OUTBOX_BEARER_TOKEN=hunter2"))
	r.expect(t, cli.ExitConfig, "", mistakes(`env OUTBOX_BEARER_TOKEN: is sent only to the destination "default", and there is none; write bearer_token for each destination that needs it`))
}

// What is shared by defaults does not hold for destinations without encryption.
func TestSharedTLS(t *testing.T) {
	t.Parallel()
	ca, _ := certificate(t, "ca", time.Now().Add(time.Hour))
	file := writeFile(t, filepath.Join(t.TempDir(), "ca"), ca)
	c := loadFrom(sources{Env: twoSettings[:1], Flags: map[string]string{"config": writeFile(t, filepath.Join(t.TempDir(), usualFile),
		"defaults: {tls: {ca_file: "+file+"}}\ndestinations: {a: {url: 'http://a'}, b: {url: 'https://b'}}\n")}})
	must(t, c.Err())
	if d := c.Relay.Destinations; d[0].Wire.TLS.Roots != nil || d[1].Wire.TLS.Roots == nil {
		t.Error("the authorities are not those of b alone")
	}
}

// A certificate that ends soon is reported at the start.
func TestCertificateThatEndsSoon(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cert, key := certificate(t, "client", time.Date(2020, 1, 2, 3, 4, 5, 0, time.UTC))
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
	must(t, c.Err())
	got := map[string]string{}
	for _, d := range c.Relay.Destinations {
		if d.Wire.Authorization != nil {
			got[d.Name] = d.Wire.Authorization()
		}
	}
	want := map[string]string{"token": "Bearer t0", "token_file": "Bearer one", "basic": "Basic dTpw", "basic_file": "Basic dTpww6RzcyB3b3Jk"}
	for name, value := range want {
		if got[name] != value {
			t.Errorf("%s: %q, want %q", name, got[name], value)
		}
	}
	if len(got) != len(want) {
		t.Errorf("credentials: %q", got)
	}
	i := slices.IndexFunc(c.Relay.Destinations, func(d post.Destination) bool { return d.Name == "token_file" })
	follow := c.Relay.Destinations[i].Wire.Authorization
	writeFile(t, token, "two\n")
	if value := follow(); value != "Bearer two" {
		t.Errorf("after a change: %q", value)
	}
}
