package main

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/settings"
	"github.com/outbox-relay/outbox-relay/relay"
)

const (
	maxCAs       = 4 << 20 // bytes of a file of authorities; all of a system's take a quarter of a megabyte
	expiryNotice = 30 * 24 * time.Hour
)

// bindTLS reads the files of a destination's TLS settings. TLS settings of its own beside a URL without TLS are a mistake: the
// operator believes that requests are encrypted.
func (c *config) bindTLS(path string, d *destination) {
	t := &d.Wire.TLS
	if strings.HasPrefix(strings.ToLower(d.URL), "http:") {
		*t = relay.TLS{}
		for _, key := range []string{"ca_file", "cert_file", "key_file", "min_version", "server_name"} {
			if c.Own(path + ".tls." + key) {
				c.ProblemAt(path+".tls."+key, "has no effect, as the url begins with http://; write https://, or remove tls")
			}
		}
		return
	}
	ca, cert, key := path+".tls.ca_file", path+".tls.cert_file", path+".tls.key_file"
	if d.caFile != "" && !c.Failed(ca) {
		if w, err := settings.WatchFiles(&c.log, maxCAs, parseAuthorities(d.caFile), d.caFile); err != nil {
			c.ProblemAt(ca, err.Error())
		} else {
			t.Roots = w.Get
		}
	}
	switch {
	case c.Failed(cert) || c.Failed(key):
	case d.certFile == "" && d.keyFile != "":
		c.ProblemAt(key, "is set without tls.cert_file; set both")
	case d.certFile != "" && d.keyFile == "":
		c.ProblemAt(cert, "is set without tls.key_file; set both")
	case d.certFile != "":
		w, err := settings.WatchFiles(&c.log, settings.MaxSecret, parseKeyPair(d.certFile, d.keyFile), d.certFile, d.keyFile)
		if err != nil {
			c.ProblemAt(cert, err.Error())
			break
		}
		c.WarnReadable(key, d.keyFile)
		if leaf := w.Get().Leaf; time.Until(leaf.NotAfter) < expiryNotice {
			c.WarnAt(cert, expiryText(d.certFile, leaf.NotAfter))
		}
		notice := &expiryWarner{name: d.certFile, log: &c.log, next: time.Now().Add(24 * time.Hour)}
		t.Certificate = func() *tls.Certificate { return notice.look(w.Get()) }
	}
}

// An expiryWarner warns once a day that a client certificate ends soon.
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
func (c *config) authorization(path string, d *destination) func() string {
	keys := slices.DeleteFunc([]string{"bearer_token", "bearer_token_file", "basic_auth"}, func(key string) bool { return !c.Has(path + "." + key) })
	switch {
	case len(keys) > 1:
		c.ProblemAt(path+"."+keys[1], "is set beside "+keys[0]+", and one request can carry one credential; remove one of them")
		return nil
	case len(keys) == 0 || c.Failed(path+"."+keys[0]) || c.FailedBelow(path+"."+keys[0]):
		return nil
	}
	basic := func(password string) string {
		return "Basic " + base64.StdEncoding.EncodeToString([]byte(d.user+":"+password))
	}
	switch at := path + "." + keys[0]; {
	case d.bearer != "":
		return fixed("Bearer " + string(d.bearer))
	case d.bearerFile != "":
		return c.followSecret(at, d.bearerFile, parseBearer, func(token string) string { return "Bearer " + token })
	case d.user == "":
		c.ProblemAt(at, `has no username; write {username: …, password: "${…}"}`)
	case d.password != "" && d.passwordFile != "":
		c.ProblemAt(at+".password_file", "is set beside password; remove one of them")
	case d.password != "":
		return fixed(basic(string(d.password)))
	case d.passwordFile != "":
		return c.followSecret(at+".password_file", d.passwordFile, settings.ParseSecret, basic)
	default:
		c.ProblemAt(at, "has neither password nor password_file; set one of them")
	}
	return nil
}

func fixed(header string) func() string { return func() string { return header } }

// followSecret returns a header made of what a file holds. path is the setting that names the file.
func (c *config) followSecret(path, name string, parse settings.Parser[settings.Secret], header func(string) string) func() string {
	w, err := settings.WatchFiles(&c.log, settings.MaxSecret, func(contents [][]byte) (string, error) {
		secret, problem := parse(strings.TrimRight(string(contents[0]), "\r\n"))
		if problem != "" {
			return "", errors.New(name + " " + problem)
		}
		return header(string(secret)), nil
	}, name)
	if err != nil {
		c.ProblemAt(path, err.Error())
		return nil
	}
	c.WarnReadable(path, name)
	return w.Get
}
