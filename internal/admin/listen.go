package admin

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"
)

// Limits of every server. A client that sends slowly, or nothing, holds a connection no longer.
const (
	headerTimeout  = 5 * time.Second
	readTimeout    = 15 * time.Second
	idleTimeout    = 90 * time.Second // longer than most scrape intervals, so that a scraper keeps its connection
	maxHeaderBytes = 16 << 10
	// maxConnections bounds what strangers who only connect can take of the memory and the files of
	// the relay.
	maxConnections = 256
	newFor         = time.Second
	// stopGrace is how long requests may take to end once the server stops.
	stopGrace = 3 * time.Second
)

// A Listener is the configuration of one server.
type Listener struct {
	// Setting that Address comes from, such as "metrics.listen". Messages name it.
	Setting string
	// Address is host and port. Empty: the server is off.
	Address string
	// Configured reports whether a person chose Address. A default address that another process has
	// is a warning, because two relays on one host are normal. A chosen one is an error.
	Configured bool
	// TLS makes the server speak HTTPS alone. Nil: HTTP.
	TLS *tls.Config
	// WriteTimeout bounds one answer. 0: no bound, for streams.
	WriteTimeout time.Duration
	// Log for what is no error.
	Log zerolog.Logger
}

// A Server is a listener that is open. A nil Server is one that is off: its methods do nothing.
type Server struct {
	cfg      Listener
	listener *boundedListener
}

// Listen opens the address, so that a mistake is found before the relay starts. It returns a nil
// Server when the address is empty, or when the default address cannot be opened, which it logs.
func Listen(ctx context.Context, cfg Listener) (*Server, error) {
	if cfg.Address == "" {
		return nil, nil
	}
	var open net.ListenConfig
	listener, err := open.Listen(ctx, "tcp", cfg.Address)
	switch {
	case err == nil:
		return &Server{cfg: cfg, listener: &boundedListener{Listener: listener, open: map[*boundedConn]struct{}{}}}, nil
	case cfg.Configured:
		return nil, fmt.Errorf("%s: cannot listen on %s: %w; set it to a free address, or to none", cfg.Setting, cfg.Address, reason(err))
	}
	variable := "OUTBOX_" + strings.ToUpper(strings.ReplaceAll(cfg.Setting, ".", "_"))
	cfg.Log.Warn().Str("setting", cfg.Setting).Str("variable", variable).Str("address", cfg.Address).AnErr("error", reason(err)).
		Msg("the default address cannot be opened, so the relay runs without it; on a host with two relays set the setting or its variable to another address, or to none")
	return nil, nil
}

// reason returns the cause of an error of package net without the address, which the message has
// already.
func reason(err error) error {
	if op := new(net.OpError); errors.As(err, &op) {
		return op.Err
	}
	return err
}

// Address returns where the server listens, with the port that the system chose for port 0; empty
// when it is off.
func (s *Server) Address() string {
	if s == nil {
		return ""
	}
	return s.listener.Addr().String()
}

// Close gives up a Server that is not run.
func (s *Server) Close() {
	if s != nil {
		_ = s.listener.Close()
	}
}

// Run serves handler until ctx is done, then ends the requests in flight and returns. The context
// of a request is done with ctx too, so that streams end.
func (s *Server) Run(ctx context.Context, handler http.Handler) {
	if s == nil {
		return
	}
	server := &http.Server{
		Handler: handler, TLSConfig: s.cfg.TLS,
		ReadHeaderTimeout: headerTimeout, ReadTimeout: readTimeout, WriteTimeout: s.cfg.WriteTimeout,
		IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
		BaseContext: func(net.Listener) context.Context { return ctx },
		ConnState:   s.listener.changed,
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		serve := func() error { return server.Serve(s.listener) }
		if s.cfg.TLS != nil {
			serve = func() error { return server.ServeTLS(s.listener, "", "") }
		}
		if err := serve(); err != nil && !errors.Is(err, http.ErrServerClosed) {
			s.cfg.Log.Error().Err(err).Str("setting", s.cfg.Setting).Msg("the local server has ended; restart the relay to have it again")
		}
	})
	<-ctx.Done()
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopGrace)
	defer cancel()
	if server.Shutdown(grace) != nil {
		_ = server.Close()
	}
	serving.Wait()
}

// A boundedListener has at most maxConnections open. Beyond them it closes one that no request
// comes on, or else the one whose request has taken longest, so that whoever holds connections
// keeps neither a probe nor a scraper from being served.
type boundedListener struct {
	net.Listener

	mu   sync.Mutex
	open map[*boundedConn]struct{}
}

// Accept returns the next connection.
func (l *boundedListener) Accept() (net.Conn, error) {
	accepted, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.open) >= maxConnections {
		last := l.leastMissed(time.Now())
		delete(l.open, last)
		_ = last.Conn.Close()
	}
	conn := &boundedConn{Conn: accepted, of: l, since: time.Now()}
	l.open[conn] = struct{}{}
	return conn, nil
}

// leastMissed returns the connection that has been longest without a request, or else longest with
// its present one. l.mu is held.
func (l *boundedListener) leastMissed(now time.Time) (least *boundedConn) {
	for conn := range l.open {
		if least == nil || conn.rests(now) && !least.rests(now) || conn.rests(now) == least.rests(now) && conn.since.Before(least.since) {
			least = conn
		}
	}
	return least
}

// changed is called by the server when the state of a connection changes.
func (l *boundedListener) changed(conn net.Conn, state http.ConnState) {
	if wrapped, is := conn.(*tls.Conn); is {
		conn = wrapped.NetConn()
	}
	if bounded, is := conn.(*boundedConn); is {
		l.mu.Lock()
		defer l.mu.Unlock()
		bounded.state, bounded.since = state, time.Now()
	}
}

// A boundedConn gives its place back when it is closed, however often that is.
type boundedConn struct {
	net.Conn
	of *boundedListener

	// of.mu guards the fields below.
	state http.ConnState
	since time.Time
}

// rests reports whether no request comes. A new connection has a moment to begin one.
func (c *boundedConn) rests(now time.Time) bool {
	return c.state == http.StateIdle || c.state == http.StateNew && now.Sub(c.since) > newFor
}

// Close closes the connection.
func (c *boundedConn) Close() error {
	c.of.mu.Lock()
	delete(c.of.open, c)
	c.of.mu.Unlock()
	return c.Conn.Close()
}

// IsLoopback reports whether only processes of the same host reach an address: its host is
// localhost or a loopback IP. A name that must be looked up is none.
func IsLoopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}
