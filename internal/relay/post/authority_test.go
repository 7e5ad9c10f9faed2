package post_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"io"
	"log"
	number "math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// An authority issues certificates.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	a := &authority{}
	made := a.issue(t, func(c *x509.Certificate) {
		c.IsCA, c.BasicConstraintsValid, c.KeyUsage = true, true, x509.KeyUsageCertSign
		c.Subject.CommonName = "test authority"
	})
	return &authority{certificate: made.Leaf, key: made.PrivateKey.(*ecdsa.PrivateKey)}
}

// issue makes a certificate for 127.0.0.1, for servers and clients, unless change makes another of it. An authority
// without a key lets it sign itself.
func (a *authority) issue(t testing.TB, change func(*x509.Certificate)) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	relaytest.Must(t, err)
	template := &x509.Certificate{
		SerialNumber: number.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	if change != nil {
		change(template)
	}
	parent, signer := a.certificate, a.key
	if signer == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	relaytest.Must(t, err)
	leaf, err := x509.ParseCertificate(der)
	relaytest.Must(t, err)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

func (a *authority) pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.certificate)
	return pool
}

// trusts returns settings with this authority.
func (a *authority) trusts() post.TLS { return post.TLS{Roots: a.pool} }

// serverConfig returns the settings of a server with a certificate of this authority.
func (a *authority) serverConfig(t testing.TB) *tls.Config {
	return &tls.Config{Certificates: []tls.Certificate{a.issue(t, nil)}}
}

// secureServer starts a receiver behind TLS settings, and counts what arrives.
func secureServer(t testing.TB, cfg *tls.Config, requests *atomic.Int64) string {
	t.Helper()
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { requests.Add(1) }))
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.TLS = cfg
	s.StartTLS()
	t.Cleanup(s.Close)
	return s.URL
}
