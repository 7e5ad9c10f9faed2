package post_test

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// No column of an event, as a table without its constraints may hold it, makes one request into
// two, or adds a header.
func TestSecuritySmuggling(t *testing.T) {
	t.Parallel()
	const smuggled = "\r\nX-Smuggled: yes\r\n\r\nGET /admin HTTP/1.1\r\nHost: internal\r\nX-Smuggled: yes\r\n\r\n"
	texts := []string{
		"a" + smuggled, "a\nX-Smuggled: yes", "a\rX-Smuggled: yes", "a\r\n\tX-Smuggled: yes", "a\u0085X-Smuggled: yes", "a\u2028X-Smuggled: yes",
		"a\u560d\u560aX-Smuggled: yes", // whose low bytes are CR and LF
		"a\x0bX-Smuggled: yes", "a\x00X-Smuggled: yes", "a\x7f", " a", "a ", "\t", strings.Repeat("a", 256), strings.Repeat("a", 100_000),
	}
	headers := []string{
		`{"X": "a\r\nX-Smuggled: yes"}`, `{"X": "a\nX-Smuggled: yes"}`, `{"X": "a\r\n\r\nGET /admin HTTP/1.1\r\n\r\n"}`, `{"X\r\nX-Smuggled": "yes"}`,
		`{"X: y\r\nX-Smuggled": "yes"}`, `{"X-Smuggled: yes\r\nX": "y"}`, `{"X ": "y"}`, `{" X": "y"}`, `{"X:": "y"}`, `{"": "X-Smuggled: yes"}`, `{"X": "\u560d\u560aX-Smuggled: yes"}`,
		`{"X": "a\u0000"}`, `{"X": "a\u000b"}`, `{"X": ["a", "X-Smuggled: yes"]}`, `{"X": {"X-Smuggled": "yes"}}`, `["X-Smuggled: yes"]`, `"X-Smuggled: yes"`,
		`{"Transfer-Encoding": "chunked"}`, `{"transfer_encoding": "chunked"}`, `{"Content-Length": "0"}`, `{"CONTENT-LENGTH": "5"}`, `{"Host": "internal"}`,
		`{"Connection": "X-Idempotency-Key"}`, `{"Upgrade": "h2c"}`, `{"Expect": "100-continue"}`, `{"Trailer": "X-Smuggled"}`, `{"TE": "trailers"}`,
		`{":authority": "internal"}`, `{"X-Idempotency-Key": "of another"}`, `{"Webhook-Signature": "v1,forged"}`,
		`{"X": "` + strings.Repeat("a", 100_000) + `"}`,
	}
	// What belongs into a body stays there.
	bodies := []string{"{}" + strings.Repeat("\r\n", 1000), "\r\n\r\n[1]\r\n\r\n", `"0\r\n\r\nGET /admin HTTP/1.1\r\n\r\n"`, "0\r\n\r\n", "[\r\n]\r\n"}
	var attacks []post.Message
	attack := func(change func(*post.Event)) {
		m := order()
		change(&m.Event)
		attacks = append(attacks, m)
	}
	for _, text := range texts {
		attack(func(e *post.Event) { e.EventType = &text })
		attack(func(e *post.Event) { e.Key = &text })
		attack(func(e *post.Event) { e.OrderingKey = &text })
		attack(func(e *post.Event) { e.RelatedReference = &text })
	}
	for _, object := range headers {
		attack(func(e *post.Event) { e.Headers = []byte(object) })
	}
	for _, body := range bodies {
		attack(func(e *post.Event) { e.Payload = []byte(body) })
	}

	var mu sync.Mutex
	var arrived []relaytest.Request
	wire := relaytest.NewRawServer(t, func(_ *relaytest.RawServer, conn net.Conn) { // reads whatever is a request
		for reader := bufio.NewReader(conn); ; {
			req, err := http.ReadRequest(reader)
			if err != nil {
				return
			}
			body, err := io.ReadAll(req.Body)
			if err != nil {
				t.Errorf("no body: %v", err)
			}
			mu.Lock()
			arrived = append(arrived, relaytest.Request{Request: req, Body: body})
			mu.Unlock()
			_, _ = io.WriteString(conn, "HTTP/1.1 204 No Content\r\n\r\n")
		}
	})
	e := endpointAt(t, wire.URL)
	for _, m := range attacks {
		mu.Lock()
		arrived = nil
		mu.Unlock()
		v := first(e.Deliver(t.Context(), m, nil), policy.Responses{})
		mu.Lock()
		switch {
		case v.Outcome == policy.Fail && v.Reason == policy.ReasonInvalidEvent && !v.Posted && len(arrived) == 0:
		case v.Outcome != policy.Delivered || len(arrived) != 1:
			t.Errorf("%+v, and %d requests, of %.300q", v, len(arrived), m.Event.Headers)
		default:
			req := arrived[0]
			keys := req.Header.Values(webhook.IdempotencyKey)
			if req.Method != http.MethodPost || req.RequestURI != "/" || "http://"+req.Host+"/" != wire.URL || req.Header.Get("X-Smuggled") != "" ||
				len(keys) != 1 || keys[0] != *m.Key || string(req.Body) != string(m.Payload) {
				t.Errorf("%s %s at %s: %v %.200q", req.Method, req.RequestURI, req.Host, req.Header, req.Body)
			}
		}
		mu.Unlock()
	}
}
