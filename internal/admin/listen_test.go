package admin

import (
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func client(t *testing.T) *http.Client {
	t.Helper()
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func TestServerServesUntilItsContextEnds(t *testing.T) {
	t.Parallel()
	ctx, stop := context.WithCancel(t.Context())
	s, err := Listen(ctx, Listener{Setting: "metrics.listen", Address: "127.0.0.1:0", Configured: true})
	testkit.Must(t, err)
	streaming := make(chan struct{})
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/stream" {
			w.(http.Flusher).Flush()
			close(streaming)
			<-r.Context().Done()
		}
		_, _ = io.WriteString(w, "end")
	})
	var running sync.WaitGroup
	running.Go(func() { s.Run(ctx, handler) })
	c := client(t)
	response, err := c.Get("http://" + s.Address() + "/stream")
	testkit.Must(t, err)
	<-streaming
	stop()
	body, err := io.ReadAll(response.Body)
	_ = response.Body.Close()
	if string(body) != "end" || err != nil {
		t.Errorf("a stream ended with %q, %v", body, err)
	}
	running.Wait()
	if response, err := c.Get("http://" + s.Address()); err == nil {
		_ = response.Body.Close()
		t.Error("it serves after its context ended")
	}
}

func TestAddressThatIsTaken(t *testing.T) {
	t.Parallel()
	first, err := Listen(t.Context(), Listener{Setting: "metrics.listen", Address: "127.0.0.1:0", Configured: true})
	testkit.Must(t, err)
	defer first.Close()
	var log bytes.Buffer
	cfg := Listener{Setting: "metrics.listen", Address: first.Address(), Log: zerolog.New(&log)}
	second, err := Listen(t.Context(), cfg)
	if second != nil || err != nil {
		t.Errorf("a default address that is taken: %v, %v", second, err)
	}
	second.Run(t.Context(), nil) // a server that is off does nothing
	for _, part := range []string{`"level":"warn"`, "metrics.listen", first.Address(), "address already in use", "set the setting or its variable to another address, or to none", "OUTBOX_METRICS_LISTEN"} {
		if !strings.Contains(log.String(), part) {
			t.Errorf("the warning lacks %q: %s", part, &log)
		}
	}
	cfg.Configured = true
	want := "metrics.listen: cannot listen on " + first.Address() + ": listen: address already in use; set it to a free address, or to none"
	if _, err = Listen(t.Context(), cfg); err == nil || strings.Replace(err.Error(), ": bind: ", ": listen: ", 1) != want {
		t.Errorf("a chosen address that is taken: %v, want %s", err, want)
	}
}

func TestEmptyAddressIsOff(t *testing.T) {
	t.Parallel()
	s, err := Listen(t.Context(), Listener{Setting: "metrics.listen", Configured: true})
	if s != nil || err != nil {
		t.Errorf("%v, %v", s, err)
	}
	s.Close()
	testkit.Equal(t, "found", s.Address(), "")
}

func TestIsLoopback(t *testing.T) {
	t.Parallel()
	for address, want := range map[string]bool{
		"127.0.0.1:9464": true, "localhost:9464": true, "[::1]:9464": true, "127.8.8.8:1": true,
		":9464": false, "0.0.0.0:9464": false, "[::]:9464": false, "10.0.0.1:9464": false, "relay.internal:9464": false, "127.0.0.1": false,
	} {
		if got := IsLoopback(address); got != want {
			t.Errorf("%s: %v", address, got)
		}
	}
}

// Whoever connects, with or without a request, and whether it ends or not, takes a bounded share of
// the server and keeps nobody else from being served.
func TestConnectionsAreBounded(t *testing.T) {
	t.Parallel()
	for name, held := range map[string]string{
		"silent": "", "idle": "GET / HTTP/1.1\r\nHost: a\r\n\r\n", "half a request": "GET / HTTP/1.1\r\nHost: a\r\n", "half a body": "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nx",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, stop := context.WithCancel(t.Context())
			s, err := Listen(ctx, Listener{Setting: "metrics.listen", Address: "127.0.0.1:0", Configured: true})
			testkit.Must(t, err)
			var running sync.WaitGroup
			running.Go(func() {
				s.Run(ctx, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) }))
			})
			defer running.Wait()
			defer stop()
			dial := func(send string) net.Conn {
				conn, err := new(net.Dialer).DialContext(ctx, "tcp", s.Address())
				testkit.Must(t, err)
				t.Cleanup(func() { _ = conn.Close() })
				_, _ = io.WriteString(conn, send)
				return conn
			}
			served := func(conn net.Conn) {
				if n, err := conn.Read(make([]byte, 1)); n != 1 {
					t.Fatalf("not served: %v", err)
				}
			}
			probe := dial("GET / HTTP/1.1\r\nHost: a\r\n\r\n")
			served(probe)
			var strangers []net.Conn
			for range 2 * maxConnections {
				conn := dial(held)
				if name == "idle" {
					served(conn)
				}
				strangers = append(strangers, conn)
			}
			served(dial("GET / HTTP/1.1\r\nHost: a\r\n\r\n"))
			s.listener.mu.Lock()
			defer s.listener.mu.Unlock()
			if n := len(s.listener.open); n > maxConnections {
				t.Errorf("%d connections are open", n)
			}
			for _, conn := range strangers {
				defer conn.Close() // before the server stops, which waits for them
			}
		})
	}
}

// A connection on which no request comes is closed first, and one with a request is kept while
// there are others, also under TLS.
func TestAnswersAreKept(t *testing.T) {
	t.Parallel()
	l := &boundedListener{open: map[*boundedConn]struct{}{}}
	now := time.Now()
	add := func(state http.ConnState, ago time.Duration) *boundedConn {
		conn := &boundedConn{of: l}
		l.open[conn] = struct{}{}
		l.changed(tls.Server(conn, nil), state)
		conn.since = now.Add(-ago)
		return conn
	}
	first, second, fresh := add(http.StateActive, time.Minute), add(http.StateActive, time.Second), add(http.StateNew, time.Millisecond)
	idle, silent := add(http.StateIdle, 3*time.Second), add(http.StateNew, 2*time.Second)
	for i, want := range []*boundedConn{idle, silent, first, second, fresh} {
		if got := l.leastMissed(now); got != want {
			t.Errorf("%d: another one is closed", i)
		}
		delete(l.open, want)
	}
}
