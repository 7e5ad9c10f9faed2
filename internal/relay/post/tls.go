package post

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"time"
)

// TLS says how a destination proves who it is, and the relay to it. There is no way to trust just
// anybody. The zero value: TLS 1.2 or later, the system's certificate authorities, no client
// certificate.
type TLS struct {
	// MinVersion is [tls.VersionTLS12] or [tls.VersionTLS13]. 0: 1.2.
	MinVersion uint16
	// ServerName is the name that the destination's certificate must be made for, and that it is
	// asked for. Empty: the URL's host.
	ServerName string
	// Roots returns the authorities that are trusted, instead of the system's. It is called in
	// every handshake, from many goroutines, so that what it returns may change; it must return at
	// once. nil: the system's.
	Roots func() *x509.CertPool
	// Certificate returns what the relay identifies itself with when the destination asks for it.
	// It is called in every such handshake, like Roots. nil: nothing.
	Certificate func() *tls.Certificate
}

// config returns the settings of connections to a host.
func (t TLS) config(host string) *tls.Config {
	cfg := &tls.Config{MinVersion: cmp.Or(t.MinVersion, tls.VersionTLS12), ServerName: t.ServerName}
	if t.Roots != nil {
		// A tls.Config holds one pool for ever. So the verification that is switched off here
		// happens below, in every handshake, with the authorities of that moment.
		cfg.InsecureSkipVerify = true
		name := cmp.Or(t.ServerName, host) // that of the connection is empty for an address
		cfg.VerifyConnection = func(state tls.ConnectionState) error {
			return verifyServer(state.PeerCertificates, name, t.Roots())
		}
	}
	if t.Certificate != nil {
		cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return usableCertificate(t.Certificate(), time.Now())
		}
	}
	return cfg
}

// current returns the settings of one connection, with the authorities and the certificate of this
// moment.
func (t TLS) current() *tls.Config {
	cfg := t.config("")
	if t.Roots != nil {
		cfg.InsecureSkipVerify, cfg.VerifyConnection, cfg.RootCAs = false, nil, t.Roots()
	}
	return cfg
}

// verifyServer does what crypto/tls does with tls.Config.RootCAs, and fails with the same error.
func verifyServer(chain []*x509.Certificate, name string, roots *x509.CertPool) error {
	if len(chain) == 0 || roots == nil || name == "" { // without roots Verify would take the system's, without a name any
		return errors.New("tls: nothing to verify the destination's certificate with")
	}
	options := x509.VerifyOptions{DNSName: name, Roots: roots, Intermediates: x509.NewCertPool()}
	for _, certificate := range chain[1:] {
		options.Intermediates.AddCert(certificate)
	}
	if _, err := chain[0].Verify(options); err != nil {
		return &tls.CertificateVerificationError{UnverifiedCertificates: chain, Err: err}
	}
	return nil
}

// usableCertificate refuses a client certificate out of its time: the destination would, with no
// more than "bad certificate".
func usableCertificate(certificate *tls.Certificate, now time.Time) (*tls.Certificate, error) {
	if certificate == nil || certificate.Leaf == nil {
		return nil, errors.New("tls: there is no client certificate")
	}
	const day = "2006-01-02 15:04 MST"
	switch leaf := certificate.Leaf; {
	case now.After(leaf.NotAfter):
		return nil, fmt.Errorf("tls: the client certificate expired at %s; replace the files of tls.cert_file and tls.key_file, which needs no restart", leaf.NotAfter.UTC().Format(day))
	case now.Before(leaf.NotBefore):
		return nil, fmt.Errorf("tls: the client certificate is not valid before %s", leaf.NotBefore.UTC().Format(day))
	}
	return certificate, nil
}
