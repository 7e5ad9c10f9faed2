package chaos

import (
	"bytes"
	"net"
	"regexp"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A link is a TCP proxy between one process and what it connects to. Without faults it passes bytes
// on.
type link struct {
	listener net.Listener
	dial     func() (net.Conn, error)
	hear     func(message []byte) // called with what each message to the server has executed; set before there is one; may be nil
	delay    atomic.Int64         // of each chunk, in nanoseconds
	slice    atomic.Int64         // bytes pass so many at once; 0: as they come
	silent   atomic.Bool          // half-open: bytes are dropped without an error
	cutAfter atomic.Int64         // answers may have so many bytes more, then everything is reset; 0: any number
	loseTo   atomic.Pointer[regexp.Regexp]
	lost     atomic.Int64 // answers, to what loseTo matches
	dials    atomic.Int64 // connections
	sent     atomic.Int64 // messages to the server
	doom     atomic.Pointer[doom]
	refuser  atomic.Pointer[refuser] // of the server; set before there is a connection; may be nil

	mu     sync.Mutex // guards what follows
	conns  map[net.Conn]bool
	closed bool
	copies sync.WaitGroup
}

// A stage of the way of a message to the server and of its answer.
type stageOfMessage string

const (
	undialled    stageOfMessage = "undialled"     // before its connection is made
	unsent       stageOfMessage = "unsent"        // before it is passed on
	halfSent     stageOfMessage = "half-sent"     // when half of it is passed on
	sent         stageOfMessage = "sent"          // when it is answered, and nothing of the answer is passed on
	halfAnswered stageOfMessage = "half-answered" // when half of the answer is passed on
	answered     stageOfMessage = "answered"      // when the answer is passed on
)

// A doom is what a link does at one stage of one message.
type doom struct {
	n    int64  // the number of the message; of undialled: of the connection
	step []byte // if it is set, the first message with these words meets the doom instead
	at   stageOfMessage
	meet func(message []byte) (goOn bool) // no: the connection ends
	done atomic.Bool                      // a message with the words of step has met it
}

// comes reports whether a message meets the doom.
func (d *doom) comes(n int64, executed []byte) bool {
	if d.step == nil {
		return d.n == n
	}
	return bytes.Contains(executed, d.step) && !d.done.Swap(true)
}

// A conn is one connection through a link.
type conn struct {
	link      *link
	near, far net.Conn
	awaited   atomic.Pointer[doom] // met by the next answer
	prepared  map[string][]byte    // texts of statements, by their names
	refusing                       // where link.refuser is set
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
		l.copies.Go(func() { l.serve(near) })
	}
}

func (l *link) serve(near net.Conn) {
	if n, d := l.dials.Add(1), l.doom.Load(); d != nil && d.at == undialled && d.n == n && !d.meet(nil) {
		abort(near)
		return
	}
	if r := l.refuser.Load(); r != nil && r.connection(near) {
		return
	}
	far, err := l.dial()
	if err != nil {
		_ = near.Close()
		return
	}
	if l.add(near, far) {
		c := &conn{link: l, near: near, far: far, prepared: map[string][]byte{}}
		l.copies.Go(func() { c.copy(near, c.up) })
		c.copy(far, c.down)
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
func (c *conn) copy(from net.Conn, pass func([]byte) bool) {
	defer c.link.drop(c.near, c.far)
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			return
		}
		if d := time.Duration(c.link.delay.Load()); d > 0 {
			<-time.After(d)
		}
		if !c.link.silent.Load() && !pass(buffer[:n]) {
			return
		}
	}
}

// up passes on a message to the server.
func (c *conn) up(b []byte) bool {
	if r := c.link.refuser.Load(); r != nil {
		b = c.refuse(r, b)
	}
	executed := c.executed(b)
	if words := c.link.loseTo.Load(); words != nil && words.Match(executed) {
		c.awaited.Store(&doom{at: sent, meet: func([]byte) (goOn bool) {
			c.link.lost.Add(1)
			return false
		}})
	}
	if c.link.hear != nil {
		c.link.hear(executed)
	}
	n, d := c.link.sent.Add(1), c.link.doom.Load()
	if d == nil || !d.comes(n, executed) {
		return c.link.write(c.far, b)
	}
	switch d.at {
	case undialled:
	case unsent:
		return d.meet(executed) && c.link.write(c.far, b)
	case halfSent:
		half := len(b) / 2
		return c.link.write(c.far, b[:half]) && d.meet(executed) && c.link.write(c.far, b[half:])
	default:
		c.awaited.Store(&doom{at: d.at, meet: func([]byte) bool { return d.meet(executed) }})
	}
	return c.link.write(c.far, b)
}

// named matches the name that pgx gives a statement which it prepares.
var named = regexp.MustCompile(`stmtcache_[0-9a-f]+\x00`)

// executed returns a message with the texts of the statements that it executes: pgx sends a text
// once for each connection, to prepare it, and its name afterwards.
func (c *conn) executed(b []byte) (text []byte) {
	from := 0
	for _, at := range named.FindAllIndex(b, -1) {
		if at[0] < max(5, from) {
			continue
		}
		text = append(text, b[from:at[0]]...)
		name := string(b[at[0]:at[1]])
		from = at[1]
		switch {
		case b[at[0]-5] == 'P': // Parse: its length comes before the name
			query, _, _ := bytes.Cut(b[from:], []byte{0})
			c.prepared[name] = bytes.Clone(query)
			from += len(query)
		case b[at[0]-1] == 0: // Bind: the empty name of its portal does
			text = append(text, c.prepared[name]...)
		}
	}
	return append(text, b[from:]...)
}

// down passes on what the server answers.
func (c *conn) down(b []byte) bool {
	b = c.answers(b)
	if left := &c.link.cutAfter; left.Load() > 0 && left.Add(-int64(len(b))) <= 0 {
		c.link.reset()
		return false
	}
	if d := c.awaited.Swap(nil); d != nil {
		n := map[stageOfMessage]int{sent: 0, halfAnswered: len(b) / 2, answered: len(b)}[d.at]
		return c.link.write(c.near, b[:n]) && d.meet(nil) && c.link.write(c.near, b[n:])
	}
	return c.link.write(c.near, b)
}

// dooms lets a message meet a doom, counted from now on.
func (l *link) dooms(d *doom) {
	l.dials.Store(0)
	l.sent.Store(0)
	l.doom.Store(d)
}

// ends is what a doom does to a connection that is to end.
func ends([]byte) (goOn bool) { return false }

func (l *link) write(to net.Conn, b []byte) bool {
	for len(b) > 0 {
		n := len(b)
		if slice := int(l.slice.Load()); slice > 0 {
			n = min(n, slice)
		}
		if _, err := to.Write(b[:n]); err != nil {
			return false
		}
		b = b[n:]
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
