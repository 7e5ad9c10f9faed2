package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"time"
)

// secureServers are the receiver behind TLS, in HTTP/1.1 and in HTTP/2. They are those of net/http.
type secureServers struct {
	addresses
	servers []*http.Server
}

func startSecure(r *receiver) (*secureServers, error) {
	certificate, authority, err := selfSigned()
	if err != nil {
		return nil, fmt.Errorf("make a certificate: %w", err)
	}
	s := &secureServers{}
	s.Authority = authority
	for protocol, addr := range map[string]*string{"http/1.1": &s.TLS, "h2": &s.HTTP2} {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			s.close()
			return nil, fmt.Errorf("start receiver: %w", err)
		}
		server := &http.Server{
			Handler: r, ReadHeaderTimeout: time.Minute, ErrorLog: log.New(io.Discard, "", 0),
			TLSConfig: &tls.Config{Certificates: []tls.Certificate{certificate}, NextProtos: []string{protocol}, MinVersion: tls.VersionTLS12},
		}
		if protocol == "http/1.1" {
			server.Protocols = new(http.Protocols)
			server.Protocols.SetHTTP1(true)
		}
		*addr = listener.Addr().String()
		s.servers = append(s.servers, server)
		go func() { _ = server.ServeTLS(listener, "", "") }() // until close
	}
	return s, nil
}

func (s *secureServers) close() {
	for _, server := range s.servers {
		server.Close()
	}
}

// ServeHTTP does for net/http what [receiver.serve] does by hand.
func (r *receiver) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	body, err := io.ReadAll(request.Body)
	if err != nil {
		return
	}
	r.tally.Load().add(eventNumber(body), time.Now())
	r.pause(pathDelay([]byte(request.URL.Path)))
	w.WriteHeader(http.StatusOK)
}

func selfSigned() (certificate tls.Certificate, authority string, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return certificate, "", err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "bench"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(240 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true, IsCA: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return certificate, "", err
	}
	authority = string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, authority, nil
}
