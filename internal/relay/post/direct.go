package post

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"sync"
	"time"
)

// Bounds of direct connections.
const (
	directPayload = 32 << 10 // bytes; the receiver may answer a larger request before it has read all of it
	idleTimeout   = 90 * time.Second
)

// direct sends requests over plain HTTP/1.1. net/http has two goroutines a connection, which every
// request wakes, and watches each with a trace: twice the processor time of all else that a
// delivery costs the relay. Here the sender itself writes and reads. net/http has written the first
// lines of all requests, and parses the responses. Whatever is not plain goes by http.Transport:
// TLS and with it HTTP/2, proxies, large payloads.
//
// Nothing reads from an idle connection, so each is examined before it is used again: a receiver
// may have closed it. It is safe for concurrent use.
type direct struct {
	dial    func(ctx context.Context, network, address string) (net.Conn, error)
	address string
	most    int     // idle connections
	out     buffers // of requests that are being written

	mu     sync.Mutex
	idle   []*directConn // the most recently used one last
	expiry *time.Timer   // closes those that are not used
}

// A directConn is a connection that one request at a time uses.
type directConn struct {
	net.Conn
	left   int64 // how many bytes may still be read of a response's header
	read   int64
	reader *bufio.Reader
	usedAt time.Time

	request []byte // to be written before anything is read; nil: it was
	reused  bool   // for this request
	sent    int    // bytes of it
	written error  // what kept it from being sent as a whole
	raw     *rawConn

	bound  context.Context // whose end ends the connection's reads and writes
	unbind func() bool
}

func newDirectConn(conn net.Conn) *directConn {
	c := &directConn{Conn: conn, raw: newRawConn(conn)}
	c.reader = bufio.NewReader(c)
	return c
}

// bind makes the connection's reads and writes end with the context, and at the deadline. It fails
// if the context has ended: had it done so before the deadline was set, that would have undone its
// end.
func (c *directConn) bind(ctx context.Context, deadline time.Time) error {
	if c.bound != ctx {
		if c.unbind != nil && !c.unbind() {
			return net.ErrClosed // the end of the former context may still come
		}
		c.bound, c.unbind = ctx, context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	}
	if err := c.SetDeadline(deadline); err != nil {
		return err
	}
	return ctx.Err()
}

// release reports whether the connection can be used again. It stays bound to a context without a
// deadline, which is that of most requests.
func (c *directConn) release() (usable bool) {
	if _, limited := c.bound.Deadline(); !limited {
		return c.bound.Err() == nil
	}
	usable = c.unbind()
	c.bound, c.unbind = nil, nil
	return usable
}

// Close closes the connection.
func (c *directConn) Close() error {
	if c.unbind != nil {
		c.unbind()
	}
	return c.Conn.Close()
}

// errHeaderTooLarge is that of http.Transport, for maxResponseHeader.
var errHeaderTooLarge = errors.New("net/http: server response headers exceeded 65536 bytes; aborted")

// Read writes the request first, if it has not been written, and then reads at most as much as may
// be read of a header.
func (c *directConn) Read(b []byte) (n int, err error) {
	if c.left <= 0 {
		return 0, errHeaderTooLarge
	}
	b = b[:min(int64(len(b)), c.left)]
	request := c.request
	c.request = nil
	switch {
	case request == nil:
		n, err = c.Conn.Read(b)
	case c.reused && c.raw != nil:
		n, err = c.raw.exchange(c, request, b)
	case c.reused && !isOpen(c.Conn):
		err = errStale
	default:
		n, err = c.writeAndRead(request, b)
	}
	c.left -= int64(n)
	c.read += int64(n)
	return n, err
}

// writeAndRead writes what is left of a request, and waits for the beginning of the answer.
func (c *directConn) writeAndRead(rest, into []byte) (int, error) {
	n, err := c.Write(rest)
	c.sent += n
	if err != nil {
		c.written = err
		if c.sent == 0 {
			return 0, err
		}
		// The receiver may have refused before it closed.
		_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	}
	return c.Conn.Read(into)
}

// fits reports whether a request can be sent directly. What http.Transport refuses, or changes, is
// left to it.
func (p *direct) fits(req *Request, payload []byte) bool {
	if p == nil || len(payload) > directPayload {
		return false
	}
	for i := range req.header {
		value := req.header[i].value
		for j := range len(value) {
			if value[j] < ' ' || value[j] == 0x7f {
				return false
			}
		}
		if value == "" || value[0] == ' ' || value[len(value)-1] == ' ' {
			return false
		}
	}
	return true
}

// errStale is the error of a kept connection that its other side has closed, or on which it sent
// something unasked. Nothing was written to it.
var errStale = errors.New("the kept connection was closed, or held what was not asked for")

// roundTrip sends a request once, as the function of that name does. Of the usual answer it returns
// no more than the status: resp is nil then.
func (p *direct) roundTrip(ctx context.Context, timeout time.Duration, req *Request, payload []byte) (status int, resp *http.Response, connected bool, err error) {
	deadline, _ := ctx.Deadline()
	if timeout > 0 {
		if own := time.Now().Add(timeout); deadline.IsZero() || own.Before(deadline) {
			deadline = own
		}
	}
	out := p.out.get()
	defer p.out.pool.Put(out)
	*out = req.appendTo((*out)[:0], payload)
	for stale := 0; stale < maxStale; {
		if err := ended(ctx, deadline); err != nil { // what bind does may come too late to keep the request from being written
			return 0, nil, false, err
		}
		c, err := p.take(ctx, deadline)
		if err != nil {
			return 0, nil, false, causeOf(ctx, deadline, err)
		}
		status, resp, err := c.exchange(*out)
		switch {
		case err == nil && resp == nil:
			p.giveBack(c, true)
			return status, nil, true, nil
		case err == nil:
			resp.Body = &directBody{body: resp.Body, conn: c, pool: p, keep: !resp.Close && resp.StatusCode != http.StatusSwitchingProtocols}
			return resp.StatusCode, resp, true, nil
		}
		_ = c.Close()
		switch {
		case errors.Is(err, errStale):
		case !c.reused || c.sent > 0:
			return 0, nil, true, causeOf(ctx, deadline, err)
		default:
			stale++
		}
	}
	return 0, nil, false, causeOf(ctx, deadline, errNothingSent)
}

// ended returns the error of a request whose context or time has ended; nil: neither has.
func ended(ctx context.Context, deadline time.Time) error {
	if ctx.Err() == nil && !deadline.IsZero() && !time.Now().Before(deadline) {
		return context.DeadlineExceeded
	}
	return ctx.Err()
}

// causeOf returns why a request ended, like net/http. A deadline's own error may be lost: the
// parser makes half an answer of it.
func causeOf(ctx context.Context, deadline time.Time, err error) error {
	if cause := ended(ctx, deadline); cause != nil {
		return cause
	}
	return err
}

// exchange writes a request and reads the header of its response, or the whole of the usual one, of
// which resp is nil. If it fails and sent is 0, not a byte of the request can have left this host.
func (c *directConn) exchange(request []byte) (status int, resp *http.Response, err error) {
	c.left, c.read = maxResponseHeader, 0
	c.request, c.sent, c.written = request, 0, nil
	_, err = c.reader.Peek(1)
	switch {
	case err != nil && c.sent > 0 && c.written != nil:
		return 0, nil, c.written
	case err != nil: // io.EOF: no answer, not half of one
		return 0, nil, err
	}
	if c.written == nil {
		there, _ := c.reader.Peek(c.reader.Buffered())
		if status, size := usualAnswer(there); status != 0 {
			_, _ = c.reader.Discard(size)
			return status, nil, nil
		}
	}
	for { // the limit of the header bounds the responses of 1xx, too
		resp, err = http.ReadResponse(c.reader, nil)
		switch {
		case err != nil && c.written != nil:
			return 0, nil, c.written
		case err != nil:
			return 0, nil, brokenBy(err)
		case resp.StatusCode/100 != 1 || resp.StatusCode == http.StatusSwitchingProtocols:
			c.left = math.MaxInt64
			resp.Close = resp.Close || c.written != nil // the receiver may wait for the rest of the request, and take the next one for it
			return resp.StatusCode, resp, nil
		}
	}
}

// brokenBy says as http.Transport does that a response cannot be read.
func brokenBy(err error) error {
	if errors.Is(err, errHeaderTooLarge) {
		return errHeaderTooLarge
	}
	return fmt.Errorf("net/http: HTTP/1.x transport connection broken: %w", err)
}

// A directBody is the body of a response. Once it has been read to its end, the connection can be
// used again.
type directBody struct {
	body io.ReadCloser
	conn *directConn
	pool *direct
	keep bool
	end  bool
}

func (b *directBody) Read(into []byte) (int, error) {
	n, err := b.body.Read(into)
	b.end = b.end || err == io.EOF
	return n, err
}

// Close does not read the rest of the body, however long that is.
func (b *directBody) Close() error {
	b.pool.giveBack(b.conn, b.keep && (b.end || b.body == http.NoBody))
	return nil
}

// giveBack keeps a connection if it can be used for another request, and closes it otherwise.
func (p *direct) giveBack(c *directConn, usable bool) {
	if c.release() && usable && c.reader.Buffered() == 0 {
		p.put(c)
		return
	}
	_ = c.Close()
}

// take returns an idle connection, or else a new one, bound to the context and the deadline.
func (p *direct) take(ctx context.Context, deadline time.Time) (c *directConn, err error) {
	for c := p.pop(); c != nil; c = p.pop() {
		if time.Since(c.usedAt) < idleTimeout && c.bind(ctx, deadline) == nil {
			c.reused = true
			return c, nil
		}
		_ = c.Close()
		if err := ended(ctx, deadline); err != nil {
			return nil, err
		}
	}
	dialing, cancel := ctx, func() {}
	if !deadline.IsZero() {
		dialing, cancel = context.WithDeadline(ctx, deadline)
	}
	defer cancel()
	conn, err := p.dial(dialing, "tcp", p.address)
	if err != nil {
		return nil, err
	}
	c = newDirectConn(conn)
	if err := c.bind(ctx, deadline); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

func (p *direct) pop() (c *directConn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if last := len(p.idle) - 1; last >= 0 {
		c, p.idle = p.idle[last], p.idle[:last]
	}
	return c
}

// put keeps a connection for the next request.
func (p *direct) put(c *directConn) {
	c.usedAt = time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.idle) == p.most {
		_ = c.Close()
		return
	}
	if p.idle = append(p.idle, c); p.expiry == nil {
		p.expiry = time.AfterFunc(idleTimeout, p.expire)
	}
}

// expire closes what has not been used for long.
func (p *direct) expire() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.idle) > 0 && time.Since(p.idle[0].usedAt) >= idleTimeout {
		_ = p.idle[0].Close()
		p.idle = p.idle[1:]
	}
	if p.expiry = nil; len(p.idle) > 0 {
		p.expiry = time.AfterFunc(idleTimeout-time.Since(p.idle[0].usedAt), p.expire)
	}
}

// closeIdle closes all connections that no request uses.
func (p *direct) closeIdle() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.idle {
		_ = c.Close()
	}
	p.idle = nil
	if p.expiry != nil {
		p.expiry.Stop()
		p.expiry = nil
	}
}
