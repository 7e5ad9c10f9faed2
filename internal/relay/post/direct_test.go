package post_test

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A deadline that passes while a connection is idle was that of the request before. If it ended the
// connection, requests that come less often than the timeout would dial each time.
func TestIdleConnectionOutlivesDeadline(t *testing.T) {
	t.Parallel()
	const timeout = 100 * time.Millisecond
	for _, whose := range []string{"destination", "context"} {
		rc := relaytest.NewReceiver(t, nil)
		destination := destinationOf(rc.URL, post.Wire{}, post.Egress{})
		if whose == "destination" {
			destination.Timeout = timeout
		}
		e := endpointOf(t, destination)
		dial, connections := e.Dial, 0
		e.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
			connections++
			return dial(ctx, network, address)
		}
		var before int
		for again := true; again; { // a busy machine may be too slow for the deadline
			passed, ctx, cancel := time.After(timeout), t.Context(), context.CancelFunc(func() {})
			if whose == "context" {
				ctx, cancel = context.WithTimeout(ctx, timeout)
			}
			again = e.Deliver(ctx, order(), nil).Reason != policy.ReasonOK
			<-passed
			cancel()
			if !again {
				before = connections
				v := exchange(t, e)
				again = v.Reason == policy.ReasonTimeout
				if !again && (v.Outcome != policy.Delivered || connections != before) {
					t.Errorf("of the %s: %d more connections, %+v", whose, connections-before, v)
				}
			}
		}
	}
}

// Where no descriptor is left, a request that cannot be sent directly has that of an idle
// connection, and does not wait until it ends.
func TestIdleConnectionMakesRoom(t *testing.T) {
	t.Parallel()
	e := endpointAt(t, relaytest.NewReceiver(t, nil).URL)
	dial, open := e.Dial, net.Conn(nil)
	e.Dial = func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		if open != nil && open.SetDeadline(time.Time{}) == nil { // not closed
			return nil, &net.OpError{Op: "dial", Net: network, Err: &net.DNSError{Err: os.NewSyscallError("socket", syscall.EMFILE).Error()}}
		}
		open, err = dial(ctx, network, address)
		return open, err
	}
	testkit.Equal(t, "a small one", exchange(t, e).Outcome, policy.Delivered)
	large := exchangePayload(t, e, `"`+strings.Repeat("x", 100_000)+`"`)
	testkit.Equal(t, "a large one", large.Outcome, policy.Delivered)
}

// A request that is stopped, or too late, before anything was sent is not sent any more, and says
// so: the receiver's kept connections are not at fault.
func TestRequestThatEndsBeforeItIsSent(t *testing.T) {
	t.Parallel()
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancelLate := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	t.Cleanup(cancelLate)
	for name, c := range map[string]struct {
		ctx  context.Context
		want policy.Reason
	}{
		"stopped": {canceled, policy.ReasonShutdown},
		"late":    {late, policy.ReasonTimeout},
	} {
		for way, payload := range payloads {
			t.Run(name+", "+way, func(t *testing.T) {
				t.Parallel()
				const idle = 4
				rc := relaytest.NewReceiver(t, meeting(idle))
				e := endpointAt(t, rc.URL)
				connect(t, e, idle, payload)
				m := order()
				m.Payload = []byte(payload)
				for range 20 {
					if v := e.Deliver(c.ctx, m, nil); v.Reason != c.want {
						t.Fatalf("%+v", v)
					}
				}
				if n := rc.Total(); n != idle {
					t.Errorf("%d requests were sent", n-idle)
				}
			})
		}
	}
}

// A haltingConn takes ten bytes of its first request, and the connection stays open.
type haltingConn struct {
	net.Conn
	halted atomic.Bool
}

func (c *haltingConn) SyscallConn() (syscall.RawConn, error) {
	return c.Conn.(syscall.Conn).SyscallConn()
}

func (c *haltingConn) Write(b []byte) (int, error) {
	if c.halted.Swap(true) {
		return c.Conn.Write(b)
	}
	n, _ := c.Conn.Write(b[:10])
	return n, &net.OpError{Op: "write", Net: "tcp", Err: syscall.ENOBUFS}
}

// What follows half a request on its connection is the rest of it to the receiver, even if that has
// answered already.
func TestConnectionOfHalfARequestIsClosed(t *testing.T) {
	t.Parallel()
	s := relaytest.NewRawServer(t, func(_ *relaytest.RawServer, conn net.Conn) {
		if _, err := io.ReadFull(conn, make([]byte, 10)); err != nil {
			return
		}
		_, _ = conn.Write([]byte("HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"))
		_, _ = conn.Read(make([]byte, 1))
	})
	e := endpointAt(t, s.URL)
	var connections atomic.Int64
	dial := e.Dial
	e.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		connections.Add(1)
		conn, err := dial(ctx, network, address)
		return &haltingConn{Conn: conn}, err
	}
	for range 2 {
		if v := exchange(t, e); v.Reason != policy.ReasonUnavailable {
			t.Errorf("%+v", v)
		}
	}
	testkit.Equal(t, "connections for two halves", connections.Load(), 2)
}

// A receiver may say as often as it likes that it is still at work, within the limit of headers.
func TestInterimAnswers(t *testing.T) {
	t.Parallel()
	s := relaytest.NewRawServer(t, func(_ *relaytest.RawServer, conn net.Conn) {
		in := bufio.NewReader(conn)
		for {
			r, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			_, _ = io.Copy(io.Discard, r.Body)
			_, _ = io.WriteString(conn, strings.Repeat("HTTP/1.1 102 Processing\r\n\r\n", 60)+"HTTP/1.1 204 No Content\r\n\r\n")
		}
	})
	e := endpointAt(t, s.URL)
	for way, payload := range payloads {
		if v := exchangePayload(t, e, payload); v.Outcome != policy.Delivered {
			t.Errorf("%s: %+v", way, v)
		}
	}
}

// A kept connection takes a request in parts when its buffer is full, and the receiver sees the
// whole of it, once.
func TestRequestLargerThanTheConnectionsBuffer(t *testing.T) {
	t.Parallel()
	rc := relaytest.NewReceiver(t, nil)
	e := endpointAt(t, rc.URL)
	dial := e.Dial
	var connections atomic.Int64
	e.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		connections.Add(1)
		conn, err := dial(ctx, network, address)
		if tcp, ok := conn.(*net.TCPConn); ok {
			relaytest.Must(t, tcp.SetWriteBuffer(1))
		}
		return conn, err
	}
	payload := `"` + strings.Repeat("x", 32<<10-2) + `"`
	const requests = 5
	for range requests {
		if v := exchangePayload(t, e, payload); v.Outcome != policy.Delivered {
			t.Fatalf("%+v", v)
		}
	}
	if n := rc.Total(); n != requests || connections.Load() != 1 {
		t.Errorf("%d requests arrived over %d connections", n, connections.Load())
	}
	for _, r := range rc.All() {
		if string(r.Body) != payload {
			t.Errorf("%d bytes arrived", len(r.Body))
		}
	}
}
