package post_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// Connections are kept: a dial for every POST would cost more than the POST.
func TestConnectionsAreUsedAgain(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const attempts, senders = 10_000, 32
	var connections, requests atomic.Int64
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = fmt.Fprint(w, "ok") // a body that is not read would cost the connection
	}))
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			connections.Add(1)
		}
	}
	s.Start()
	t.Cleanup(s.Close)
	d := destinationOf(s.URL, post.Wire{}, post.Egress{})
	d.MaxInFlight = senders
	e := endpointOf(t, d)
	for id, v := range exchangeMany(t, e, senders, attempts) {
		if v.Outcome != policy.Delivered {
			t.Fatalf("event %d: %s %q", id, v.Reason, v.Message)
		}
	}
	t.Logf("%d requests over %d connections", requests.Load(), connections.Load())
	if requests.Load() != attempts || connections.Load() > 2*senders {
		t.Errorf("%d requests over %d connections", requests.Load(), connections.Load())
	}
}

// A stubbornConn works until it is gone. From then on it hides from its reader that the peer
// closed, and takes only so many bytes more: the moment between a receiver's closing and the
// relay's noticing it.
type stubbornConn struct {
	net.Conn
	gone   atomic.Bool
	takes  int
	closed chan struct{}
	close  func()
}

func (c *stubbornConn) SyscallConn() (syscall.RawConn, error) {
	return c.Conn.(syscall.Conn).SyscallConn()
}

func (c *stubbornConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if errors.Is(err, io.EOF) && c.gone.Load() {
		<-c.closed
	}
	return n, err
}

func (c *stubbornConn) Write(b []byte) (int, error) {
	if c.gone.Load() {
		return min(c.takes, len(b)), &net.OpError{Op: "write", Net: "tcp", Err: syscall.EPIPE}
	}
	return c.Conn.Write(b)
}

func (c *stubbornConn) Close() error {
	c.close()
	return c.Conn.Close()
}

// A kept connection that the receiver has closed costs an attempt, unless it is certain that
// nothing was sent.
func TestKeptConnectionThatIsClosed(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		stale int // kept connections that are closed; 0: the first use of a new one fails
		takes int // bytes of what is written to a closed connection
		want  policy.Outcome
	}{
		"nothing was sent":                   {stale: 1, want: policy.Delivered},
		"nothing was sent, twice":            {stale: 2, want: policy.Delivered},
		"nothing was sent, time and again":   {stale: 3, want: policy.Hold},
		"one byte was sent":                  {stale: 1, takes: 1, want: policy.Retry},
		"all of it was sent":                 {stale: 1, takes: 1 << 20, want: policy.Retry},
		"nothing was sent, on the first use": {want: policy.Retry},
	} {
		for way, payload := range payloads {
			t.Run(name+", "+way, func(t *testing.T) {
				t.Parallel()
				rc := relaytest.NewReceiver(t, meeting(int64(c.stale)))
				e := endpointAt(t, rc.URL)
				var mu sync.Mutex
				var dialled []*stubbornConn
				e.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
					conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
					closed := make(chan struct{})
					stubborn := &stubbornConn{Conn: conn, takes: c.takes, closed: closed, close: sync.OnceFunc(func() { close(closed) })}
					mu.Lock()
					defer mu.Unlock()
					stubborn.gone.Store(c.stale == 0 && len(dialled) == 0)
					dialled = append(dialled, stubborn)
					return stubborn, err
				}
				connect(t, e, c.stale, payload)
				before := rc.Total()
				for _, conn := range dialled {
					conn.gone.Store(true)
				}
				v := exchangePayload(t, e, payload)
				if v.Outcome != c.want || v.Posted != (c.want != policy.Hold) || v.Outcome != policy.Delivered && v.Reason != policy.ReasonNetwork {
					t.Errorf("%+v", v)
				}
				arrived := rc.All()[before:]
				if len(arrived) > 0 != (c.want == policy.Delivered) || len(arrived) > 0 && string(arrived[0].Body) != payload {
					t.Errorf("arrived: %+v", arrived)
				}
				if v := exchangePayload(t, e, payload); v.Outcome != policy.Delivered {
					t.Errorf("the next attempt: %+v", v)
				}
			})
		}
	}
}

// A request of usual size is one write: header and body in one packet.
func TestRequestIsOneWrite(t *testing.T) {
	t.Parallel()
	const requests = 5
	rc := relaytest.NewReceiver(t, nil)
	e := endpointAt(t, rc.URL)
	var writes atomic.Int64
	dial := e.Dial
	e.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		return writeCounter{conn, &writes}, err
	}
	for range requests {
		if v := exchange(t, e); v.Outcome != policy.Delivered {
			t.Fatalf("%+v", v)
		}
	}
	if n := writes.Load(); n != requests {
		t.Errorf("%d writes for %d requests", n, requests)
	}
	for _, r := range rc.All() {
		if string(r.Body) != string(order().Payload) {
			t.Errorf("the body is %q", r.Body)
		}
	}
}

type writeCounter struct {
	net.Conn
	writes *atomic.Int64
}

func (c writeCounter) SyscallConn() (syscall.RawConn, error) {
	return c.Conn.(syscall.Conn).SyscallConn()
}

func (c writeCounter) Write(b []byte) (int, error) {
	c.writes.Add(1)
	return c.Conn.Write(b)
}

// A receiver that closes its connections whenever it has answered, without a word: whatever the
// race between its closing and the next request comes to, no attempt is two requests, and one that
// is held was none.
func TestReceiverThatClosesIdleConnections(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const attempts, senders = 3000, 16
	var mu sync.Mutex
	seen := map[string]int{} // by event id
	s := relaytest.NewRawServer(t, func(_ *relaytest.RawServer, conn net.Conn) {
		in := bufio.NewReader(conn)
		r, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		mu.Lock()
		seen[r.Header.Get(webhook.EventID)]++
		mu.Unlock()
		_, _ = fmt.Fprint(conn, "HTTP/1.1 204 No Content\r\n\r\n")
	})
	e := endpointAt(t, s.URL)
	count := map[string]int{}
	for id, v := range exchangeMany(t, e, senders, attempts) {
		n := seen[fmt.Sprint(id)]
		if n > 1 || v.Outcome == policy.Hold && n != 0 || v.Outcome == policy.Delivered && n != 1 || (v.Outcome == policy.Hold) == v.Posted {
			t.Errorf("event %d arrived %d times: %+v", id, n, v)
		}
		count[string(v.Outcome)+" "+string(v.Reason)]++
	}
	t.Logf("%d attempts: %v", attempts, count)
}

// net/http gives a connection back before it hands over the answer that came on it. Closed in
// between, it takes the answer along, and the event is sent again.
func TestRetiredEndpointLosesNoAnswer(t *testing.T) {
	t.Parallel()
	rc := relaytest.NewReceiver(t, nil)
	for range 20 {
		e := endpointAt(t, rc.URL)
		ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{PutIdleConn: func(error) {
			e.Retire()
			for range 1000 {
				runtime.Gosched()
			}
		}})
		m := order()
		m.Payload = []byte(payloads["by net/http"])
		if v := first(e.Deliver(ctx, m, nil), e.Destination.Responses); v.Outcome != policy.Delivered {
			t.Errorf("%+v", v)
		}
	}
}
