package natspost_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/relay/natspost"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// An imitation speaks a server's protocol and decides nothing: it says what a test has it say. What
// real servers say, and when, is tried in internal/natstest.
type imitation struct {
	address string
	// answer returns what is said about a message to a subject: JSON to the sender, or "503" for no
	// responders; a line that begins with -ERR or INFO beside the answers; "close"; empty: nothing.
	answer func(subject string) string

	mu       sync.Mutex
	connects []string // what clients said of themselves
	messages []string // with their headers
}

// imitate starts an imitation that answers all messages to one subject alike, and nothing else,
// unless it is changed.
func imitate(t testing.TB, answers map[string]string, changes ...func(*imitation)) *imitation {
	t.Helper()
	s := &imitation{answer: func(subject string) string { return answers[subject] }}
	for _, change := range changes {
		change(s)
	}
	raw := relaytest.NewRawServer(t, func(_ *relaytest.RawServer, conn net.Conn) { s.serve(conn) })
	s.address = strings.TrimSuffix(strings.TrimPrefix(raw.URL, "http://"), "/")
	return s
}

func (s *imitation) serve(conn net.Conn) {
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(conn, format+"\r\n", args...) }
	subscriptions := map[string]string{} // ids by the beginning of the subject
	say(`INFO {"server_id":"S","server_name":"s","version":"2.15.2","proto":1,"headers":true,"jetstream":true,"nonce":"n","max_payload":1048576}`)
	for in := bufio.NewReader(conn); ; {
		line, err := in.ReadString('\n')
		if err != nil {
			return
		}
		words := strings.Fields(line)
		answer, reply := "", ""
		switch words[0] {
		case "CONNECT":
			s.note(&s.connects, line)
			answer = s.answer("CONNECT")
		case "PING":
			say("PONG")
		case "SUB":
			subscriptions[strings.TrimSuffix(words[1], "*")] = words[2]
		case "PUB", "HPUB":
			size, _ := strconv.Atoi(words[len(words)-1])
			message := make([]byte, size+len("\r\n"))
			if _, err := io.ReadFull(in, message); err != nil {
				return
			}
			s.note(&s.messages, string(message))
			answer, reply = s.answer(words[1]), words[2]
		}
		id := subscriptions[reply[:strings.LastIndex(reply, ".")+1]]
		switch {
		case answer == "close":
			return
		case answer == "503":
			say("HMSG %s %s 16 16\r\nNATS/1.0 503\r\n\r\n", reply, id)
		case strings.HasPrefix(answer, "-ERR"), strings.HasPrefix(answer, "INFO"):
			say("%s", answer)
			if strings.HasPrefix(answer, "-ERR") && !strings.Contains(answer, "Permissions") {
				return
			}
		case answer != "" && reply != "":
			say("MSG %s %s %d\r\n%s", reply, id, len(answer), answer)
		}
	}
}

func (s *imitation) note(list *[]string, text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	*list = append(*list, text)
}

// said returns all that clients said of themselves, or all messages.
func (s *imitation) said(list *[]string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Join(*list, "\n")
}

// clientOf returns a client of the stream EVENTS at an address, changed.
func clientOf(t testing.TB, address string, changes ...func(*natspost.Config)) *natspost.Client {
	t.Helper()
	cfg := natspost.Config{
		Settings: natspost.Settings{Subject: "outbox.{type}", Stream: "EVENTS"}, Destination: "audit", Servers: []string{address},
		TLS: func() *tls.Config { return &tls.Config{} }, Dial: (&net.Dialer{}).DialContext,
		Timeout: relaytest.Patience, Again: time.Minute, Largest: 1 << 20, Agent: "test", Log: &zerolog.Logger{},
	}
	for _, change := range changes {
		change(&cfg)
	}
	c := natspost.New(cfg)
	t.Cleanup(c.CloseIdleConnections)
	return c
}

// timeout changes the time of an attempt.
func timeout(d time.Duration) func(*natspost.Config) {
	return func(c *natspost.Config) { c.Timeout = d }
}

// attempt publishes a message about an event of type "paid".
func attempt(t testing.TB, c *natspost.Client) policy.Result {
	t.Helper()
	return publish(t.Context(), c, `{"n":1}`)
}

func publish(ctx context.Context, c *natspost.Client, payload string) policy.Result {
	header := func(yield func(name, value string) bool) { yield("X-Tenant", "finance") }
	return c.Publish(ctx, "outbox.paid", natspost.Message{ID: "id-1", Header: header, Payload: []byte(payload)})
}

// expect compares a result. Text is part of its message.
func expect(t testing.TB, name string, v, want policy.Result, text string) {
	t.Helper()
	got := v
	got.Message = ""
	if got != want || !strings.Contains(v.Message, text) {
		t.Errorf("%s: got %+v,\nwant %+v with %q", name, v, want, text)
	}
}
