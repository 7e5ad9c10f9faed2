package main

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/relay/post"
)

// wirePolicy lists the settings of requests that defaults has, too.
func wirePolicy() []field {
	return []field{
		{path: "format", env: "FORMAT", kind: one("raw", parseChoice(string(post.FormatRaw), string(post.FormatCloudEvents))), standard: string(post.FormatRaw)},
		{path: "cloudevents_source", env: "CLOUDEVENTS_SOURCE", kind: one("https://finance.internal/outbox", parseText)},
		{path: "max_payload_bytes", env: "MAX_PAYLOAD_BYTES", kind: one("262144", parseNumber), standard: 0},
		{path: "excerpts", env: "EXCERPTS", kind: one("problem", parseChoice(string(post.ExcerptsProblem), string(post.ExcerptsText), string(post.ExcerptsNone))), standard: string(post.ExcerptsProblem)},
		{path: "tls.ca_file", env: "TLS_CA_FILE", kind: one("/etc/tls/ca.pem", parseText)},
		{path: "tls.cert_file", env: "TLS_CERT_FILE", kind: one("/etc/tls/tls.crt", parseText)},
		{path: "tls.key_file", env: "TLS_KEY_FILE", kind: one("/etc/tls/tls.key", parseText)},
		{path: "tls.min_version", env: "TLS_MIN_VERSION", kind: one(`"1.2"`, parseChoice("1.2", "1.3")), standard: "1.2"},
	}
}

// wireFields lists those that a destination alone has.
func wireFields() []field {
	return []field{
		{path: "destinations.*.tls.server_name", kind: one("logistics.internal", parseText)},
		{path: "destinations.*.bearer_token", env: "BEARER_TOKEN", kind: one("${LOGISTICS_TOKEN}", parseBearer)},
		{path: "destinations.*.bearer_token_file", env: "BEARER_TOKEN_FILE", kind: one("/var/run/secrets/tokens/logistics", parseText)},
		{path: "destinations.*.basic_auth.username", kind: one("outbox", parseUsername)},
		{path: "destinations.*.basic_auth.password", kind: one("${LOGISTICS_PASSWORD}", parseSecretText)},
		{path: "destinations.*.basic_auth.password_file", kind: one("/var/run/secrets/logistics/password", parseText)},
		{path: "destinations.*.proxy", kind: one("http://proxy.internal:3128", parseSecretText)},
	}
}

// egressFields lists those of where the relay may connect to.
func egressFields() []field {
	return []field{
		{path: "egress.allow_private", env: "EGRESS_ALLOW_PRIVATE", kind: many("[10.20.0.0/16]", parsePrefix)},
		{path: "egress.proxy", env: "EGRESS_PROXY", fromFile: true, kind: one("http://proxy.internal:3128", parseSecretText)},
	}
}

func (c *config) egress() post.Egress {
	return post.Egress{
		AllowPrivate: get[[]netip.Prefix](c, "egress.allow_private"),
		Proxy:        string(get[secret](c, "egress.proxy")),
	}
}

// wires are what the destinations' requests travel with, by destination. What comes from files follows them.
type wires struct {
	of  map[string]post.Wire
	log zerolog.Logger // where changes are told; discards until the log exists
}

const (
	maxCAs       = 4 << 20 // bytes of a file of authorities; all of a system's take a quarter of a megabyte
	expiryNotice = 30 * 24 * time.Hour
)

// checkWires reads the files that destinations name.
func (c *config) checkWires() {
	c.wires = &wires{of: map[string]post.Wire{}, log: zerolog.Nop()}
	for _, name := range c.destinations {
		path := "destinations." + name
		w := post.Wire{
			Format:          post.Format(get[string](c, path+".format")),
			Source:          get[string](c, path+".cloudevents_source"),
			MaxPayloadBytes: int64(get[int](c, path+".max_payload_bytes")),
			Excerpts:        post.Excerpts(get[string](c, path+".excerpts")),
			Proxy:           string(get[secret](c, path+".proxy")),
			Authorization:   c.authorization(path),
		}
		if c.encrypted(path) {
			w.TLS = c.tls(path)
		}
		c.wires.of[name] = w
	}
	c.checkCredential()
}

// encrypted reports whether a destination's requests are. TLS settings of its own beside a URL without it are a mistake:
// their writer believes that it is.
func (c *config) encrypted(path string) bool {
	if !strings.HasPrefix(strings.ToLower(get[string](c, path+".url")), "http:") {
		return true
	}
	for _, key := range []string{"ca_file", "cert_file", "key_file", "min_version", "server_name"} {
		if s, ok := c.settings[path+".tls."+key]; ok && s.path == path+".tls."+key {
			c.problem(s.origin, s.path, "has no effect, as the url begins with http://; write https://, or remove tls")
		}
	}
	return false
}

func (c *config) tls(path string) post.TLS {
	t := post.TLS{ServerName: get[string](c, path+".tls.server_name")}
	if get[string](c, path+".tls.min_version") == "1.3" {
		t.MinVersion = tls.VersionTLS13
	}
	ca, cert, key := path+".tls.ca_file", path+".tls.cert_file", path+".tls.key_file"
	if name := get[string](c, ca); name != "" && !c.failed(ca) {
		if w, err := watchFiles(&c.wires.log, maxCAs, parseAuthorities(name), name); err != nil {
			c.problemAt(ca, err.Error())
		} else {
			t.Roots = w.get
		}
	}
	switch certName, keyName := get[string](c, cert), get[string](c, key); {
	case c.failed(cert) || c.failed(key):
	case certName == "" && keyName != "":
		c.problemAt(key, "is set without tls.cert_file; set both")
	case certName != "" && keyName == "":
		c.problemAt(cert, "is set without tls.key_file; set both")
	case certName != "":
		w, err := watchFiles(&c.wires.log, maxSecret, parseKeyPair(certName, keyName), certName, keyName)
		if err != nil {
			c.problemAt(cert, err.Error())
			break
		}
		c.warnReadable(key, keyName)
		if leaf := w.value.Leaf; time.Until(leaf.NotAfter) < expiryNotice {
			c.warn(c.settings[cert].origin, c.settings[cert].path, expiryText(certName, leaf.NotAfter))
		}
		notice := &expiryWarner{name: certName, log: &c.wires.log, next: time.Now().Add(24 * time.Hour)}
		t.Certificate = func() *tls.Certificate { return notice.look(w.get()) }
	}
	return t
}

// An expiryWarner tells once a day that a client certificate ends soon.
type expiryWarner struct {
	name string
	log  *zerolog.Logger

	mu   sync.Mutex
	next time.Time
}

func (e *expiryWarner) look(certificate *tls.Certificate) *tls.Certificate {
	now := time.Now()
	if certificate.Leaf.NotAfter.Sub(now) >= expiryNotice {
		return certificate
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if now.After(e.next) {
		e.next = now.Add(24 * time.Hour)
		e.log.Warn().Msg("tls.cert_file: " + expiryText(e.name, certificate.Leaf.NotAfter))
	}
	return certificate
}

func expiryText(name string, end time.Time) string {
	return fmt.Sprintf("the certificate in %s ends at %s; replace it before, which needs no restart", name, end.UTC().Format("2006-01-02 15:04 UTC"))
}

// parseAuthorities reads a bundle of certificates. x509.CertPool itself would pass over those it cannot read.
func parseAuthorities(name string) func([][]byte) (*x509.CertPool, error) {
	return func(contents [][]byte) (*x509.CertPool, error) {
		pool, found := x509.NewCertPool(), false
		for rest := contents[0]; ; {
			var block *pem.Block
			if block, rest = pem.Decode(rest); block == nil {
				break
			}
			if block.Type != "CERTIFICATE" {
				continue
			}
			certificate, err := x509.ParseCertificate(block.Bytes)
			if err != nil {
				return nil, fmt.Errorf("%s holds a certificate that cannot be read: %w", name, err)
			}
			pool.AddCert(certificate)
			found = true
		}
		if !found {
			return nil, fmt.Errorf("%s holds no certificate in PEM format (-----BEGIN CERTIFICATE-----)", name)
		}
		return pool, nil
	}
}

func parseKeyPair(certName, keyName string) func([][]byte) (*tls.Certificate, error) {
	return func(contents [][]byte) (*tls.Certificate, error) {
		pair, err := tls.X509KeyPair(contents[0], contents[1])
		if err != nil {
			return nil, fmt.Errorf("%s and %s are no certificate and key that belong together, in PEM format and unencrypted: %s",
				certName, keyName, strings.TrimPrefix(err.Error(), "tls: "))
		}
		return &pair, nil
	}
}

// authorization returns what a destination's requests carry as that header; nil: nothing.
func (c *config) authorization(path string) func() string {
	set := func(key string) bool { _, ok := c.settings[path+"."+key]; return ok }
	value := func(key string) string { return string(get[secret](c, path+"."+key)) }
	ways := slices.DeleteFunc([]string{"bearer_token", "bearer_token_file", "basic_auth"}, func(key string) bool { return !set(key) && !set(key+".username") })
	if len(ways) > 1 {
		c.problemAt(path+"."+ways[1], "is set beside "+ways[0]+", and one request can carry one credential; remove one of them")
		return nil
	}
	if len(ways) == 0 || c.failed(path+"."+ways[0]) || c.failedBelow(path+"."+ways[0]) {
		return nil
	}
	switch at := path + "." + ways[0]; ways[0] {
	case "bearer_token":
		header := "Bearer " + value("bearer_token")
		return func() string { return header }
	case "bearer_token_file":
		return c.followSecret(at, parseBearer, func(token string) string { return "Bearer " + token })
	default:
		user := get[string](c, at+".username")
		basic := func(password string) string {
			return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password))
		}
		switch {
		case user == "":
			c.problemAt(at, `has no username; write {username: …, password: "${…}"}`)
		case set("basic_auth.password") && set("basic_auth.password_file"):
			c.problemAt(at+".password_file", "is set beside password; remove one of them")
		case set("basic_auth.password"):
			header := basic(value("basic_auth.password"))
			return func() string { return header }
		case set("basic_auth.password_file"):
			return c.followSecret(at+".password_file", parseSecretText, basic)
		default:
			c.problemAt(at, "has neither password nor password_file; set one of them")
		}
	}
	return nil
}

// followSecret returns a header made of what the file named at path holds.
func (c *config) followSecret(path string, parse func(string) (secret, string), header func(string) string) func() string {
	name := get[string](c, path)
	w, err := watchFiles(&c.wires.log, maxSecret, func(contents [][]byte) (string, error) {
		text := strings.TrimRight(string(contents[0]), "\r\n")
		plain, problem := parse(text)
		if problem != "" {
			return "", errors.New(name + " " + problem)
		}
		return header(string(plain)), nil
	}, name)
	if err != nil {
		c.problemAt(path, err.Error())
		return nil
	}
	c.warnReadable(path, name)
	return w.get
}

// warnReadable tells of a secret file that everyone on the machine can read.
func (c *config) warnReadable(path, name string) {
	if info, err := os.Stat(name); err == nil && info.Mode().Perm()&0o004 != 0 {
		c.warn(c.settings[path].origin, c.settings[path].path, "%s is readable by everyone on this machine; run: chmod o-r %s", name, name)
	}
}

// checkCredential refuses a variable that would send a credential nowhere.
func (c *config) checkCredential() {
	for _, key := range []string{"bearer_token", "bearer_token_file"} {
		path := "destinations." + defaultDestination + "." + key
		s, ok := c.settings[path]
		if ok && len(c.destinations) > 0 && !slices.Contains(c.destinations, defaultDestination) {
			c.problem(s.origin, path, `is sent only to the destination "default", and there is none; write %s for each destination that needs it`, key)
		}
	}
}

// parseBearer never repeats the token.
func parseBearer(text string) (secret, string) {
	switch {
	case text == "":
		return "", "is empty"
	case strings.HasPrefix(text, "Bearer "):
		return "", `begins with "Bearer "; write only what follows it`
	case strings.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r > '~' }):
		return "", "contains a blank, a line break or another character that a token cannot have"
	}
	return secret(text), ""
}

func parseUsername(text string) (string, string) {
	if strings.Contains(text, ":") {
		return "", "contains a colon, which ends a user name"
	}
	return parseText(text)
}

func parsePrefix(text string) (netip.Prefix, string) {
	if address, err := netip.ParseAddr(text); err == nil && address.Zone() == "" {
		return netip.Prefix{}, fmt.Sprintf(`%s is an address; write the network "%s/%d"`, quote(text), text, address.BitLen())
	}
	prefix, err := netip.ParsePrefix(text)
	switch {
	case err != nil:
		return prefix, quote(text) + ` is not a network; write one such as "10.20.0.0/16"`
	case prefix != prefix.Masked():
		return prefix, fmt.Sprintf(`%s has bits behind its length; write "%s"`, quote(text), prefix.Masked())
	}
	return prefix, ""
}

// withoutUser shows a proxy without its credential.
func withoutUser(raw secret) string {
	u, err := url.Parse(string(raw))
	if err != nil || u.Host == "" && string(raw) != post.NoProxy {
		return mask
	}
	if u.User != nil {
		return u.Scheme + "://" + mask + "@" + u.Host
	}
	return string(raw)
}
