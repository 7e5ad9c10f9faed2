package natspost

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// A conn is one connection, and the attempts that use it. Once it has ended, no attempt can use it. It is safe for concurrent use.
type conn struct {
	nats *nats.Conn
	js   jetstream.JetStream
	wire *wire
	// ended is closed when the connection has ended, after everything that the server said before.
	ended chan struct{}

	mu      sync.Mutex
	waiting map[*waiter]struct{}
	leaving bool  // no further attempt; closed when the last one ends
	expired error // why the server no longer accepts the user
}

// A waiter is an attempt that waits for what the server answers on a subject.
type waiter struct {
	subject string
	cancel  context.CancelCauseFunc
	since   time.Time
}

// begin counts an attempt. It returns false if the connection takes no more.
func (c *conn) begin(w *waiter) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leaving || c.nats.IsClosed() {
		return false
	}
	c.waiting[w] = struct{}{}
	return true
}

// end counts an attempt that has its result.
func (c *conn) end(w *waiter) {
	c.mu.Lock()
	delete(c.waiting, w)
	unused := c.leaving && len(c.waiting) == 0
	c.mu.Unlock()
	if unused {
		c.nats.Close()
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
	for w := range c.waiting {
		if subscription || subject == w.subject {
			w.cancel(err)
		}
	}
	c.mu.Unlock()
	if subscription { // the library takes the refused subscription for one that exists
		c.leave()
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

// A wire is the connection below the client library. A peer that takes nothing must not hold up a write, and with it every attempt, for
// longer than an attempt may take.
type wire struct {
	net.Conn
	timeout time.Duration
	heard   atomic.Int64 // when something was last read, in Unix nanoseconds
}

func (w *wire) Read(b []byte) (int, error) {
	n, err := w.Conn.Read(b)
	if n > 0 {
		w.heard.Store(time.Now().UnixNano())
	}
	return n, err
}

func (w *wire) Write(b []byte) (int, error) {
	if err := w.SetWriteDeadline(time.Now().Add(w.timeout)); err != nil {
		return 0, err
	}
	return w.Conn.Write(b)
}

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
	d.last = &wire{Conn: c, timeout: d.timeout}
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
