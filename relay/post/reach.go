package post

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/url"
)

// Reach connects to the destination, with the TLS handshake where its URL asks for one, and sends nothing. Through a proxy it connects to
// the proxy alone.
func (c overHTTP) Reach(ctx context.Context) error {
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
