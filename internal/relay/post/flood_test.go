package post_test

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// Whatever a receiver sends, the relay reads a bounded part of it and hangs up.
func TestSecurityFloodsAreCutOff(t *testing.T) {
	t.Parallel()
	const flood = 200 << 20
	chunk := bytes.Repeat([]byte("x"), 64<<10)
	for name, c := range map[string]struct {
		head    string
		outcome policy.Outcome
		reason  policy.Reason
	}{
		"body of a 200":    {fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", flood), policy.Delivered, policy.ReasonOK},
		"body of a 500":    {fmt.Sprintf("HTTP/1.1 500 No\r\nContent-Length: %d\r\n\r\n", flood), policy.Retry, policy.ReasonServerError},
		"body to the end":  {"HTTP/1.1 400 No\r\n\r\n", policy.Fail, policy.ReasonRejected},
		"one header":       {"HTTP/1.1 200 OK\r\nX: ", policy.Retry, policy.ReasonMalformed},
		"status line":      {"HTTP/1.1 200 ", policy.Retry, policy.ReasonMalformed},
		"instead of HTTP":  {"", policy.Retry, policy.ReasonMalformed},
		"interim response": {"HTTP/1.1 103 Early Hints\r\nX: ", policy.Retry, policy.ReasonMalformed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			done := make(chan struct{})
			var failed error
			s := relaytest.NewRawServer(t, func(s *relaytest.RawServer, conn net.Conn) {
				if s.Read(conn) != nil {
					return
				}
				defer close(done)
				_, failed = conn.Write([]byte(c.head))
				for failed == nil && s.Written.Load() < flood {
					_, failed = conn.Write(chunk)
				}
			})
			v := exchangeAt(t, s.URL)
			if v.Outcome != c.outcome || v.Reason != c.reason || len(v.Message) > plain.MaxBytes {
				t.Errorf("%s %s, a message of %d bytes", v.Outcome, v.Reason, len(v.Message))
			}
			<-done
			// What the relay did not read fills the sockets' buffers.
			if n := s.Written.Load(); failed == nil || n > flood/4 {
				t.Errorf("%d bytes were taken, then: %v", n, failed)
			}
		})
	}
}

// A few kilobytes of gzip hold megabytes, or gigabytes, once unpacked.
func TestSecurityGzipIsNotUnpacked(t *testing.T) {
	t.Parallel()
	var bomb bytes.Buffer
	writer := gzip.NewWriter(&bomb)
	for range 4 {
		_, err := writer.Write(bytes.Repeat([]byte("BOMB"), 256<<10))
		relaytest.Must(t, err)
	}
	relaytest.Must(t, writer.Close())
	for _, code := range []int{200, 422} {
		rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, _ relaytest.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			w.WriteHeader(code)
			_, _ = w.Write(bomb.Bytes())
		})
		v := exchangeAt(t, rc.URL)
		if v.StatusCode != code || len(v.Message) > plain.MaxBytes || strings.Contains(v.Message, "BOMB") {
			t.Errorf("%d: %.100q", v.StatusCode, v.Message)
		}
		testkit.Equal(t, "asked for", rc.All()[0].Header.Get("Accept-Encoding"), "")
	}
}
