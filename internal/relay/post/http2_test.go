package post_test

import (
	"bufio"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// Frames of HTTP/2 (RFC 9113), as far as the tests speak it.
const (
	frameData, frameHeaders, frameReset, frameSettings, framePing, frameGoAway = 0, 1, 3, 4, 6, 7

	flagEndStream, flagAck, flagEndHeaders = 1, 1, 4
)

type frame struct {
	kind, flags byte
	stream      uint32
	payload     []byte
}

// An h2Conn is a server's end of a connection.
type h2Conn struct {
	net.Conn
	in *bufio.Reader
}

func (c h2Conn) read() (f frame, err error) {
	var header [9]byte
	if _, err := io.ReadFull(c.in, header[:]); err != nil {
		return f, err
	}
	f = frame{kind: header[3], flags: header[4], stream: binary.BigEndian.Uint32(header[5:])}
	f.payload = make([]byte, int(header[0])<<16|int(header[1])<<8|int(header[2]))
	_, err = io.ReadFull(c.in, f.payload)
	return f, err
}

func (c h2Conn) write(f frame) {
	n := len(f.payload)
	header := append([]byte{byte(n >> 16), byte(n >> 8), byte(n), f.kind, f.flags}, binary.BigEndian.AppendUint32(nil, f.stream)...)
	_, _ = c.Write(append(header, f.payload...))
}

// accept answers a stream with 204, an entry of HPACK's static table.
func (c h2Conn) accept(stream uint32) {
	c.write(frame{kind: frameHeaders, flags: flagEndStream | flagEndHeaders, stream: stream, payload: []byte{0x89}})
}

func (c h2Conn) goAway(last uint32) {
	c.write(frame{kind: frameGoAway, payload: binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, last), 0)})
}

func (c h2Conn) refuse(stream uint32) {
	const refusedStream = 7
	c.write(frame{kind: frameReset, stream: stream, payload: binary.BigEndian.AppendUint32(nil, refusedStream)})
}

// processed waits until the client has read all that was written, and ends the connection: a client
// that has not read yet that it is told to go away may send another request.
func (c h2Conn) processed() bool {
	c.write(frame{kind: framePing, payload: make([]byte, 8)})
	for {
		if f, err := c.read(); err != nil || f.kind == framePing && f.flags&flagAck != 0 {
			return false
		}
	}
}

// newH2Server starts a server that hands every whole request to answer, with the numbers of the
// connection and of the request, from 1; false ends the connection.
func newH2Server(t testing.TB, ca *authority, answer func(c h2Conn, connection, request int64, stream uint32) bool) *relaytest.RawServer {
	t.Helper()
	certificate := ca.issue(nil)
	var connections atomic.Int64
	return relaytest.NewRawServer(t, func(s *relaytest.RawServer, raw net.Conn) {
		secure := tls.Server(raw, &tls.Config{Certificates: []tls.Certificate{certificate}, NextProtos: []string{"h2"}})
		c := h2Conn{secure, bufio.NewReader(secure)}
		if _, err := io.CopyN(io.Discard, c.in, int64(len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))); err != nil {
			return
		}
		connection := connections.Add(1)
		c.write(frame{kind: frameSettings})
		for {
			f, err := c.read()
			switch {
			case err != nil:
				return
			case f.kind == frameSettings && f.flags&flagAck == 0:
				c.write(frame{kind: frameSettings, flags: flagAck})
			case f.kind == framePing && f.flags&flagAck == 0:
				c.write(frame{kind: framePing, flags: flagAck, payload: f.payload})
			case (f.kind == frameHeaders || f.kind == frameData) && f.flags&flagEndStream != 0:
				if !answer(c, connection, s.Requests.Add(1), f.stream) {
					return
				}
			}
		}
	})
}

// Whatever a server makes of its streams, an attempt is never two requests that it accepted, and
// never two on the wire.
func TestHTTP2ServersThatTurnAway(t *testing.T) {
	t.Parallel()
	ca := newAuthority()
	for name, c := range map[string]struct {
		// second answers the second request; every other one is accepted.
		second func(c h2Conn, stream uint32) bool
		want   policy.Reason
	}{
		"accepts":                           {func(c h2Conn, stream uint32) bool { c.accept(stream); return true }, policy.ReasonOK},
		"refuses the stream":                {func(c h2Conn, stream uint32) bool { c.refuse(stream); return true }, policy.ReasonNetwork},
		"goes away before the stream":       {func(c h2Conn, stream uint32) bool { c.goAway(stream - 2); return true }, policy.ReasonNetwork},
		"goes away before it, and hangs up": {func(c h2Conn, stream uint32) bool { c.goAway(stream - 2); return false }, policy.ReasonNetwork},
		"goes away and accepts":             {func(c h2Conn, stream uint32) bool { c.goAway(stream); c.accept(stream); return true }, policy.ReasonOK},
		"accepts and goes away":             {func(c h2Conn, stream uint32) bool { c.accept(stream); c.goAway(stream); return c.processed() }, policy.ReasonOK},
		"accepts, then resets":              {func(c h2Conn, stream uint32) bool { c.accept(stream); c.refuse(stream); return true }, policy.ReasonOK},
		"hangs up":                          {func(h2Conn, uint32) bool { return false }, policy.ReasonNetwork},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			done := make(chan struct{})
			s := newH2Server(t, ca, func(conn h2Conn, _, request int64, stream uint32) bool {
				if request == 2 {
					defer close(done)
					return c.second(conn, stream)
				}
				conn.accept(stream)
				return true
			})
			e := endpointOf(t, destinationOf("https"+s.URL[len("http"):], post.Wire{TLS: ca.trusts()}, post.Egress{}))
			for attempt, want := range []policy.Reason{policy.ReasonOK, c.want, policy.ReasonOK, policy.ReasonOK} {
				v := exchange(t, e)
				t.Logf("%-34s %d %-9s %-8s %s", name, attempt+1, v.Outcome, v.Reason, v.Message)
				if v.Reason != want || !v.Posted || s.Requests.Load() != int64(attempt+1) {
					t.Errorf("attempt %d: %s %q, want %s; %d requests so far", attempt+1, v.Reason, v.Message, want, s.Requests.Load())
				}
				if attempt == 1 {
					<-done
				}
			}
		})
	}
}

// A server that allows few streams at a time, as many as it gets or too few: what it refuses is
// attempted again later, and no event arrives twice.
func TestHTTP2WithFewStreams(t *testing.T) {
	t.Parallel()
	ca := newAuthority()
	for _, c := range []struct{ streams, senders, attempts, refused int }{{1, 1, 200, 0}, {32, 32, 2000, 0}, {1, 32, 400, 400}} {
		t.Run(fmt.Sprintf("%d for %d", c.streams, c.senders), func(t *testing.T) {
			if c.senders > 1 {
				testsize.Long(t)
			}
			t.Parallel()
			var connections, other atomic.Int64
			seen := make([]atomic.Int64, c.attempts+1)
			s := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				id, err := strconv.Atoi(r.Header.Get(webhook.EventID))
				body, _ := io.ReadAll(r.Body)
				if err != nil || r.ProtoMajor != 2 || string(body) != `{"a":1e3}` {
					other.Add(1)
					return
				}
				seen[id].Add(1)
			}))
			s.Config.ErrorLog = log.New(io.Discard, "", 0)
			s.Config.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: c.streams}
			s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
				if state == http.StateNew {
					connections.Add(1)
				}
			}
			s.EnableHTTP2 = true
			s.TLS = &tls.Config{Certificates: []tls.Certificate{ca.issue(nil)}}
			s.StartTLS()
			t.Cleanup(s.Close)
			e := endpointOf(t, destinationOf(s.URL, post.Wire{TLS: ca.trusts()}, post.Egress{}))
			reasons := map[policy.Reason]int{}
			for id, v := range exchangeMany(t, e, c.senders, c.attempts) {
				if n := seen[id].Load(); n > 1 || (v.Outcome == policy.Delivered) != (n == 1) || !v.Posted {
					t.Errorf("event %d arrived %d times: %+v", id, n, v)
				}
				reasons[v.Reason]++
				if v.Reason != policy.ReasonOK && v.Reason != policy.ReasonNetwork {
					t.Errorf("%s %q", v.Reason, v.Message)
				}
			}
			t.Logf("%d streams, %d senders, %d attempts over %d connections: %v", c.streams, c.senders, c.attempts, connections.Load(), reasons)
			if other.Load() > 0 || reasons[policy.ReasonOK] == 0 || reasons[policy.ReasonNetwork] > c.refused {
				t.Errorf("%v", reasons)
			}
		})
	}
}
