package relaytest

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
)

// A RawServer speaks whatever serve writes: what no HTTP library would.
type RawServer struct {
	URL      string
	Requests atomic.Int64 // complete ones, counted by Read
	Written  atomic.Int64 // bytes
}

// NewRawServer starts a server until the test ends. serve has a connection until it returns.
func NewRawServer(t testing.TB, serve func(*RawServer, net.Conn)) *RawServer {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	Must(t, err)
	s := &RawServer{URL: "http://" + listener.Addr().String() + "/"}
	var mu sync.Mutex
	open := map[net.Conn]bool{}
	closed := false
	var running sync.WaitGroup
	running.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			if closed {
				_ = conn.Close()
			}
			open[conn] = true
			mu.Unlock()
			running.Go(func() {
				defer func() {
					mu.Lock()
					delete(open, conn)
					mu.Unlock()
					_ = conn.Close()
				}()
				serve(s, countingConn{conn, &s.Written})
			})
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		mu.Lock()
		closed = true
		for conn := range open {
			_ = conn.Close()
		}
		mu.Unlock()
		running.Wait()
	})
	return s
}

// Read takes one request with its whole body from the connection.
func (s *RawServer) Read(conn net.Conn) error {
	r, err := http.ReadRequest(bufio.NewReader(conn))
	if err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		return err
	}
	s.Requests.Add(1)
	return nil
}

type countingConn struct {
	net.Conn
	written *atomic.Int64
}

func (c countingConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.written.Add(int64(n))
	return n, err
}

// Reset closes a connection of a [RawServer] with RST instead of FIN.
func Reset(conn net.Conn) {
	_ = conn.(countingConn).Conn.(*net.TCPConn).SetLinger(0)
	_ = conn.Close()
}
