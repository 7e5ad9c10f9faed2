package post_test

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localcert"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// What is wrong with the TLS of a receiver: never a request, always a label and a text that says
// what to fix. What is not here is revocation, which crypto/tls does not look into.
func TestTLSTable(t *testing.T) {
	t.Parallel()
	ca, other := newAuthority(), newAuthority()
	good := ca.issue(nil)
	server := func(c tls.Certificate) *tls.Config { return &tls.Config{Certificates: []tls.Certificate{c}} }
	demands := func(version uint16) *tls.Config {
		return &tls.Config{Certificates: []tls.Certificate{good}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: ca.Pool(), MaxVersion: version}
	}
	identified := func(c tls.Certificate) post.TLS {
		return post.TLS{Roots: ca.Pool, Certificate: func() *tls.Certificate { return &c }}
	}
	year := 365 * 24 * time.Hour
	plain := relaytest.NewReceiver(t, nil)
	hangUp := relaytest.NewRawServer(t, func(_ *relaytest.RawServer, conn net.Conn) { _, _ = conn.Read(make([]byte, 1)) })
	garbage := relaytest.NewRawServer(t, func(_ *relaytest.RawServer, conn net.Conn) { _, _ = conn.Write([]byte("SSH-2.0-OpenSSH_9.9\r\n")) })
	secure := func(url string) string { return strings.Replace(url, "http:", "https:", 1) }

	for name, c := range map[string]struct {
		server  *tls.Config
		url     string // instead of a server
		client  post.TLS
		late    bool // over TLS 1.3 the client hears of it after its first write, or only that this broke
		want    policy.Reason
		message string
	}{
		"trusted":                       {server: server(good), client: ca.trusts(), want: policy.ReasonOK},
		"trusted, TLS 1.3 only":         {server: &tls.Config{Certificates: []tls.Certificate{good}, MinVersion: tls.VersionTLS13}, client: post.TLS{Roots: ca.Pool, MinVersion: tls.VersionTLS13}, want: policy.ReasonOK},
		"another server name":           {server: server(ca.issue(func(c *x509.Certificate) { c.IPAddresses, c.DNSNames = nil, []string{"r.internal"} })), client: post.TLS{Roots: ca.Pool, ServerName: "r.internal"}, want: policy.ReasonOK},
		"unknown authority":             {server: server(other.issue(nil)), client: ca.trusts(), want: policy.ReasonTLS, message: "certificate signed by unknown authority"},
		"the system's authorities":      {server: server(good), client: post.TLS{}, want: policy.ReasonTLS, message: "unknown authority (set tls.ca_file to the authority's certificate)"},
		"signs itself":                  {server: server((&authority{}).issue(nil)), client: ca.trusts(), want: policy.ReasonTLS, message: "certificate signed by unknown authority"},
		"no authorities":                {server: server(good), client: post.TLS{Roots: x509.NewCertPool}, want: policy.ReasonTLS, message: "certificate signed by unknown authority"},
		"authorities are gone":          {server: server(good), client: post.TLS{Roots: func() *x509.CertPool { return nil }}, want: policy.ReasonTLS, message: "nothing to verify"},
		"expired":                       {server: server(ca.issue(func(c *x509.Certificate) { c.NotBefore, c.NotAfter = time.Now().Add(-year), time.Now().Add(-time.Hour) })), client: ca.trusts(), want: policy.ReasonTLS, message: "certificate has expired"},
		"not valid yet":                 {server: server(ca.issue(func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Hour) })), client: ca.trusts(), want: policy.ReasonTLS, message: "not yet valid"},
		"another address":               {server: server(ca.issue(func(c *x509.Certificate) { c.IPAddresses = []net.IP{net.IPv4(10, 0, 0, 1)} })), client: ca.trusts(), want: policy.ReasonTLS, message: "certificate is valid for 10.0.0.1, not 127.0.0.1"},
		"another name":                  {server: server(good), client: post.TLS{Roots: ca.Pool, ServerName: "r.internal"}, want: policy.ReasonTLS, message: "match r.internal (if the url is right, set tls.server_name to a name of the certificate)"},
		"name only in the common name":  {server: server(ca.issue(func(c *x509.Certificate) { c.IPAddresses, c.Subject.CommonName = nil, "127.0.0.1" })), client: ca.trusts(), want: policy.ReasonTLS, message: "legacy Common Name"},
		"a client's certificate":        {server: server(ca.issue(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} })), client: ca.trusts(), want: policy.ReasonTLS, message: "incompatible key usage"},
		"issued by what may not issue":  {server: server((&authority{localcert.Authority{Certificate: good}}).issue(nil)), client: ca.trusts(), want: policy.ReasonTLS, message: "certificate signed by unknown authority"},
		"TLS 1.0 only":                  {server: &tls.Config{Certificates: []tls.Certificate{good}, MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS10}, client: ca.trusts(), want: policy.ReasonTLS, message: "protocol version not supported"},
		"TLS 1.1 only":                  {server: &tls.Config{Certificates: []tls.Certificate{good}, MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11}, client: ca.trusts(), want: policy.ReasonTLS, message: "protocol version not supported"},
		"TLS 1.2 where 1.3 is asked":    {server: &tls.Config{Certificates: []tls.Certificate{good}, MaxVersion: tls.VersionTLS12}, client: post.TLS{Roots: ca.Pool, MinVersion: tls.VersionTLS13}, want: policy.ReasonTLS, message: "protocol version not supported"},
		"client certificate":            {server: demands(0), client: identified(ca.issue(nil)), want: policy.ReasonOK},
		"client certificate, TLS 1.2":   {server: demands(tls.VersionTLS12), client: identified(ca.issue(nil)), want: policy.ReasonOK},
		"no client certificate":         {server: demands(0), client: ca.trusts(), late: true, want: policy.ReasonTLS, message: "certificate required (it asks for a client certificate: set tls.cert_file and tls.key_file)"},
		"none, TLS 1.2":                 {server: demands(tls.VersionTLS12), client: ca.trusts(), want: policy.ReasonTLS, message: "handshake failure"},
		"of another authority, TLS 1.2": {server: demands(tls.VersionTLS12), client: identified(other.issue(nil)), want: policy.ReasonTLS, message: "unknown certificate authority"},
		"of another authority":          {server: demands(0), client: identified(other.issue(nil)), late: true, want: policy.ReasonTLS, message: "unknown certificate authority"},
		"expired client certificate":    {server: demands(0), client: identified(ca.issue(func(c *x509.Certificate) { c.NotBefore, c.NotAfter = time.Now().Add(-year), time.Now().Add(-time.Hour) })), want: policy.ReasonTLS, message: "the client certificate expired at 20"},
		"client certificate of later":   {server: demands(0), client: identified(ca.issue(func(c *x509.Certificate) { c.NotBefore = time.Now().Add(30 * time.Minute) })), want: policy.ReasonTLS, message: "the client certificate is not valid before 20"},
		"a server's as the client's":    {server: demands(0), client: identified(ca.issue(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} })), late: true, want: policy.ReasonTLS, message: "bad certificate"},
		"client certificate is gone":    {server: demands(0), client: post.TLS{Roots: ca.Pool, Certificate: func() *tls.Certificate { return nil }}, want: policy.ReasonTLS, message: "there is no client certificate"},
		"not asked for any":             {server: server(good), client: post.TLS{Roots: ca.Pool, Certificate: func() *tls.Certificate { return nil }}, want: policy.ReasonOK},
		"plain HTTP at the port":        {url: secure(plain.URL), client: ca.trusts(), want: policy.ReasonTLS, message: "speaks HTTP without TLS; write http:// or the port of its TLS"},
		"something else at the port":    {url: secure(garbage.URL), client: ca.trusts(), want: policy.ReasonTLS, message: "tls: first record does not look like a TLS handshake"},
		"HTTP to a port of TLS":         {url: strings.Replace(secureServer(t, server(good), &atomic.Int64{}), "https:", "http:", 1), want: policy.ReasonRejected},
		"nothing listens":               {url: "https://127.0.0.1:1/", want: policy.ReasonConnect},
		"name does not exist":           {url: "https://does-not-exist.invalid/", want: policy.ReasonDNS},
		"hangs up in the handshake":     {url: secure(hangUp.URL), client: ca.trusts(), want: policy.ReasonNetwork},
		"no cipher suite in common":     {server: &tls.Config{Certificates: []tls.Certificate{good}, MaxVersion: tls.VersionTLS12, CipherSuites: []uint16{tls.TLS_RSA_WITH_AES_128_CBC_SHA}}, client: ca.trusts(), want: policy.ReasonTLS, message: "handshake failure"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var requests atomic.Int64
			url := c.url
			if url == "" {
				url = secureServer(t, c.server, &requests)
			}
			v := exchangeWith(t, destinationOf(url, post.Wire{TLS: c.client}, post.Egress{}))
			t.Logf("%-32s %-9s %-8s %s", name, v.Outcome, v.Reason, v.Message)
			if n := requests.Load(); c.late && v.Outcome == policy.Retry && v.Reason == policy.ReasonNetwork && n == 0 {
				return
			}
			if v.Reason != c.want || !strings.Contains(v.Message, c.message) || (v.Outcome == policy.Delivered) != (c.want == policy.ReasonOK) {
				t.Errorf("%s %s %q, want %s %q", v.Outcome, v.Reason, v.Message, c.want, c.message)
			}
			if n := requests.Load(); n != 0 && v.Outcome != policy.Delivered {
				t.Errorf("%d requests over a connection that is not to be trusted", n)
			}
		})
	}
}

// A certificate that is renewed, and an authority that is replaced, are seen by the next handshake
// of the same endpoint.
func TestCertificatesChangeUnderAnEndpoint(t *testing.T) {
	t.Parallel()
	former, later := newAuthority(), newAuthority()
	var ca atomic.Pointer[authority]
	ca.Store(former)
	var requests atomic.Int64
	url := secureServer(t, &tls.Config{
		ClientAuth: tls.RequireAnyClientCert, SessionTicketsDisabled: true,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			now := ca.Load()
			return &tls.Config{Certificates: []tls.Certificate{now.issue(nil)}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: now.Pool()}, nil
		},
	}, &requests)
	var trusted, identity atomic.Pointer[authority]
	trusted.Store(former)
	identity.Store(former)
	e, err := post.NewEndpoint(destinationOf(url, post.Wire{TLS: post.TLS{
		Roots: func() *x509.CertPool { return trusted.Load().Pool() },
		Certificate: func() *tls.Certificate {
			c := identity.Load().issue(nil)
			return &c
		},
	}}, post.Egress{}), "")
	relaytest.Must(t, err)
	for _, step := range []struct {
		change func()
		want   policy.Reason
	}{
		{func() {}, policy.ReasonOK},
		{func() { ca.Store(later) }, policy.ReasonTLS},
		{func() { trusted.Store(later) }, policy.ReasonTLS}, // the client's own is still of the former
		{func() { identity.Store(later) }, policy.ReasonOK},
	} {
		step.change()
		e.CloseIdleConnections()
		before := requests.Load()
		v := exchange(t, e)
		// Over TLS 1.3 a client may hear of a refused certificate only by its connection's end.
		if step.want == policy.ReasonTLS && v.Reason == policy.ReasonNetwork && requests.Load() == before {
			continue
		}
		if v.Reason != step.want {
			t.Errorf("%s %q, want %s", v.Reason, v.Message, step.want)
		}
	}
	e.CloseIdleConnections()
}

// A handshake that stalls ends with the attempt's deadline, also when only the client's part is
// awaited.
func TestHandshakeThatNeverEnds(t *testing.T) {
	t.Parallel()
	stall := relaytest.NewRawServer(t, func(_ *relaytest.RawServer, conn net.Conn) { _, _ = io.Copy(io.Discard, conn) })
	d := destinationOf(strings.Replace(stall.URL, "http:", "https:", 1), post.Wire{TLS: newAuthority().trusts()}, post.Egress{})
	d.Timeout = 500 * time.Millisecond // in which the connection is made
	if v := exchangeWith(t, d); v.Reason != policy.ReasonTimeout {
		t.Errorf("%s %q", v.Reason, v.Message)
	}
}
