package natspost

import (
	"context"
	"errors"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// A conn is one connection, and the attempts that use it. Once it has ended, no attempt can use it. It is safe for concurrent use.
type conn struct {
	nats *nats.Conn
	js   jetstream.JetStream
	wire *wire

	subscribing  sync.Once
	inbox        string // begins the subjects on which acknowledgements arrive
	unsubscribed error  // why none can arrive

	// ended is closed when the connection has ended, after everything that the server said before.
	ended chan struct{}

	mu      sync.Mutex
	waiting map[uint64]*waiter
	last    uint64 // number of a waiter; none occurs twice
	leaving bool   // no further attempt; closed when the last one ends
	expired error  // why the server no longer accepts the user
}

// begin counts an attempt. It returns false if the connection takes no more.
func (c *conn) begin(w *waiter) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leaving || c.nats.IsClosed() {
		return false
	}
	c.last++
	w.number = c.last
	c.waiting[w.number] = w
	return true
}

// end counts an attempt that has its result. Nothing is answered to its waiter afterwards.
func (c *conn) end(w *waiter) {
	c.mu.Lock()
	delete(c.waiting, w.number)
	unused := c.leaving && len(c.waiting) == 0
	c.mu.Unlock()
	if unused {
		c.nats.Close()
	}
}

// reply returns the subject on which the acknowledgement of an attempt arrives. The first one subscribes to those of all: the server may
// refuse that, and an attempt must be there that reports it.
func (c *conn) reply(w *waiter) (subject string, err error) {
	c.subscribing.Do(func() {
		c.inbox = c.nats.NewInbox() + "."
		var s *nats.Subscription
		if s, c.unsubscribed = c.nats.Subscribe(c.inbox+"*", c.acknowledged); c.unsubscribed == nil {
			c.unsubscribed = s.SetPendingLimits(-1, -1) // of an answer that is dropped, the attempt would wait for its timeout
		}
	})
	if c.unsubscribed != nil {
		return "", c.unsubscribed
	}
	b := make([]byte, 0, 64)
	return string(strconv.AppendUint(append(b, c.inbox...), w.number, numberBase)), nil
}

const numberBase = 36

// acknowledged gives an answer to the attempt that waits for it, if one still does.
func (c *conn) acknowledged(m *nats.Msg) {
	number, err := strconv.ParseUint(strings.TrimPrefix(m.Subject, c.inbox), numberBase, 64)
	if err != nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if w := c.waiting[number]; w != nil {
		w.answer(answer{message: m})
	}
}

// leave closes the connection when no attempt waits for an answer on it.
func (c *conn) leave() {
	c.mu.Lock()
	c.leaving = true
	unused := len(c.waiting) == 0
	c.mu.Unlock()
	if unused {
		c.nats.Close()
	}
}

// refuse gives an error that the server sent beside the answers to the attempts that it concerns. Without it they would wait for
// their whole timeout, and no operator would know why.
func (c *conn) refuse(err error) {
	subject, subscription := refusedSubject(err)
	c.mu.Lock()
	if isUnauthorized(err) {
		c.expired = err
	}
	for _, w := range c.waiting {
		if subscription || subject == w.subject {
			w.answer(answer{err: err})
		}
	}
	c.mu.Unlock()
	if subscription { // the library takes the refused subscription for one that exists
		c.leave()
	}
}

// close ends the wait of all attempts, when the connection has ended.
func (c *conn) close() {
	close(c.ended)
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range c.waiting {
		w.answer(answer{err: nats.ErrConnectionClosed})
	}
}

// refusedSubject returns the subject that an error is about, and whether it is about a subscription, which is that to the answers.
func refusedSubject(err error) (subject string, subscription bool) {
	if !errors.Is(err, nats.ErrPermissionViolation) {
		return "", false
	}
	_, rest, _ := strings.Cut(err.Error(), `"`)
	subject, _, _ = strings.Cut(rest, `"`)
	return subject, strings.Contains(err.Error(), "Subscription to")
}

// endedBy returns why the connection ended, as far as the server said so.
func (c *conn) endedBy(ctx context.Context) error {
	select {
	case <-c.ended:
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.expired != nil {
		return c.expired
	}
	return c.nats.LastError()
}

// silent reports whether nothing at all has arrived since the given time: such a connection may lead nowhere.
func (c *conn) silent(since time.Time) bool { return c.wire.heard.Load() < since.UnixNano() }

// A dialer dials for the client library as the destination's egress allows, also to the servers that a cluster names. It keeps what
// the library does not report.
type dialer struct {
	ctx     context.Context
	dial    func(ctx context.Context, network, address string) (net.Conn, error)
	timeout time.Duration

	last   *wire
	failed error
	stop   func() bool
}

// Dial implements [nats.CustomDialer]. Until released, the connection ends with the context.
func (d *dialer) Dial(network, address string) (net.Conn, error) {
	d.release()
	c, err := d.dial(d.ctx, network, address)
	if err != nil {
		d.failed = err
		return nil, err
	}
	d.last = newWire(c, d.timeout)
	d.stop = context.AfterFunc(d.ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)); _ = c.Close() })
	return d.last, nil
}

// release makes the last connection outlive the context.
func (d *dialer) release() (alive bool) {
	if d.stop == nil {
		return false
	}
	alive, d.stop = d.stop(), nil
	return alive
}
