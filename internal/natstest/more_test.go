package natstest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

type conn = net.Conn

// portOf returns the port of an endpoint's server.
func portOf(t testing.TB, e *post.Endpoint) int {
	t.Helper()
	_, port, err := net.SplitHostPort(e.URL.Host)
	pgtest.Must(t, err)
	n, err := strconv.Atoi(port)
	pgtest.Must(t, err)
	return n
}

// eventually waits for what no hook reports.
func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	deadline := time.After(patience)
	for !done() {
		select {
		case <-ticker.C:
		case <-deadline:
			t.Fatalf("never came: %s", what)
		}
	}
}

// authority returns a certificate authority, and what makes certificates of it.
func authority(t testing.TB) (ca *x509.Certificate, pair func(name string) tls.Certificate) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	pgtest.Must(t, err)
	template := func(name string) *x509.Certificate {
		return &x509.Certificate{
			SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
			KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		}
	}
	root := template("authority")
	root.IsCA, root.BasicConstraintsValid, root.KeyUsage = true, true, x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, root, root, key.Public(), key)
	pgtest.Must(t, err)
	ca, err = x509.ParseCertificate(der)
	pgtest.Must(t, err)
	return ca, func(name string) tls.Certificate {
		own, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		pgtest.Must(t, err)
		der, err := x509.CreateCertificate(rand.Reader, template(name), ca, own.Public(), key)
		pgtest.Must(t, err)
		leaf, err := x509.ParseCertificate(der)
		pgtest.Must(t, err)
		return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: own, Leaf: leaf}
	}
}

func split(t testing.TB, address string) (host string, port int) {
	t.Helper()
	host, text, err := net.SplitHostPort(address)
	pgtest.Must(t, err)
	port, err = strconv.Atoi(text)
	pgtest.Must(t, err)
	return host, port
}
