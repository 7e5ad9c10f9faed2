package session

import (
	"context"
	"net"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// closeGrace is for how long closing waits for a server that does not answer. pgx waits for 15
// seconds.
const closeGrace = 250 * time.Millisecond

// sockets are the connections of a pool that are open, also those that cancel a statement. They are
// safe for concurrent use.
type sockets struct {
	mu   sync.Mutex
	open map[*socket]struct{}
	shut bool // nothing is dialled any more
}

type socket struct {
	net.Conn
	of *sockets
}

// dial returns a function that dials as the given one, and remembers each connection until it is
// closed.
func (s *sockets) dial(dial pgconn.DialFunc) pgconn.DialFunc {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		opened := &socket{conn, s}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.shut {
			_ = conn.Close()
			return nil, net.ErrClosed
		}
		if s.open == nil {
			s.open = map[*socket]struct{}{}
		}
		s.open[opened] = struct{}{}
		return opened, nil
	}
}

// Close implements [net.Conn].
func (s *socket) Close() error {
	s.of.mu.Lock()
	delete(s.of.open, s)
	s.of.mu.Unlock()
	return s.Conn.Close()
}

// cut ends what waits for an answer of the server.
func (s *sockets) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shut = true
	for opened := range s.open {
		_ = opened.Conn.Close()
	}
}

// Cut ends every statement that waits for an answer of the server, and makes all later ones fail.
func (d Database) Cut() { d.sockets.cut() }

// Close closes the connections, also those to a server that does not answer.
func (d Database) Close() {
	if d.sockets != nil {
		defer time.AfterFunc(closeGrace, d.sockets.cut).Stop()
	}
	d.Direct.Close()
}
