package natspost

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"
	"github.com/rs/zerolog"
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
	// Authorization returns a user and password, or a token, as the header of that name has them. nil: neither.
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

// A Client publishes to one destination over one connection, which the first attempt makes. It is safe for concurrent use.
type Client struct {
	cfg        Config
	aroundType []string // what of the subject stands around the event's type, if there are no partitions
	usualAck   []byte   // how an acknowledgement of the stream begins, up to its number

	publications sync.Pool // of *publication

	mu         sync.Mutex
	current    *conn
	connecting *connecting
	discovered []string // servers that the cluster named, as host:port

	diagnosis diagnosis
}

// A connecting is a connection that one attempt makes and others wait for.
type connecting struct {
	done chan struct{}
	err  error
}

const (
	maxDiscovered = 32
	// A connection on which nothing arrives any more is closed after two pings without an answer.
	pingEvery = 20 * time.Second
	maxPings  = 2
)

// New returns a client that has connected to nothing.
func New(cfg Config) *Client {
	return &Client{
		cfg: cfg, aroundType: strings.Split(strings.ReplaceAll(cfg.Settings.Subject, destinationPlace, cfg.Destination), typePlace),
		usualAck: fmt.Appendf(nil, `{"stream":%q,"seq":`, cfg.Stream), publications: sync.Pool{New: newPublication},
	}
}

// CloseIdleConnections closes the connection, now or after the attempts that use it. A later attempt makes another one.
func (c *Client) CloseIdleConnections() {
	c.mu.Lock()
	old := c.current
	c.current = nil
	c.mu.Unlock()
	if old != nil {
		old.leave()
	}
}

// drop makes later attempts use another connection than this one.
func (c *Client) drop(old *conn) {
	c.mu.Lock()
	if c.current == old {
		c.current = nil
	}
	c.mu.Unlock()
	old.leave()
}

// maxTries is how many connections in a row an attempt may find ended.
const maxTries = 3

// counted returns the connection, on which the attempt is counted then; nil: there is none.
func (c *Client) counted(w *waiter) *conn {
	c.mu.Lock()
	to := c.current
	c.mu.Unlock()
	if to == nil || !to.begin(w) {
		return nil
	}
	return to
}

// connected returns a connection on which the attempt is counted, or why there is none. Attempts that find none wait for one of them to
// make it, and share its error.
func (c *Client) connected(ctx context.Context, w *waiter) (*conn, error) {
	for range maxTries {
		c.mu.Lock()
		to, other := c.current, c.connecting
		if to != nil && to.begin(w) {
			c.mu.Unlock()
			return to, nil
		}
		if other == nil {
			c.connecting = &connecting{done: make(chan struct{})}
		}
		c.mu.Unlock()
		if other == nil {
			if err := c.connect(ctx); err != nil {
				return nil, err
			}
			continue
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-other.done:
		}
		switch ended := errors.Is(other.err, context.Canceled) || errors.Is(other.err, context.DeadlineExceeded); {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case other.err != nil && !ended: // of the attempt that connected; this one has its own time
			return nil, other.err
		}
	}
	return nil, errors.New("the server closes each connection at once")
}

// connect makes a connection the current one, and ends the wait of those that wait for it.
func (c *Client) connect(ctx context.Context) error {
	var made *conn
	err := errors.New("the client library failed") // if it panics, those that wait must not wait for ever
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		this := c.connecting
		this.err, c.current, c.connecting = err, made, nil
		close(this.done)
	}()
	made, err = c.open(ctx)
	return err
}

// open connects to one of the servers: first those of the configuration, then those that the cluster named.
func (c *Client) open(ctx context.Context) (*conn, error) {
	c.mu.Lock()
	discovered := slices.Clone(c.discovered)
	c.mu.Unlock()
	to, err := c.openAny(ctx, c.cfg.Servers, "")
	if err != nil && ctx.Err() == nil && len(discovered) > 0 {
		if other, otherErr := c.openAny(ctx, discovered, c.nameOf(discovered)); otherErr == nil {
			to, err = other, nil
		}
	}
	if ctx.Err() != nil && err != nil {
		return nil, ctx.Err()
	}
	return to, err
}

// nameOf returns the name that the certificates of discovered servers are checked for; empty: that of each. A cluster may name its
// servers by address, and certificates are made for names.
func (c *Client) nameOf(discovered []string) string {
	for _, server := range discovered {
		host, _, err := net.SplitHostPort(server)
		if err != nil || net.ParseIP(host) == nil {
			return ""
		}
	}
	host, _, err := net.SplitHostPort(c.cfg.Servers[0])
	if err != nil {
		return ""
	}
	return host
}

// openAny connects to one of the given servers. name is that of their certificates; empty: that of each.
func (c *Client) openAny(ctx context.Context, servers []string, name string) (*conn, error) {
	options, err := c.options()
	if err != nil {
		return nil, err
	}
	options.TLSConfig.ServerName = cmp.Or(options.TLSConfig.ServerName, name)
	for _, server := range servers {
		options.Servers = append(options.Servers, c.scheme()+server)
	}
	d := &dialer{ctx: ctx, dial: c.cfg.Dial, timeout: c.cfg.Timeout}
	options.CustomDialer = d
	if deadline, ok := ctx.Deadline(); ok {
		// Below the attempt's own time, so that the result can say what the server has not done.
		options.Timeout = max(time.Until(deadline)*9/10/time.Duration(len(servers)), time.Millisecond)
	}
	to := &conn{waiting: map[uint64]*waiter{}, ended: make(chan struct{})}
	ready := c.observe(&options, to)
	defer ready()
	nc, err := options.Connect()
	if alive := d.release(); err == nil && !alive {
		nc.Close()
		err = context.Cause(ctx)
	}
	if err != nil {
		if errors.Is(err, nats.ErrNoServers) && d.failed != nil { // how the library puts a refused connection
			err = d.failed
		}
		return nil, err
	}
	to.nats, to.wire = nc, d.last
	if to.js, err = jetstream.New(nc); err != nil {
		nc.Close()
		return nil, err
	}
	c.remember(nc)
	c.log(zerolog.DebugLevel, nil, "nats: connected to "+nc.ConnectedServerName()+" at "+nc.ConnectedAddr())
	return to, nil
}

// observe sets what the library calls when something happens to a connection. Until ready is called, those calls wait: the connection
// is not there yet.
func (c *Client) observe(options *nats.Options, to *conn) (ready func()) {
	there := make(chan struct{})
	options.AsyncErrorCB = func(_ *nats.Conn, _ *nats.Subscription, err error) {
		c.log(zerolog.WarnLevel, err, "nats: the server refuses something")
		if <-there; to.nats != nil {
			to.refuse(err)
		}
	}
	options.LameDuckModeHandler = func(*nats.Conn) {
		c.log(zerolog.InfoLevel, nil, "nats: the server is about to stop; the next messages go over another connection")
		if <-there; to.nats != nil {
			c.drop(to)
		}
	}
	options.DiscoveredServersCB = c.remember
	options.ClosedCB = func(nc *nats.Conn) {
		if err := nc.LastError(); err != nil {
			c.log(zerolog.WarnLevel, err, "nats: the connection has ended")
		}
		to.close()
	}
	return sync.OnceFunc(func() { close(there) })
}

// log writes a line about the destination.
func (c *Client) log(level zerolog.Level, err error, text string) {
	c.cfg.Log.WithLevel(level).Str("destination", c.cfg.Destination).Err(err).Msg(text)
}

func (c *Client) scheme() string {
	if c.cfg.Secure {
		return "tls://"
	}
	return "nats://"
}

// remember keeps the servers that the cluster names: those of the configuration may be the ones that are down.
func (c *Client) remember(nc *nats.Conn) {
	var found []string
	for _, server := range nc.DiscoveredServers() {
		_, address, isURL := strings.Cut(server, "://")
		if !isURL {
			address = server
		}
		if len(found) < maxDiscovered && !slices.Contains(c.cfg.Servers, address) {
			found = append(found, address)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(found) > 0 {
		c.discovered = found
	}
}

// options returns the settings of the next connection, with the certificates and credentials of this moment.
func (c *Client) options() (nats.Options, error) {
	options := nats.GetDefaultOptions()
	options.Name = c.cfg.Agent + " " + c.cfg.Destination
	options.AllowReconnect = false // see doc.go
	options.ReconnectBufSize = -1
	options.FlusherTimeout = -1          // see wire
	options.SkipSubjectValidation = true // see Subject
	options.SkipHostLookup = true        // the dialer resolves names, within the attempt's time
	options.PingInterval, options.MaxPingsOut = pingEvery, maxPings
	options.InboxPrefix = c.cfg.InboxPrefix
	options.Secure = c.cfg.Secure
	options.TLSConfig = c.cfg.TLS()
	switch {
	case c.cfg.Credentials != nil:
		content := []byte(c.cfg.Credentials())
		token, err := nkeys.ParseDecoratedJWT(content)
		if err != nil {
			return options, errors.New("the file of credentials_file holds no user's JWT")
		}
		if err := expiredCredentials(token, time.Now()); err != nil {
			return options, err
		}
		options.UserJWT = func() (string, error) { return token, nil }
		options.SignatureCB = func(nonce []byte) ([]byte, error) { return sign(content, nonce) }
	case c.cfg.Seed != nil:
		seed := []byte(c.cfg.Seed())
		pair, err := nkeys.ParseDecoratedUserNKey(seed)
		if err != nil {
			return options, errors.New("the file of nkey_file holds no seed of a user's NKey")
		}
		defer pair.Wipe()
		if options.Nkey, err = pair.PublicKey(); err != nil {
			return options, fmt.Errorf("read nkey_file: %w", err)
		}
		options.SignatureCB = func(nonce []byte) ([]byte, error) { return sign(seed, nonce) }
	case c.cfg.Authorization != nil:
		kind, value, _ := strings.Cut(c.cfg.Authorization(), " ")
		if kind == "Basic" {
			pair, _ := base64.StdEncoding.DecodeString(value)
			options.User, options.Password, _ = strings.Cut(string(pair), ":")
		} else {
			options.Token = value
		}
	}
	return options, nil
}

// sign proves to a server that the relay has the seed of an NKey.
func sign(seed, nonce []byte) ([]byte, error) {
	pair, err := nkeys.ParseDecoratedUserNKey(seed)
	if err != nil {
		return nil, errors.New("the seed of the user's NKey cannot be read")
	}
	defer pair.Wipe()
	return pair.Sign(nonce)
}
