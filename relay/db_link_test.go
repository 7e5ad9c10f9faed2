package relay

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// A link stands between a relay and its database, and can be cut, lead elsewhere, or swallow what
// the database answers.
type link struct {
	dsn string

	mu      sync.Mutex
	target  string // path of the socket that new connections lead to
	conns   map[net.Conn]bool
	refuse  bool
	trigger []byte        // what a statement holds from which on answers are held
	before  func()        // runs before that statement arrives
	held    chan struct{} // closed when that statement came
	holding chan struct{} // closed when answers pass
}

// newLink returns a link to the server of dsn, which listens on a unix socket.
func newLink(t testing.TB, dsn string) *link {
	t.Helper()
	u, err := url.Parse(dsn)
	relaytest.Must(t, err)
	query := u.Query()
	name := ".s.PGSQL." + query.Get("port")
	dir, err := os.MkdirTemp("/tmp", "relay-link-") // t.TempDir is too long a path for a socket
	relaytest.Must(t, err)
	listener, err := net.Listen("unix", filepath.Join(dir, name))
	relaytest.Must(t, err)
	query.Set("host", dir)
	u.RawQuery = query.Encode()
	l := &link{dsn: u.String(), conns: map[net.Conn]bool{}, holding: passing}
	l.lead(t, dsn)

	var running sync.WaitGroup
	running.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("unix", l.socket())
			if err != nil || !l.add(client, server) {
				_ = client.Close()
				continue
			}
			running.Go(func() { l.forward(server, client, false) })
			running.Go(func() { l.forward(client, server, true) })
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		l.pass()
		l.cut()
		running.Wait()
		_ = os.RemoveAll(dir)
	})
	return l
}

// lead makes new connections lead to the server of dsn.
func (l *link) lead(t testing.TB, dsn string) {
	u, err := url.Parse(dsn)
	relaytest.Must(t, err)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.target = filepath.Join(u.Query().Get("host"), ".s.PGSQL."+u.Query().Get("port"))
}

func (l *link) socket() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.target
}

func (l *link) add(client, server net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.refuse {
		_ = server.Close()
		return false
	}
	l.conns[client], l.conns[server] = true, true
	return true
}

func (l *link) forward(to, from net.Conn, answers bool) {
	defer func() {
		_, _ = to.Close(), from.Close()
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.conns, to)
		delete(l.conns, from)
	}()
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			<-l.see(buffer[:n], answers)
			if _, err := to.Write(buffer[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// see returns what the message has to wait for.
func (l *link) see(message []byte, answer bool) <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if answer {
		return l.holding
	}
	if l.trigger != nil && bytes.Contains(message, l.trigger) {
		l.trigger, l.holding = nil, make(chan struct{})
		l.before()
		close(l.held)
	}
	return passing
}

// passing makes nothing wait.
var passing = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// holdFrom keeps every answer of the database, from the next execution of a statement on, until
// pass. The statement, and what follows it, arrives there; then the returned channel closes.
func (l *link) holdFrom(statement string) <-chan struct{} { return l.holdAfter(func() {}, statement) }

// holdAfter is holdFrom for a statement that shall find what before does: one that is on its way
// already does not count.
func (l *link) holdAfter(before func(), statement string) <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.before = before
	// The name under which pgx prepares the statement, as a Bind message has it: behind the empty
	// name of the portal.
	digest := sha256.Sum256([]byte(pg.NewNames("public", "").In(statement)))
	l.trigger = []byte("\x00stmtcache_" + hex.EncodeToString(digest[:24]) + "\x00")
	l.held = make(chan struct{})
	return l.held
}

func (l *link) pass() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.trigger = nil
	if l.holding != passing {
		close(l.holding)
		l.holding = passing
	}
}

// cut ends every connection, and with it whatever was held back.
func (l *link) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for conn := range l.conns {
		_ = conn.Close()
	}
}

// block makes every connection fail from now on, or lets them through again.
func (l *link) block(refuse bool) {
	l.mu.Lock()
	l.refuse = refuse
	l.mu.Unlock()
	if refuse {
		l.cut()
	}
}
