package natspost

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// A conn is one connection, and the attempts that use it. Once it has ended, no attempt can use it.
// It is safe for concurrent use.
type conn struct {
	nats *nats.Conn
	js   jetstream.JetStream

	mu       sync.Mutex
	attempts map[*attempt]struct{}
	leaving  bool // no further attempt; closed when the last one ends
}

// An attempt waits for an answer of the server.
type attempt struct {
	subject string                  // that it publishes to, or asks on
	fail    context.CancelCauseFunc // called when the server refuses that, or the connection ends
}

// begin counts an attempt. It returns false if the connection takes no more.
func (c *conn) begin(a *attempt) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leaving || c.nats.IsClosed() {
		return false
	}
	c.attempts[a] = struct{}{}
	return true
}

// end stops counting an attempt that has its result.
func (c *conn) end(a *attempt) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.attempts, a)
	c.closeUnused()
}

// leave closes the connection when no attempt waits for an answer on it.
func (c *conn) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leaving = true
	c.closeUnused()
}

func (c *conn) closeUnused() {
	if c.leaving && len(c.attempts) == 0 {
		c.nats.Close()
	}
}

// refuse fails the attempts that an error concerns which the server sent beside the answers.
// Without it they would wait for their whole timeout, and no operator would know why.
func (c *conn) refuse(err error) {
	subject, subscription := refusedSubject(err)
	all := subscription || accessRefused.MatchString(err.Error())
	c.fail(err, func(a *attempt) bool { return all || subject != "" && subject == a.subject })
	if all { // the library takes the refused subscription for one that exists
		c.leave()
	}
}

// close fails all attempts, when the connection has ended because of the given error.
func (c *conn) close(err error) {
	reason := errClosed
	if err != nil && !errors.Is(err, io.EOF) {
		reason = fmt.Errorf("%w: %w", errClosed, err)
	}
	c.fail(reason, func(*attempt) bool { return true })
}

func (c *conn) fail(err error, concerns func(*attempt) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for a := range c.attempts {
		if concerns(a) {
			a.fail(err)
		}
	}
}

// errClosed is why an attempt fails whose connection ends before the answer.
var errClosed = errors.New("the server closed the connection before it acknowledged the message")

// refusedSubject returns the subject that an error is about, and whether it is about a
// subscription, which is that to the answers.
func refusedSubject(err error) (subject string, subscription bool) {
	if !errors.Is(err, nats.ErrPermissionViolation) {
		return "", false
	}
	_, rest, _ := strings.Cut(err.Error(), `"`)
	subject, _, _ = strings.Cut(rest, `"`)
	return subject, strings.Contains(err.Error(), "Subscription to")
}

// A batchConn is the connection below the client library, which writes nearly each message by
// itself. A batchConn collects what is written while the processors are busy: a system call costs
// the relay and the server more than the message in it. It is safe for concurrent use.
type batchConn struct {
	net.Conn
	timeout  time.Duration // of a write: a peer that takes nothing must not hold up attempts for longer
	flushing sync.WaitGroup

	mu      sync.Mutex
	out     *bufio.Writer
	waiting bool // for a flush
}

// Write implements [net.Conn]. It may return before b is written. If that fails later, the
// connection ends.
func (c *batchConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.SetWriteDeadline(time.Now().Add(c.timeout)); err != nil {
		return 0, err
	}
	if !c.waiting {
		c.waiting = true
		c.flushing.Go(c.flush)
	}
	return c.out.Write(b)
}

func (c *batchConn) flush() {
	runtime.Gosched() // attempts that can continue do so first, and add their messages
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting = false
	if c.out.Flush() != nil {
		_ = c.Conn.Close()
	}
}

// Close implements [net.Conn]. It writes nothing: no attempt waits for an answer any more.
func (c *batchConn) Close() error {
	err := c.Conn.Close()
	c.flushing.Wait()
	return err
}
