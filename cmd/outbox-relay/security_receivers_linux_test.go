package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// hostile serves each connection in a way that is meant to hurt, and returns its address.
func hostile(t *testing.T, contacted *atomic.Int64, serve func(conn net.Conn)) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var open []net.Conn
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			contacted.Add(1)
			mu.Lock()
			open = append(open, conn)
			mu.Unlock()
			serving.Go(func() {
				defer conn.Close()
				serve(conn)
			})
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		mu.Lock()
		for _, conn := range open {
			_ = conn.Close()
		}
		mu.Unlock()
		serving.Wait()
	})
	return listener.Addr().String()
}

// after reads a request, writes the answer, and repeats the chunk until the relay hangs up.
func after(answer, chunk string) func(net.Conn) {
	return func(conn net.Conn) {
		r, err := http.ReadRequest(bufio.NewReader(conn))
		if err == nil {
			_, err = io.Copy(io.Discard, r.Body)
		}
		if err == nil {
			_, err = conn.Write([]byte(answer))
		}
		if chunk == "" && err == nil {
			_, _ = io.Copy(io.Discard, conn)
		}
		for err == nil && chunk != "" {
			_, err = conn.Write([]byte(chunk))
		}
	}
}

// drip sends an answer so slowly that every wait for the next byte is short.
func drip(conn net.Conn) {
	gone := make(chan struct{})
	go func() { _, _ = io.Copy(io.Discard, conn); close(gone) }()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for _, b := range []byte("HTTP/1.1 200 OK\r\n" + strings.Repeat("X: y\r\n", 100_000)) {
		select {
		case <-ticker.C:
			_, _ = conn.Write([]byte{b})
		case <-gone:
			return
		}
	}
}

// Eighteen receivers at once do their worst with all the requests that they get. The deliveries to one that is healthy go
// on all the same, no redirect is followed, and the relay's memory stays small.
func TestSecurityHostileReceivers(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	var trapped atomic.Int64
	trap := hostile(t, &trapped, after("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", ""))
	_, trapPort, _ := net.SplitHostPort(trap)
	var bomb bytes.Buffer
	writer := gzip.NewWriter(&bomb)
	for range 64 {
		_, _ = writer.Write(make([]byte, 1<<20))
	}
	_ = writer.Close()
	large := strings.Repeat("x", 64<<10)
	to := func(url string) func(net.Conn) {
		return after("HTTP/1.1 307 Temporary Redirect\r\nLocation: "+url+"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", "")
	}
	servers := map[string]func(net.Conn){
		"endless-header":   after("HTTP/1.1 200 OK\r\nX: ", large),
		"endless-headers":  after("HTTP/1.1 200 OK\r\n", strings.Repeat("Set-Cookie: a=b\r\n", 1000)),
		"endless-status":   after("HTTP/1.1 200 ", large),
		"endless-body":     after("HTTP/1.1 200 OK\r\n\r\n", large),
		"endless-refusal":  after("HTTP/1.1 500 No\r\nContent-Type: application/problem+json\r\n\r\n{\"detail\":\"", large),
		"endless-trailers": after("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", strings.Repeat("X: y\r\n", 1000)),
		"interim-flood":    after("", strings.Repeat("HTTP/1.1 103 Early Hints\r\nLink: </style.css>; rel=preload\r\n\r\n", 1000)),
		"chunk-bomb":       after("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7fffffffffffffff\r\n", large),
		"chunk-extensions": after("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "1;"+strings.Repeat("x", 4000)+"\r\nx\r\n"),
		"gzip-bomb":        after("HTTP/1.1 500 No\r\nContent-Encoding: gzip\r\nContent-Length: "+strconv.Itoa(bomb.Len())+"\r\n\r\n"+bomb.String(), ""),
		"switch":           after("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n", large),
		"redirect":         to("http://" + trap + "/"),
		"redirect-any":     to("http://0.0.0.0:" + trapPort + "/latest/meta-data"),
		"silence":          after("", ""),
		"deaf":             func(conn net.Conn) { <-t.Context().Done() }, // reads nothing
		"drip":             drip,
		"half-closed": func(conn net.Conn) {
			_ = conn.(*net.TCPConn).CloseWrite()
			_, _ = io.Copy(io.Discard, conn)
		},
		"tls-garbage": func(conn net.Conn) {
			_, _ = conn.Read(make([]byte, 1))
			for _, err := conn.Write([]byte("\x16\x03\x03\xff\xff")); err == nil; {
				_, err = conn.Write([]byte(large))
			}
		},
	}
	var delivered atomic.Int64
	healthy := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { delivered.Add(1) }))
	defer healthy.Close()

	dsn := pgtest.New(t, migrations.Outbox)
	db := open(t, dsn)
	contacts := map[string]*atomic.Int64{}
	file := "defaults: {timeout: 3s}\ndestinations:\n  healthy: {url: '" + healthy.URL + "'}\n"
	routes := "routes:\n- {event: healthy, to: [healthy]}\n"
	for name, serve := range servers {
		contacts[name] = &atomic.Int64{}
		scheme := "http"
		if name == "tls-garbage" {
			scheme = "https"
		}
		file += fmt.Sprintf("  %s: {url: '%s://%s/'}\n", name, scheme, hostile(t, contacts[name], serve))
		routes += fmt.Sprintf("- {event: %s, to: [%s]}\n", name, name)
	}
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, usualFile), file+routes)
	relay := launch(t, dir, "OUTBOX_DATABASE_URL="+dsn)
	const events = 200
	insert := fmt.Sprintf("INSERT INTO outbox (event_type, payload, idempotency_key) SELECT $1, to_json(repeat('x', 10000)), $1 || $2 || i FROM generate_series(1, %d) i", events)
	for name := range contacts {
		execute(t, db, insert, name, "-")
	}
	for round := range int64(2) { // the second while all of them are at it
		execute(t, db, insert, "healthy", strconv.FormatInt(round, 10)+"-")
		awaitUntil(t, "the healthy receiver's events", func() bool { return delivered.Load() >= (round+1)*events })
		for name, n := range contacts {
			awaitUntil(t, "a request to "+name, func() bool { return n.Load() > 0 })
		}
	}
	peak := peakOf(t, strconv.Itoa(relay.program.Process.Pid)) >> 20
	t.Logf("peak of the relay's memory: %d MiB", peak)
	if peak > 768 { // 53, but the race detector needs six times as much
		t.Errorf("the relay took %d MiB", peak)
	}
	if trapped.Load() > 0 {
		t.Errorf("%d redirects were followed", trapped.Load())
	}
	if n := query[int](t, db, `SELECT coalesce(max(octet_length(error)), 0) FROM outbox_attempt`); n > 4<<10 {
		t.Errorf("an error of %d bytes is stored", n)
	}
	relay.stop(t)
}
