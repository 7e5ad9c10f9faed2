package post_test

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A receiver for each way of answering badly: each gets one request, and the outcome follows the
// published table.
func TestSecurityMisbehavingReceivers(t *testing.T) {
	t.Parallel()
	const ok = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
	text := func(answer string) func(*relaytest.RawServer, net.Conn) {
		return func(s *relaytest.RawServer, conn net.Conn) {
			if s.Read(conn) == nil {
				_, _ = conn.Write([]byte(answer))
			}
		}
	}
	// forever writes the answer and then the chunk until the relay hangs up.
	forever := func(answer, chunk string) func(*relaytest.RawServer, net.Conn) {
		return func(s *relaytest.RawServer, conn net.Conn) {
			if s.Read(conn) != nil {
				return
			}
			_, err := conn.Write([]byte(answer))
			for err == nil {
				_, err = conn.Write([]byte(chunk))
			}
		}
	}
	// hang writes the answer and then nothing, until the relay hangs up.
	hang := func(answer string) func(*relaytest.RawServer, net.Conn) {
		return func(s *relaytest.RawServer, conn net.Conn) {
			if s.Read(conn) == nil {
				_, _ = conn.Write([]byte(answer))
				_, _ = conn.Read(make([]byte, 1))
			}
		}
	}
	cases := map[string]struct {
		serve   func(*relaytest.RawServer, net.Conn)
		outcome policy.Outcome
		reason  policy.Reason
		status  int
	}{
		"status-000":          {text("HTTP/1.1 000 Zero\r\nContent-Length: 0\r\n\r\n"), policy.Retry, policy.ReasonUnexpected, 0},
		"status-099":          {text("HTTP/1.1 099 Low\r\nContent-Length: 0\r\n\r\n"), policy.Retry, policy.ReasonUnexpected, 99},
		"status-99":           {text("HTTP/1.1 99 Short\r\nContent-Length: 0\r\n\r\n"), policy.Retry, policy.ReasonMalformed, 0},
		"status-1000":         {text("HTTP/1.1 1000 Long\r\nContent-Length: 0\r\n\r\n"), policy.Retry, policy.ReasonMalformed, 0},
		"status-999":          {text("HTTP/1.1 999 High\r\nContent-Length: 0\r\n\r\n"), policy.Retry, policy.ReasonUnexpected, 999},
		"status-negative":     {text("HTTP/1.1 -20 Minus\r\nContent-Length: 0\r\n\r\n"), policy.Retry, policy.ReasonMalformed, 0},
		"status-word":         {text("HTTP/1.1 abc Word\r\n\r\n"), policy.Retry, policy.ReasonMalformed, 0},
		"version-unknown":     {text("HTTP/9.9 200 OK\r\nContent-Length: 0\r\n\r\n"), policy.Delivered, policy.ReasonOK, 200},
		"version-broken":      {text("HTTP/1 200 OK\r\n\r\n"), policy.Retry, policy.ReasonMalformed, 0},
		"banner":              {text("SSH-2.0-OpenSSH_9.2\r\n"), policy.Retry, policy.ReasonMalformed, 0},
		"no-crlf":             {text("HTTP/1.1 200 OK"), policy.Retry, policy.ReasonNetwork, 0},
		"no-end-of-headers":   {text("HTTP/1.1 200 OK\r\nX: y\r\n"), policy.Retry, policy.ReasonNetwork, 0},
		"half-a-status":       {text("HTTP/1.1 20"), policy.Retry, policy.ReasonMalformed, 0},
		"bare-lf":             {text("HTTP/1.1 200 OK\nContent-Length: 0\n\n"), policy.Delivered, policy.ReasonOK, 200},
		"header-no-colon":     {text("HTTP/1.1 200 OK\r\nBroken\r\n\r\n"), policy.Retry, policy.ReasonMalformed, 0},
		"header-folded":       {text("HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 0\r\n\r\n"), policy.Delivered, policy.ReasonOK, 200},
		"two-lengths":         {text("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"), policy.Retry, policy.ReasonMalformed, 0},
		"length-and-chunked":  {text("HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), policy.Delivered, policy.ReasonOK, 200},
		"length-negative":     {text("HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"), policy.Retry, policy.ReasonMalformed, 0},
		"length-word":         {text("HTTP/1.1 500 No\r\nContent-Length: many\r\n\r\n"), policy.Retry, policy.ReasonMalformed, 0},
		"encoding-unknown":    {text("HTTP/1.1 200 OK\r\nTransfer-Encoding: cooked\r\n\r\n"), policy.Retry, policy.ReasonMalformed, 0},
		"204-with-body":       {text("HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nhello"), policy.Delivered, policy.ReasonOK, 204},
		"205":                 {text("HTTP/1.1 205 Reset\r\nContent-Length: 0\r\n\r\n"), policy.Delivered, policy.ReasonOK, 205},
		"206":                 {text("HTTP/1.1 206 Partial\r\nContent-Length: 0\r\n\r\n"), policy.Delivered, policy.ReasonOK, 206},
		"299":                 {text("HTTP/1.1 299 Fine\r\nContent-Length: 0\r\n\r\n"), policy.Delivered, policy.ReasonOK, 299},
		"truncated-200":       {text("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}"), policy.Delivered, policy.ReasonOK, 200},
		"truncated-500":       {text("HTTP/1.1 500 No\r\nContent-Length: 100\r\n\r\nbecause"), policy.Retry, policy.ReasonServerError, 500},
		"error-in-200":        {text("HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{\"error\":true}"), policy.Delivered, policy.ReasonOK, 200},
		"junk-gzip":           {text("HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\njunk"), policy.Delivered, policy.ReasonOK, 200},
		"broken-chunk":        {text("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"), policy.Delivered, policy.ReasonOK, 200},
		"unprintable-refusal": {text("HTTP/1.1 422 No\r\n\r\n\x00\xff\x1b[31m\u202e"), policy.Fail, policy.ReasonRejected, 422},
		"101":                 {hang("HTTP/1.1 101 Switching Protocols\r\n\r\n"), policy.Retry, policy.ReasonUnexpected, 101},
		"101-upgrade":         {hang("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"), policy.Retry, policy.ReasonUnexpected, 101},
		"100-then-200":        {text("HTTP/1.1 100 Continue\r\n\r\n" + ok), policy.Delivered, policy.ReasonOK, 200},
		"1xx-only":            {text("HTTP/1.1 103 Early Hints\r\n\r\n"), policy.Retry, policy.ReasonNetwork, 0},
		"1xx-flood":           {forever("", "HTTP/1.1 103 Early Hints\r\nLink: </style.css>; rel=preload\r\n\r\n"), policy.Retry, policy.ReasonMalformed, 0},
		"endless-header":      {forever("HTTP/1.1 200 OK\r\nX: ", strings.Repeat("x", 1000)), policy.Retry, policy.ReasonMalformed, 0},
		"endless-headers":     {forever("HTTP/1.1 200 OK\r\n", "Set-Cookie: a=b\r\n"), policy.Retry, policy.ReasonMalformed, 0},
		"endless-status":      {forever("HTTP/1.1 200 ", strings.Repeat("x", 1000)), policy.Retry, policy.ReasonMalformed, 0},
		"endless-chunks":      {forever("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "3e8\r\n"+strings.Repeat("x", 1000)+"\r\n"), policy.Delivered, policy.ReasonOK, 200},
		"endless-refusal":     {forever("HTTP/1.1 400 No\r\n\r\n", strings.Repeat("x", 1000)), policy.Fail, policy.ReasonRejected, 400},
		"endless-trailers":    {forever("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", "X: y\r\n"), policy.Delivered, policy.ReasonOK, 200},
		"silence":             {hang(""), policy.Retry, policy.ReasonTimeout, 0},
		"silence-in-status":   {hang("HTTP/1.1 2"), policy.Retry, policy.ReasonTimeout, 0},
		"silence-in-headers":  {hang("HTTP/1.1 200 OK\r\nX"), policy.Retry, policy.ReasonTimeout, 0},
		"silence-in-body":     {hang("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nx"), policy.Delivered, policy.ReasonOK, 200},
		"silence-in-refusal":  {hang("HTTP/1.1 500 No\r\nContent-Length: 10\r\n\r\nx"), policy.Retry, policy.ReasonServerError, 500},
		"slow-loris": {func(s *relaytest.RawServer, conn net.Conn) {
			if s.Read(conn) != nil {
				return
			}
			gone := make(chan struct{})
			go func() { _, _ = conn.Read(make([]byte, 1)); close(gone) }()
			ticker := time.NewTicker(10 * time.Millisecond)
			defer ticker.Stop()
			for _, b := range []byte("HTTP/1.1 200 OK\r\n" + strings.Repeat("X: y\r\n", 10_000)) {
				select {
				case <-ticker.C:
					_, _ = conn.Write([]byte{b})
				case <-gone:
					return
				}
			}
		}, policy.Retry, policy.ReasonTimeout, 0},
		"fin": {func(s *relaytest.RawServer, conn net.Conn) { _ = s.Read(conn) }, policy.Retry, policy.ReasonNetwork, 0},
		"rst": {func(s *relaytest.RawServer, conn net.Conn) {
			_ = s.Read(conn)
			relaytest.Reset(conn)
		}, policy.Retry, policy.ReasonNetwork, 0},
		"early-answer": {func(s *relaytest.RawServer, conn net.Conn) {
			if _, err := http.ReadRequest(bufio.NewReader(conn)); err != nil {
				return
			}
			s.Requests.Add(1)
			_, _ = conn.Write([]byte("HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")) // the body is still on its way
			_, _ = io.Copy(io.Discard, conn)
		}, policy.Fail, policy.ReasonRejected, 413},
	}

	large := `"` + strings.Repeat("x", 1<<19) + `"` // more than the sockets' buffers hold
	var running sync.WaitGroup                      // all at once: some take their whole timeout
	defer running.Wait()
	for name, c := range cases {
		s := relaytest.NewRawServer(t, c.serve)
		d := destinationOf(s.URL, post.Wire{}, post.Egress{})
		if c.reason == policy.ReasonTimeout || strings.HasPrefix(name, "silence") || strings.HasPrefix(name, "endless-trailers") {
			d.Timeout = 3 * time.Second // in which the request and what there is of an answer arrive
		}
		payload := "{}"
		if name == "early-answer" {
			payload = large
		}
		e := endpointOf(t, d)
		running.Go(func() {
			v := exchangePayload(t, e, payload)
			if v.Outcome != c.outcome || v.Reason != c.reason || v.StatusCode != c.status || !v.Posted || len(v.Message) > plain.MaxBytes {
				t.Errorf("%s: %s %s %d %.200q, want %s %s %d", name, v.Outcome, v.Reason, v.StatusCode, v.Message, c.outcome, c.reason, c.status)
			}
			if late := "no answer within " + e.Destination.Timeout.String(); v.Reason == policy.ReasonTimeout && v.Message != late {
				t.Errorf("%s: %q, want %q", name, v.Message, late)
			}
			testkit.Equal(t, name+": requests", s.Requests.Load(), 1)
		})
	}
}
