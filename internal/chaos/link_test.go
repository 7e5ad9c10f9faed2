package chaos

import (
	"bytes"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A link is a TCP proxy between one process and what it connects to. Without faults it passes bytes on.
type link struct {
	listener net.Listener
	dial     func() (net.Conn, error)
	delay    atomic.Int64 // of each chunk, in nanoseconds
	silent   atomic.Bool  // half-open: bytes are dropped without an error
	cutAfter atomic.Int64 // answers may have so many bytes more, then everything is reset; 0: any number
	loseTo   atomic.Pointer[[]byte]
	sent     atomic.Int64 // messages to the server, since it was last set
	fail     atomic.Int64 // the connection ends with the message of this number: it is not passed on; negative: it is, and its answer is not

	mu     sync.Mutex // guards what follows
	conns  map[net.Conn]bool
	closed bool
	copies sync.WaitGroup
}

// newLink returns a link to what dial connects to. It ends with t.
func newLink(t *testing.T, dial func() (net.Conn, error)) *link {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	testkit.Must(t, err)
	l := &link{listener: listener, dial: dial, conns: map[net.Conn]bool{}}
	l.copies.Go(l.accept)
	t.Cleanup(l.close)
	return l
}

func (l *link) addr() string { return l.listener.Addr().String() }

func (l *link) accept() {
	for {
		near, err := l.listener.Accept()
		if err != nil {
			return // closed
		}
		far, err := l.dial()
		if err != nil {
			_ = near.Close()
			continue
		}
		if !l.add(near, far) {
			return
		}
		answerLost := new(atomic.Bool)
		l.copies.Go(func() { l.copy(far, near, func(b []byte) bool { return l.up(b, answerLost) }) })
		l.copies.Go(func() { l.copy(near, far, func(b []byte) bool { return l.down(b, answerLost) }) })
	}
}

func (l *link) add(conns ...net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range conns {
		if l.closed {
			_ = c.Close()
			continue
		}
		l.conns[c] = true
	}
	return !l.closed
}

// copy passes bytes on until one end closes or pass says no, and then closes both.
func (l *link) copy(to, from net.Conn, pass func([]byte) bool) {
	defer l.drop(to, from)
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			return
		}
		if d := time.Duration(l.delay.Load()); d > 0 {
			<-time.After(d)
		}
		if l.silent.Load() {
			continue
		}
		if !pass(buffer[:n]) {
			return
		}
		if _, err := to.Write(buffer[:n]); err != nil {
			return
		}
	}
}

// up is asked about bytes to the server.
func (l *link) up(b []byte, answerLost *atomic.Bool) bool {
	if word := l.loseTo.Load(); word != nil && bytes.Contains(b, *word) {
		answerLost.Store(true)
	}
	n, fail := l.sent.Add(1), l.fail.Load()
	if n == -fail {
		answerLost.Store(true)
	}
	return n != fail
}

// down is asked about bytes from the server.
func (l *link) down(b []byte, answerLost *atomic.Bool) bool {
	if answerLost.Load() {
		return false
	}
	if l.cutAfter.Load() > 0 && l.cutAfter.Add(-int64(len(b))) <= 0 {
		l.reset()
		return false
	}
	return true
}

func (l *link) drop(conns ...net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range conns {
		delete(l.conns, c)
		abort(c)
	}
}

// abort closes a connection with a reset.
func abort(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // fails only on a closed one
	}
	_ = c.Close()
}

// reset ends all connections.
func (l *link) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.conns {
		abort(c)
	}
}

func (l *link) close() {
	_ = l.listener.Close()
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.reset()
	l.copies.Wait()
}
