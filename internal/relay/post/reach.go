package post

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/url"
	"sync"
)

// A Reached is what came of reaching a destination.
type Reached struct {
	Destination string
	Warnings    []string
	Err         error
}

// ReachAll connects to destinations, all at once and until ctx is done, as [carrier] says. It needs
// no database.
func ReachAll(ctx context.Context, destinations []Destination, egress Egress) []Reached {
	all := make([]Reached, len(destinations))
	var reaching sync.WaitGroup
	for i, d := range destinations {
		all[i].Destination = d.Name
		reaching.Go(func() {
			endpoint, err := NewEndpoint(d.WithDefaults(egress), "")
			if err == nil {
				defer endpoint.Retire()
				all[i].Warnings, err = endpoint.Reach(ctx)
			}
			all[i].Err = err
		})
	}
	reaching.Wait()
	return all
}

// IsLog reports whether the destination is a distributed log, which stores events for others to
// read.
func (d Destination) IsLog() bool { return isLog(schemeOf(d.URL)) }

// Reach reaches the destination, as [carrier] says.
func (e *Endpoint) Reach(ctx context.Context) (warnings []string, err error) {
	e.begin()
	defer e.end()
	return e.carrier.Reach(ctx)
}

// Reach connects to the destination, with the TLS handshake where its URL asks for one, and sends
// nothing. Through a proxy it connects to the proxy alone.
func (c overHTTP) Reach(ctx context.Context) (warnings []string, err error) { return nil, c.reach(ctx) }

func (c overHTTP) reach(ctx context.Context) error {
	e := c.to
	target := e.URL
	if e.Transport.Proxy != nil {
		proxy, err := e.Transport.Proxy((&http.Request{URL: e.URL}).WithContext(ctx))
		if err != nil {
			return err
		}
		if proxy != nil {
			target = proxy
		}
	}
	conn, err := e.Transport.DialContext(ctx, "tcp", addressOf(target))
	if err != nil {
		return explain(err)
	}
	defer func() { _ = conn.Close() }()
	if target != e.URL || target.Scheme != "https" {
		return nil
	}
	config := e.Transport.TLSClientConfig.Clone()
	if config.ServerName == "" {
		config.ServerName = target.Hostname()
	}
	if err := tls.Client(conn, config).HandshakeContext(ctx); err != nil {
		return explain(err)
	}
	return nil
}

func addressOf(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = map[string]string{"https": "443"}[u.Scheme]
	}
	if port == "" {
		port = "80"
	}
	return net.JoinHostPort(u.Hostname(), port)
}
