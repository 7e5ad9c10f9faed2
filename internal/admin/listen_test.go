package admin

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/rs/zerolog"
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
	if err != nil {
		t.Fatal(err)
	}
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
	if err != nil {
		t.Fatal(err)
	}
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
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	var log bytes.Buffer
	cfg := Listener{Setting: "metrics.listen", Address: first.Address(), Log: zerolog.New(&log)}
	second, err := Listen(t.Context(), cfg)
	if second != nil || err != nil {
		t.Errorf("a default address that is taken: %v, %v", second, err)
	}
	second.Run(t.Context(), nil) // a server that is off does nothing
	for _, part := range []string{`"level":"warn"`, "metrics.listen", first.Address(), "address already in use", "set the setting or its variable to another address, or to off", "OUTBOX_METRICS_LISTEN"} {
		if !strings.Contains(log.String(), part) {
			t.Errorf("the warning lacks %q: %s", part, &log)
		}
	}
	cfg.Configured = true
	want := "metrics.listen: cannot listen on " + first.Address() + ": listen: address already in use; set it to a free address, or to off"
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
	if s.Address() != "" {
		t.Error(s.Address())
	}
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

// Who only connects takes a bounded share of the relay, and gives it back.
func TestConnectionsAreBounded(t *testing.T) {
	t.Parallel()
	ctx, stop := context.WithCancel(t.Context())
	s, err := Listen(ctx, Listener{Setting: "metrics.listen", Address: "127.0.0.1:0", Configured: true})
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	running.Go(func() { s.Run(ctx, http.NotFoundHandler()) })
	defer running.Wait()
	defer stop()
	// ask reports whether a new connection is served, and leaves it open.
	ask := func() (net.Conn, bool) {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", s.Address())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
		n, _ := conn.Read(make([]byte, 1))
		return conn, n == 1
	}
	var open []net.Conn
	for i := range maxConnections {
		conn, served := ask()
		defer conn.Close()
		if !served {
			t.Fatalf("connection %d was closed", i)
		}
		open = append(open, conn)
	}
	if conn, served := ask(); served {
		_ = conn.Close()
		t.Error("there is no bound")
	}
	_ = open[0].Close()
	for served := false; !served; { // once the server has seen it
		var conn net.Conn
		conn, served = ask()
		_ = conn.Close()
	}
}
