// Package localcert makes certificates for the servers and clients of tests and measurements.
package localcert

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"time"
)

// An Authority signs certificates. With its zero value each certificate signs itself.
type Authority struct{ tls.Certificate }

// NewAuthority makes an authority. Servers may use its own certificate, too. change may be nil.
func NewAuthority(change func(*x509.Certificate)) Authority {
	return Authority{Authority{}.Issue(func(c *x509.Certificate) {
		c.IsCA, c.BasicConstraintsValid, c.KeyUsage = true, true, x509.KeyUsageDigitalSignature|x509.KeyUsageCertSign
		c.Subject.CommonName = "test authority"
		if change != nil {
			change(c)
		}
	})}
}

// Issue makes a certificate for localhost and 127.0.0.1, for servers and clients, unless change
// makes another of it. It is valid for some days.
func (a Authority) Issue(change func(*x509.Certificate)) tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(240 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames: []string{"localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	if change != nil {
		change(template)
	}
	parent, signer := a.Leaf, a.PrivateKey
	if parent == nil {
		parent, signer = template, crypto.PrivateKey(key)
	}
	made := tls.Certificate{PrivateKey: key}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err == nil {
		made.Certificate = [][]byte{der}
		made.Leaf, err = x509.ParseCertificate(der)
	}
	if err != nil {
		panic(err)
	}
	return made
}

// Pool returns what trusts the authority.
func (a Authority) Pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.Leaf)
	return pool
}

// PEM returns a certificate and its key in PEM format.
func PEM(c tls.Certificate) (certificate, key []byte) {
	der, err := x509.MarshalPKCS8PrivateKey(c.PrivateKey)
	if err != nil {
		panic(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Certificate[0]}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}
