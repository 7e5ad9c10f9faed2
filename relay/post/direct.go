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

// direct sends requests over plain HTTP/1.1. net/http has two goroutines a connection, which every request wakes, and watches each
// with a trace: twice the processor time of all else that a delivery costs the relay. Here the sender itself writes and reads;
// request and response are still written and parsed by net/http. Whatever is not plain goes by http.Transport: TLS and with it
// HTTP/2, proxies, large payloads.
//
// Nothing reads from an idle connection, so each is examined before it is used again: a receiver may have closed it. It is safe for
// concurrent use.
type direct struct {
	dial    func(ctx context.Context, network, address string) (net.Conn, error)
	address string
	most    int // idle connections

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
	writer *bufio.Writer
	usedAt time.Time
}

func newDirectConn(conn net.Conn) *directConn {
	c := &directConn{Conn: conn}
	c.reader, c.writer = bufio.NewReader(c), bufio.NewWriter(conn)
	return c
}

// errHeaderTooLarge is that of http.Transport, for maxResponseHeader.
var errHeaderTooLarge = errors.New("net/http: server response headers exceeded 65536 bytes; aborted")

// Read reads at most as much as may be read of a header.
func (c *directConn) Read(b []byte) (int, error) {
	if c.left <= 0 {
		return 0, errHeaderTooLarge
	}
	n, err := c.Conn.Read(b[:min(int64(len(b)), c.left)])
	c.left -= int64(n)
	c.read += int64(n)
	return n, err
}

// fits reports whether a request can be sent directly. What http.Transport refuses, it shall refuse.
func (p *direct) fits(req *http.Request) bool {
	if p == nil || req.ContentLength > directPayload {
		return false
	}
	for _, values := range req.Header {
		for _, value := range values {
			for i := range len(value) {
				if value[i] < ' ' || value[i] == 0x7f {
					return false
				}
			}
		}
	}
	return true
}

// roundTrip sends a request once, as the function of that name does.
func (p *direct) roundTrip(ctx context.Context, req *http.Request, payload []byte) (resp *http.Response, connected bool, err error) {
	for range maxStale {
		if ctx.Err() != nil { // what bind does may come too late to keep the request from being written
			return nil, false, ctx.Err()
		}
		c, reused, err := p.take(ctx)
		if err != nil {
			return nil, false, causeOf(ctx, err)
		}
		stop := c.bind(ctx)
		resp, nothingSent, err := c.exchange(req)
		if err == nil {
			resp.Body = &directBody{body: resp.Body, conn: c, pool: p, stop: stop, keep: !resp.Close && resp.StatusCode != http.StatusSwitchingProtocols}
			return resp, true, nil
		}
		stop()
		_ = c.Close()
		if !reused || !nothingSent {
			return nil, true, causeOf(ctx, err)
		}
		req.Body = newBody(payload)
	}
	return nil, false, causeOf(ctx, errNothingSent)
}

// causeOf returns the error of a context that ended a request, like net/http.
func causeOf(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// bind makes the connection end with the context. The function that is returned ends that, and reports whether the context was
// still alive. The context's deadline is not the connection's: that would come first, be reported as what the parser makes of half
// an answer, and end the connection when it is idle.
func (c *directConn) bind(ctx context.Context) (stop func() bool) {
	return context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
}

// exchange writes a request and reads the header of its response. If that fails it reports whether not a byte of the request can
// have left this host.
func (c *directConn) exchange(req *http.Request) (resp *http.Response, nothingSent bool, err error) {
	c.left, c.read = maxResponseHeader, 0
	counted := &countedWriter{to: c.Conn}
	c.writer.Reset(counted)
	written := req.Write(c.writer)
	if written == nil {
		written = c.writer.Flush()
	}
	if written != nil {
		if counted.n == 0 {
			return nil, true, written
		}
		// The receiver may have refused before it closed.
		_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	}
	for { // the limit of the header bounds the responses of 1xx, too
		resp, err = http.ReadResponse(c.reader, req)
		switch {
		case err != nil && written != nil:
			return nil, false, written
		case c.read == 0 && errors.Is(err, io.ErrUnexpectedEOF): // no answer, not half of one
			return nil, false, io.EOF
		case err != nil && c.read == 0:
			return nil, false, err
		case err != nil:
			return nil, false, brokenBy(err)
		case resp.StatusCode/100 != 1 || resp.StatusCode == http.StatusSwitchingProtocols:
			c.left = math.MaxInt64
			resp.Close = resp.Close || written != nil // the receiver may wait for the rest of the request, and take the next one for it
			return resp, false, nil
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

type countedWriter struct {
	to io.Writer
	n  int
}

func (w *countedWriter) Write(b []byte) (int, error) {
	n, err := w.to.Write(b)
	w.n += n
	return n, err
}

// A directBody is the body of a response. Once it has been read to its end, the connection can be used again.
type directBody struct {
	body io.ReadCloser
	conn *directConn
	pool *direct
	stop func() bool
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
	alive := b.stop()
	if alive && b.keep && (b.end || b.body == http.NoBody) && b.conn.reader.Buffered() == 0 {
		b.pool.put(b.conn)
		return nil
	}
	return b.conn.Close()
}

// take returns an idle connection, if there is one that can be used, or a new one.
func (p *direct) take(ctx context.Context) (c *directConn, reused bool, err error) {
	for {
		c := p.pop()
		if c == nil {
			break
		}
		if time.Since(c.usedAt) < idleTimeout && isOpen(c.Conn) {
			return c, true, nil
		}
		_ = c.Close()
	}
	conn, err := p.dial(ctx, "tcp", p.address)
	if err != nil {
		return nil, false, err
	}
	return newDirectConn(conn), false, nil
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
