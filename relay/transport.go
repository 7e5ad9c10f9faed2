package relay

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// An endpoint is where and how a lane's requests go: what all requests to a destination share. It is immutable once
// made, so that senders use it without a lock while another one takes its place; a certificate or credential that
// changes does so behind it.
type endpoint struct {
	destination Destination
	url         *url.URL
	transport   *http.Transport
	header      http.Header // the part of every request's header that never changes
}

// newEndpoint prepares the requests to a destination.
func newEndpoint(d Destination, version string) (*endpoint, error) {
	u, err := url.Parse(d.URL)
	if err != nil {
		return nil, fmt.Errorf("parse url of %s: %w", d.Name, err)
	}
	proxy, err := d.Wire.proxy()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.Name, err)
	}
	header := http.Header{
		"Content-Type": {"application/json"},
		"User-Agent":   {strings.TrimSuffix("outbox-relay/"+version, "/")},
	}
	for name, value := range d.Headers {
		header.Set(name, value)
	}
	return &endpoint{
		destination: d,
		url:         u,
		header:      header,
		transport: &http.Transport{
			DialContext:            countWrites(d.Wire.egress.dialer(d.Timeout).DialContext),
			Proxy:                  proxy,
			OnProxyConnectResponse: judgeProxy,
			ForceAttemptHTTP2:      true,
			TLSClientConfig:        d.Wire.TLS.config(u.Hostname()),
			TLSHandshakeTimeout:    d.Timeout,
			// One connection per POST in flight, all kept: the default of two would dial for nearly every POST.
			MaxIdleConns:           d.MaxInFlight,
			MaxIdleConnsPerHost:    d.MaxInFlight,
			IdleConnTimeout:        90 * time.Second,
			MaxResponseHeaderBytes: maxResponseHeader,
			// A few kilobytes of gzip can hold gigabytes.
			DisableCompression: true,
		},
	}, nil
}

// judgeProxy makes a proxy's refusal an error that says whose it is, and that no connection came about.
func judgeProxy(_ context.Context, _ *url.URL, _ *http.Request, answer *http.Response) error {
	if answer.StatusCode == http.StatusOK {
		return nil
	}
	return &net.OpError{Op: "dial", Net: "tcp", Err: fmt.Errorf("the proxy answered %s", answer.Status)}
}

// A sending watches one request on its way, to tell whether any of it can have left this host.
type sending struct {
	mu     sync.Mutex
	conn   *countedConn // of HTTP/1.1, where one request has a connection for itself; nil: another, or none
	before int64        // bytes written to it by others
	reused bool
}

// watch returns a request that is watched.
func watch(req *http.Request) (*http.Request, *sending) {
	s := &sending{}
	trace := &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) {
		conn := info.Conn
		multiplexed := false
		if secure, ok := conn.(*tls.Conn); ok {
			multiplexed = secure.ConnectionState().NegotiatedProtocol == "h2"
			conn = secure.NetConn()
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.conn, s.reused = nil, info.Reused
		if counted, ok := conn.(*countedConn); ok && !multiplexed {
			s.conn, s.before = counted, counted.written.Load()
		}
	}}
	return req.WithContext(httptrace.WithClientTrace(req.Context(), trace)), s
}

// nothingSent reports whether a request that has failed met a kept connection that was closed before a single byte of
// it could be written. Receivers close idle connections at any time; only then is it certain that they did not see the
// request. It may be asked once RoundTrip has returned, which over HTTP/1.1 happens after the last write.
func (s *sending) nothingSent() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reused && s.conn != nil && s.conn.written.Load() == s.before
}

// A countedConn knows how many bytes it has been given to send, whether or not they arrived.
type countedConn struct {
	net.Conn
	written atomic.Int64
}

func (c *countedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.written.Add(int64(n))
	return n, err
}

// countWrites wraps what a dialer returns.
func countWrites(dial func(context.Context, string, string) (net.Conn, error)) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &countedConn{Conn: conn}, nil
	}
}
