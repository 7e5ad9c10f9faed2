package natspost

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"
	"golang.org/x/sync/singleflight"
)

// Config is what New needs.
type Config struct {
	Settings
	// Destination is the name of the destination.
	Destination string
	// Servers of one cluster, as host:port. One that answers is enough: it names the others.
	Servers []string
	// Secure asks for TLS. Without it TLS is used if the server asks for it.
	Secure bool
	// TLS returns the settings of the next connection.
	TLS func() *tls.Config
	// Authorization returns a user and password, or a token, as the header of that name has them.
	// nil: neither.
	Authorization func() string
	// Dial opens every connection.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Timeout of one attempt.
	Timeout time.Duration
	// Again is the earliest time from the begin of an attempt to that of the next one.
	Again time.Duration
	// Largest is the size of the largest payload, in bytes.
	Largest int64
	// Agent says who connects: the program and its version.
	Agent string
	// Log receives what happens to connections.
	Log *zerolog.Logger
}

// A Client publishes to one destination over one connection, which the first attempt makes. It is
// safe for concurrent use.
type Client struct {
	cfg        Config
	last       atomic.Pointer[conn] // the connection that was made last, usable or not
	connecting singleflight.Group
	diagnosing singleflight.Group
	messages   sync.Pool // of *nats.Msg: to make one costs as much as to send it, after which the library does not read it

	mu         sync.Mutex
	connectCtx context.Context // of the connection that is being made: no attempt's own, since others wait for it, too
	giveUp     context.CancelFunc
}

// New returns a client that has connected to nothing.
func New(cfg Config) *Client {
	c := &Client{cfg: cfg, messages: sync.Pool{New: func() any { return &nats.Msg{Header: nats.Header{}} }}}
	c.connectCtx, c.giveUp = context.WithCancel(context.Background())
	return c
}

// CloseIdleConnections closes the connection, now or after the attempts that use it, and gives up
// the one that is being made. A later attempt makes another one.
func (c *Client) CloseIdleConnections() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.giveUp()
	c.connectCtx, c.giveUp = context.WithCancel(context.Background())
	if to := c.last.Load(); to != nil {
		to.leave()
	}
}

// connected returns a connection that counts the attempt, or why there is none. Attempts that find
// no connection wait until one is made, each for its own time, and share the error. A connection
// may end before it is used.
func (c *Client) connected(ctx context.Context, a *attempt) (*conn, error) {
	c.mu.Lock()
	connectCtx := c.connectCtx
	c.mu.Unlock()
	for range 3 {
		if to := c.last.Load(); to != nil && to.begin(a) {
			return to, nil
		}
		var err error
		select {
		case made := <-c.connecting.DoChan("", func() (any, error) { return nil, c.connect(connectCtx, a) }):
			err = made.Err
		case <-ctx.Done():
		}
		if err := cmp.Or(context.Cause(ctx), err); err != nil {
			return nil, err
		}
	}
	return nil, errors.New("the server closes each connection at once")
}

// connect makes a connection to a server of the configuration, or else to one that the cluster
// named, within the timeout of an attempt. The error is that of the configuration's servers.
func (c *Client) connect(connectCtx context.Context, a *attempt) (err error) {
	ctx, cancel := context.WithTimeout(connectCtx, c.cfg.Timeout)
	defer cancel()
	servers := slices.Clone(c.cfg.Servers)
	rand.Shuffle(len(servers), func(i, j int) { servers[i], servers[j] = servers[j], servers[i] })
	if last := c.last.Load(); last != nil {
		if last.begin(a) { // another attempt has made it meanwhile
			last.end(a)
			return nil
		}
		for _, server := range last.nats.DiscoveredServers() {
			if _, address, _ := strings.Cut(server, "://"); !slices.Contains(servers, address) {
				servers = append(servers, address)
			}
		}
	}
	share := c.cfg.Timeout / time.Duration(min(len(servers), 3)) // a silent server leaves time for others
	for i, server := range servers {
		made, refusal := c.connectTo(ctx, server, share)
		switch {
		case refusal == nil:
			c.last.Store(made)
			if connectCtx.Err() != nil { // CloseIdleConnections may have missed it
				made.leave()
			}
			return nil
		case i < len(c.cfg.Servers):
			err = refusal
		}
	}
	return err
}

// connectTo connects to one server within the given time.
func (c *Client) connectTo(ctx context.Context, server string, within time.Duration) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	to := &conn{attempts: map[*attempt]struct{}{}}
	options, err := c.options(to)
	if err != nil {
		return nil, err
	}
	options.Servers = []string{"nats://" + server}
	if host, _, _ := net.SplitHostPort(server); net.ParseIP(host) != nil && !slices.Contains(c.cfg.Servers, server) {
		// A cluster may name its servers by address, and certificates are made for names.
		host, _, _ = net.SplitHostPort(c.cfg.Servers[0])
		options.TLSConfig.ServerName = cmp.Or(options.TLSConfig.ServerName, host)
	}
	var refusal error
	inTime := func() bool { return true }
	options.CustomDialer = dialer(func(network, address string) (net.Conn, error) {
		inTime()
		socket, err := c.cfg.Dial(ctx, network, address)
		if err != nil {
			refusal = err
			return nil, err
		}
		inTime = context.AfterFunc(ctx, func() { _ = socket.Close() })
		return &batchConn{Conn: socket, timeout: c.cfg.Timeout, out: bufio.NewWriterSize(socket, 64<<10)}, nil
	})
	to.mu.Lock() // what the library reports of the connection waits until it is there
	defer to.mu.Unlock()
	to.nats, err = options.Connect()
	switch {
	case !inTime(), ctx.Err() != nil:
		to.nats.Close()
		return nil, nats.ErrTimeout
	case errors.Is(err, nats.ErrNoServers) && refusal != nil: // how the library puts a refused connection
		return nil, refusal
	case err != nil:
		return nil, err
	}
	// An attempt ends sooner, by its own time. After this one the library forgets the message.
	to.js, err = jetstream.New(to.nats, jetstream.WithPublishAsyncTimeout(2*c.cfg.Timeout))
	c.log(zerolog.DebugLevel, nil, "nats: connected to "+to.nats.ConnectedServerName()+" at "+to.nats.ConnectedAddr())
	return to, err
}

// A dialer opens the library's connections as the destination's egress allows.
type dialer func(network, address string) (net.Conn, error)

// Dial implements [nats.CustomDialer].
func (d dialer) Dial(network, address string) (net.Conn, error) { return d(network, address) }

// options returns the settings of the next connection, with the certificates and credentials of
// this moment.
func (c *Client) options(to *conn) (nats.Options, error) {
	options := nats.GetDefaultOptions()
	options.Name = c.cfg.Agent + " " + c.cfg.Destination
	options.Secure = c.cfg.Secure
	options.TLSConfig = c.cfg.TLS()
	options.InboxPrefix = c.cfg.InboxPrefix
	options.AllowReconnect = false // see doc.go
	options.Timeout = c.cfg.Timeout
	options.FlusherTimeout = -1             // see batchConn
	options.SkipHostLookup = true           // Dial resolves names, within the attempt's time
	options.PingInterval = 20 * time.Second // where nothing arrives, the connection ends after three of these
	options.AsyncErrorCB = func(_ *nats.Conn, _ *nats.Subscription, err error) {
		c.log(zerolog.WarnLevel, err, "nats: the server refuses something")
		to.refuse(err)
	}
	options.LameDuckModeHandler = func(*nats.Conn) {
		c.log(zerolog.InfoLevel, nil, "nats: the server is about to stop; the next messages go over another connection")
		to.leave()
	}
	options.ClosedCB = func(nc *nats.Conn) {
		if err := nc.LastError(); err != nil {
			c.log(zerolog.WarnLevel, err, "nats: the connection has ended")
		}
		to.close(nc.LastError())
	}
	return options, c.identify(&options)
}

// log writes a line about the destination.
func (c *Client) log(level zerolog.Level, err error, text string) {
	c.cfg.Log.WithLevel(level).Str("destination", c.cfg.Destination).Err(err).Msg(text)
}
