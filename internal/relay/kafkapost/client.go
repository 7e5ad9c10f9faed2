package kafkapost

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

// Config is what New needs.
type Config struct {
	Settings
	// Destination is the name of the destination.
	Destination string
	// Brokers to ask first, as host:port. One that answers is enough: it names the others.
	Brokers []string
	// TLS returns the settings of the next connection. nil: without TLS.
	TLS func() *tls.Config
	// Authorization returns user and password, or a token, as the header of that name has them.
	// nil: neither.
	Authorization func() string
	// Dial opens every connection, also to the brokers that a cluster names.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Timeout of one attempt.
	Timeout time.Duration
	// Largest is the size of the largest payload, in bytes.
	Largest int64
	// Agent says who connects: the program and its version, in letters, digits, '.', '_' and '-'.
	Agent string
}

// A Client writes the records of one destination. The first attempt connects. It is safe for
// concurrent use.
type Client struct {
	cfg Config

	mu      sync.Mutex
	current [2]*producer // by whether records are alone in their batch
	links   links

	alone chan struct{} // holds something while a record is written alone
}

// A producer is a client of the library, and how many calls use it. The mutex of its [Client]
// guards it.
type producer struct {
	*kgo.Client
	users   int
	dropped bool // closed when none uses it
}

// New returns a client that has connected to nothing.
func New(cfg Config) *Client { return &Client{cfg: cfg, alone: make(chan struct{}, 1)} }

const (
	// maxBatch bounds records that are written together, in bytes: brokers take 1,048,588 unless
	// configured, and refuse all or none of them.
	maxBatch = 1_000_000
	// maxRecord bounds a record that is written alone: the largest payload and its headers. Brokers
	// and topics have their own limit, which answers.
	maxRecord = 4 << 20
)

// brokerRetries is how often the library sends a record again that a broker refuses for now, such
// as while it elects a leader. After that the attempt ends with the broker's answer, which an
// operator understands; at the end of its time it would say only that time ran out.
const brokerRetries = 4

// use returns the producer, and makes it if there is none. That of records which are written alone
// has its own connection. The caller calls unuse after it.
func (c *Client) use(alone bool) (*producer, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	which, limit := 0, int32(maxBatch)
	if alone {
		which, limit = 1, maxRecord
	}
	if p := c.current[which]; p != nil {
		p.users++
		return p, nil
	}
	options := []kgo.Opt{
		kgo.SeedBrokers(c.cfg.Brokers...), kgo.ClientID(c.cfg.Agent),
		kgo.Dialer(c.dial), kgo.WithHooks(&c.links), kgo.MetadataMinAge(250 * time.Millisecond),
		kgo.RequiredAcks(kgo.AllISRAcks()), kgo.RecordPartitioner(kgo.StickyKeyPartitioner(nil)), kgo.ProducerLinger(0),
		kgo.ProducerBatchMaxBytes(limit), kgo.BrokerMaxWriteBytes(64 << 20),
		// Compressed batches would arrive at the brokers' limit later, and cost the sidecar time.
		kgo.ProducerBatchCompression(kgo.NoCompression()),
		// An attempt ends at its time, whatever the brokers do. What becomes of it then is not
		// known.
		kgo.AllowIdempotentProduceCancellation(), kgo.RecordDeliveryTimeout(c.cfg.Timeout), kgo.ProduceRequestTimeout(c.cfg.Timeout),
		kgo.RequestTimeoutOverhead(max(c.cfg.Timeout/2, time.Second)), kgo.RetryTimeout(c.cfg.Timeout), kgo.UnknownTopicRetries(1),
		kgo.RecordRetries(brokerRetries), kgo.WithLogger(&c.links),
	}
	if mechanism := c.mechanism(); mechanism != nil {
		options = append(options, kgo.SASL(mechanism))
	}
	client, err := kgo.NewClient(options...)
	if err != nil {
		return nil, fmt.Errorf("make a client: %w", err)
	}
	c.current[which] = &producer{Client: client, users: 1}
	return c.current[which], nil
}

func (c *Client) unuse(p *producer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p.users--
	if p.dropped && p.users == 0 {
		p.Close()
	}
}

// dropIfDead makes the next attempt use another producer if this one, whose attempt ended with err,
// refuses every record from now on. The library keeps each final answer to InitProducerID for ever,
// such as that to a user without the right to write, who may get it later.
func (c *Client) dropIfDead(ctx context.Context, p *producer, err error) {
	if !isFinal(err) {
		return
	}
	if _, _, kept := p.ProducerID(ctx); !isFinal(kept) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	p.dropped = true
	for i := range c.current {
		if c.current[i] == p {
			c.current[i] = nil
		}
	}
}

// dial opens a connection, with TLS where the destination asks for it.
func (c *Client) dial(ctx context.Context, network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout/2) // within the attempt, which otherwise ends without a reason
	defer cancel()
	conn, err := c.cfg.Dial(ctx, network, address)
	if err != nil || c.cfg.TLS == nil {
		return conn, err
	}
	settings := c.cfg.TLS()
	if settings.ServerName == "" {
		settings = settings.Clone()
		settings.ServerName, _, _ = net.SplitHostPort(address) // an address that was dialled has a port
	}
	secure := tls.Client(conn, settings)
	if err := secure.HandshakeContext(ctx); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return secure, nil
}

// mechanism returns how the relay proves who it is; nil: not at all. The secrets are read for every
// connection, so that they may change.
func (c *Client) mechanism() sasl.Mechanism {
	if c.cfg.Authorization == nil {
		return nil
	}
	if c.cfg.Mechanism == "" {
		return oauth.Oauth(func(context.Context) (oauth.Auth, error) {
			return oauth.Auth{Token: strings.TrimPrefix(c.cfg.Authorization(), "Bearer ")}, nil
		})
	}
	if c.cfg.Mechanism == Plain {
		return plain.Plain(func(context.Context) (plain.Auth, error) {
			user, pass := c.password()
			return plain.Auth{User: user, Pass: pass}, nil
		})
	}
	auth := func(context.Context) (scram.Auth, error) {
		user, pass := c.password()
		return scram.Auth{User: user, Pass: pass}, nil
	}
	if c.cfg.Mechanism == ScramSHA256 {
		return scram.Sha256(auth)
	}
	return scram.Sha512(auth)
}

func (c *Client) password() (user, pass string) {
	text, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(c.cfg.Authorization(), "Basic "))
	if err != nil {
		return "", ""
	}
	user, pass, _ = strings.Cut(string(text), ":")
	return user, pass
}

// CloseIdleConnections closes each producer that no call uses, with its connections. A later
// attempt makes another one.
//
// The library's own count of records is of no use here: it falls a moment after the attempt has its
// answer.
func (c *Client) CloseIdleConnections() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, p := range c.current {
		if p != nil && p.users == 0 {
			p.Close()
			c.current[i] = nil
		}
	}
}

// links notes what happens to connections: the client library tries again whatever happens, and
// reports in the end only that time has run out.
type links struct {
	produced atomic.Int64 // when records were last written to a connection, in Unix nanoseconds
	failed   atomic.Pointer[linkError]
}

// linkError is why there is no connection.
type linkError struct {
	at  time.Time
	err error
}

// OnBrokerConnect implements [kgo.HookBrokerConnect].
func (l *links) OnBrokerConnect(_ kgo.BrokerMetadata, _ time.Duration, _ net.Conn, err error) {
	if err != nil {
		l.failed.Store(&linkError{time.Now(), err})
	}
}

// OnBrokerWrite implements [kgo.HookBrokerWrite].
func (l *links) OnBrokerWrite(_ kgo.BrokerMetadata, key int16, written int, _, _ time.Duration, _ error) {
	if key == int16(kmsg.Produce) && written > 0 {
		l.produced.Store(time.Now().UnixNano())
	}
}

// Level implements [kgo.Logger].
func (l *links) Level() kgo.LogLevel { return kgo.LogLevelError }

// Log implements [kgo.Logger]. That the brokers refuse a user is not reported in any other way.
func (l *links) Log(_ kgo.LogLevel, message string, about ...any) {
	if !strings.Contains(message, "sasl") {
		return
	}
	for _, value := range about {
		if err, ok := value.(error); ok {
			l.failed.Store(&linkError{time.Now(), err})
		}
	}
}

// broken returns why no record has left since the given time; nil: one may have, or nothing was
// tried.
func (l *links) broken(since time.Time) error {
	failed := l.failed.Load()
	if failed == nil || failed.at.Before(since) || l.produced.Load() >= since.UnixNano() {
		return nil
	}
	return failed.err
}
