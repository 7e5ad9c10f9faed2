package session

import (
	"context"
	"net"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// What waits for a silent server ends when the sockets are cut, and nothing is dialled afterwards,
// as the cancelling of a statement would.
func TestSocketsAreCut(t *testing.T) {
	t.Parallel()
	server, err := net.Listen("tcp", "127.0.0.1:0")
	testkit.Must(t, err)
	defer func() { _ = server.Close() }()
	s := &sockets{}
	dial := s.dial((&net.Dialer{}).DialContext)
	closed, err := dial(t.Context(), "tcp", server.Addr().String())
	testkit.Must(t, err)
	testkit.Must(t, closed.Close())
	waits, err := dial(t.Context(), "tcp", server.Addr().String())
	testkit.Must(t, err)
	if len(s.open) != 1 {
		t.Errorf("%d of 1 are open", len(s.open))
	}
	ended := make(chan error)
	go func() {
		_, err := waits.Read(make([]byte, 1))
		ended <- err
	}()
	s.cut()
	if err := <-ended; err == nil {
		t.Error("a read that was cut has succeeded")
	}
	if conn, err := dial(context.Background(), "tcp", server.Addr().String()); err == nil {
		t.Errorf("%v was dialled", conn)
	}
}
