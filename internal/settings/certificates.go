package settings

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"
)

const (
	maxAuthorities = 4 << 20 // bytes; all authorities of a system take a quarter of a megabyte
	expiryNotice   = 30 * 24 * time.Hour
)

// WatchAuthorities returns the certificates in a file, as [WatchFiles] does.
func WatchAuthorities(log *zerolog.Logger, name string) (*Watched[*x509.CertPool], error) {
	return WatchFiles(log, maxAuthorities, func(contents [][]byte) (*x509.CertPool, error) {
		return parseAuthorities(name, contents[0])
	}, name)
}

// parseAuthorities reads a bundle of certificates. x509.CertPool itself skips certificates that it
// cannot read.
func parseAuthorities(name string, content []byte) (*x509.CertPool, error) {
	pool, found := x509.NewCertPool(), false
	for {
		var block *pem.Block
		if block, content = pem.Decode(content); block == nil {
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

// A KeyPair is a client certificate with its key, from two files.
type KeyPair struct {
	pair *Watched[*tls.Certificate]
	name string
	log  *zerolog.Logger

	mu   sync.Mutex
	next time.Time // when the end of the certificate is logged again
}

// WatchKeyPair returns the certificate and the key in two files, as [WatchFiles] does.
func WatchKeyPair(log *zerolog.Logger, certName, keyName string) (*KeyPair, error) {
	pair, err := WatchFiles(log, MaxSecret, func(contents [][]byte) (*tls.Certificate, error) {
		pair, err := tls.X509KeyPair(contents[0], contents[1])
		if err != nil {
			return nil, fmt.Errorf("%s and %s are no certificate and key that belong together, in PEM format and unencrypted: %s",
				certName, keyName, strings.TrimPrefix(err.Error(), "tls: "))
		}
		return &pair, nil
	}, certName, keyName)
	return &KeyPair{pair: pair, name: certName, log: log, next: time.Now().Add(24 * time.Hour)}, err
}

// Get returns the certificate that the files hold now. Once a day it logs that the certificate ends
// soon.
func (k *KeyPair) Get() *tls.Certificate {
	certificate := k.pair.Get()
	if notice := k.Notice(); notice != "" {
		k.mu.Lock()
		defer k.mu.Unlock()
		if now := time.Now(); now.After(k.next) {
			k.next = now.Add(24 * time.Hour)
			k.log.Warn().Msg("tls.cert_file: " + notice)
		}
	}
	return certificate
}

// Notice says that the certificate ends within 30 days; empty: it does not.
func (k *KeyPair) Notice() string {
	end := k.pair.Get().Leaf.NotAfter
	if time.Until(end) >= expiryNotice {
		return ""
	}
	return fmt.Sprintf("the certificate in %s ends at %s; replace it before, which needs no restart", k.name, end.UTC().Format("2006-01-02 15:04 UTC"))
}
