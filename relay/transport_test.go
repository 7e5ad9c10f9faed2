package relay

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
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// exchangeMany makes attempts through one endpoint, by as many senders at once, and returns what became of each by event id.
func exchangeMany(t testing.TB, e *post.Endpoint, senders, attempts int) map[int64]policy.Decision {
	t.Helper()
	var mu sync.Mutex
	decisions := make(map[int64]policy.Decision, attempts)
	var next atomic.Int64
	var running sync.WaitGroup
	for range senders {
		running.Go(func() {
			for id := next.Add(1); id <= int64(attempts); id = next.Add(1) {
				d := order()
				d.eventID = id
				req, err := post.NewRequest(e, d.message(), time.Now())
				if err != nil {
					t.Error(err)
					return
				}
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				v := first(post.Send(ctx, e, req, d.event.Payload), e.Destination.Responses)
				cancel()
				mu.Lock()
				decisions[id] = v
				mu.Unlock()
			}
		})
	}
	running.Wait()
	return decisions
}

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
	e, err := post.NewEndpoint(d, "")
	must(t, err)
	defer e.CloseIdleConnections()
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

// A stubbornConn works until it is gone. From then on it hides from its reader that the peer closed, and takes only so
// many bytes more: the moment between a receiver's closing and the relay's noticing it.
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

// A kept connection that the receiver has closed costs an attempt, unless it is certain that nothing was sent.
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
				g := newGate(t)
				rc := newReceiver(t, func(_ http.ResponseWriter, r request) { g.pass(r) })
				exchange := func(t testing.TB, e *post.Endpoint) policy.Decision { return exchangePayload(t, e, payload) }
				e, err := post.NewEndpoint(destinationOf(rc.URL, post.Wire{}, post.Egress{}), "")
				must(t, err)
				defer e.CloseIdleConnections()
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
				var first sync.WaitGroup
				for range c.stale {
					first.Go(func() { exchange(t, e) })
				}
				for range c.stale {
					<-g.arrived
				}
				g.open()
				first.Wait()
				before := rc.total()
				for _, conn := range dialled {
					conn.gone.Store(true)
				}
				v := exchange(t, e)
				if v.Outcome != c.want || v.Posted != (c.want != policy.Hold) || v.Outcome != policy.Delivered && v.Reason != policy.ReasonNetwork {
					t.Errorf("%+v", v)
				}
				arrived := rc.all()[before:]
				if len(arrived) > 0 != (c.want == policy.Delivered) || len(arrived) > 0 && string(arrived[0].body) != payload {
					t.Errorf("arrived: %+v", arrived)
				}
				if v := exchange(t, e); v.Outcome != policy.Delivered {
					t.Errorf("the next attempt: %+v", v)
				}
			})
		}
	}
}

// payloads are sent in the two ways that requests go over plain HTTP.
var payloads = map[string]string{"directly": `{"a":1e3}`, "by net/http": `{"a":"` + strings.Repeat("x", 40<<10) + `"}`}

// A request of usual size is one write: header and body in one packet.
func TestRequestIsOneWrite(t *testing.T) {
	t.Parallel()
	const requests = 5
	rc := newReceiver(t, nil)
	e, err := post.NewEndpoint(destinationOf(rc.URL, post.Wire{}, post.Egress{}), "")
	must(t, err)
	defer e.CloseIdleConnections()
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
	for _, r := range rc.all() {
		if string(r.body) != string(order().event.Payload) {
			t.Errorf("the body is %q", r.body)
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

// A deadline that strikes before anything was sent is no closed connection.
func TestDeadlineIsNoHold(t *testing.T) {
	t.Parallel()
	rc := newReceiver(t, nil)
	e, err := post.NewEndpoint(destinationOf(rc.URL, post.Wire{}, post.Egress{}), "")
	must(t, err)
	defer e.CloseIdleConnections()
	if v := exchange(t, e); v.Outcome != policy.Delivered {
		t.Fatalf("%+v", v)
	}
	d := order()
	req, err := post.NewRequest(e, d.message(), time.Now())
	must(t, err)
	ctx, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancel()
	if v := first(post.Send(ctx, e, req, d.event.Payload), e.Destination.Responses); v.Outcome != policy.Retry || v.Reason != policy.ReasonTimeout {
		t.Errorf("%+v", v)
	}
}

// A receiver that closes its connections whenever it has answered, without a word: whatever the race between its closing
// and the next request comes to, no attempt is two requests, and one that is held was none.
func TestReceiverThatClosesIdleConnections(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const attempts, senders = 3000, 16
	var mu sync.Mutex
	seen := map[string]int{} // by event id
	s := newRawServer(t, func(conn net.Conn) {
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
	e, err := post.NewEndpoint(destinationOf(s.url, post.Wire{}, post.Egress{}), "")
	must(t, err)
	defer e.CloseIdleConnections()
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

// net/http gives a connection back before it hands over the answer that came on it. Closed in between, it takes the answer
// along, and the event is sent again.
func TestRetiredEndpointLosesNoAnswer(t *testing.T) {
	t.Parallel()
	rc := newReceiver(t, nil)
	for range 20 {
		e, err := post.NewEndpoint(to(rc.URL), "")
		must(t, err)
		d := order()
		d.event.Payload = []byte(payloads["by net/http"])
		req, err := post.NewRequest(e, d.message(), time.Now())
		must(t, err)
		ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{PutIdleConn: func(error) {
			e.Retire()
			for range 1000 {
				runtime.Gosched()
			}
		}})
		if v := first(post.Send(ctx, e, req, d.event.Payload), e.Destination.Responses); v.Outcome != policy.Delivered {
			t.Errorf("%+v", v)
		}
	}
}
