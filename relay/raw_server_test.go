package relay

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
)

// A rawServer speaks whatever serve writes: what no HTTP library would.
type rawServer struct {
	url      string
	requests atomic.Int64 // complete ones, counted by read
	written  atomic.Int64 // bytes
}

func newRawServer(t testing.TB, serve func(net.Conn)) *rawServer {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	s := &rawServer{url: "http://" + listener.Addr().String() + "/"}
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
				serve(countingConn{conn, &s.written})
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

// read takes one request with its whole body from the connection.
func (s *rawServer) read(conn net.Conn) error {
	r, err := http.ReadRequest(bufio.NewReader(conn))
	if err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		return err
	}
	s.requests.Add(1)
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

// reset closes with RST instead of FIN.
func (c countingConn) reset() {
	_ = c.Conn.(*net.TCPConn).SetLinger(0)
	_ = c.Close()
}
