package post_test

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localcert"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
)

// An authority issues certificates.
type authority struct{ localcert.Authority }

func newAuthority() *authority { return &authority{localcert.NewAuthority(nil)} }

// issue makes a certificate for 127.0.0.1, for servers and clients, unless change makes another of
// it.
func (a *authority) issue(change func(*x509.Certificate)) tls.Certificate {
	return a.Issue(func(c *x509.Certificate) {
		c.DNSNames = nil
		if change != nil {
			change(c)
		}
	})
}

// trusts returns settings with this authority.
func (a *authority) trusts() post.TLS { return post.TLS{Roots: a.Pool} }

// serverConfig returns the settings of a server with a certificate of this authority.
func (a *authority) serverConfig() *tls.Config {
	return &tls.Config{Certificates: []tls.Certificate{a.issue(nil)}}
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
