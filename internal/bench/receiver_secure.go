package main

import (
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localcert"
)

// secureServers are the receiver behind TLS, in HTTP/1.1 and in HTTP/2. They are those of net/http.
type secureServers struct {
	addresses
	servers []*http.Server
}

func startSecure(r *receiver) (*secureServers, error) {
	own := localcert.NewAuthority(nil)
	authority, _ := localcert.PEM(own.Certificate)
	s := &secureServers{}
	s.Authority = string(authority)
	for protocol, addr := range map[string]*string{"http/1.1": &s.TLS, "h2": &s.HTTP2} {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			s.close()
			return nil, fmt.Errorf("start receiver: %w", err)
		}
		server := &http.Server{
			Handler: r, ReadHeaderTimeout: time.Minute, ErrorLog: log.New(io.Discard, "", 0),
			TLSConfig: &tls.Config{Certificates: []tls.Certificate{own.Certificate}, NextProtos: []string{protocol}, MinVersion: tls.VersionTLS12},
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
