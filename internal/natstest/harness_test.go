package natstest

import (
	"context"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/post"

	"github.com/outbox-relay/outbox-relay/relay"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

// patience bounds every wait of a test. It measures nothing.
const patience = 20 * time.Second

// startServer starts a server with JetStream on a free port, with changed options.
func startServer(t testing.TB, changes ...func(*server.Options)) *server.Server {
	t.Helper()
	options := &server.Options{Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: t.TempDir(), NoLog: true, NoSigs: true}
	for _, change := range changes {
		change(options)
	}
	return startWith(t, options)
}

func startWith(t testing.TB, options *server.Options) *server.Server {
	t.Helper()
	s, err := server.NewServer(options)
	pgtest.Must(t, err)
	go s.Start()
	if !s.ReadyForConnections(patience) {
		t.Fatal("the server does not start")
	}
	t.Cleanup(func() {
		s.Shutdown()
		s.WaitForShutdown()
	})
	return s
}

// addressOf returns host:port of a server.
func addressOf(s *server.Server) string { return s.Addr().String() }

// admin returns a connection to the server with the given options, which is not the relay's.
func admin(t testing.TB, s *server.Server, options ...nats.Option) (*nats.Conn, jetstream.JetStream) {
	t.Helper()
	nc, err := nats.Connect("nats://"+addressOf(s), options...)
	pgtest.Must(t, err)
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	pgtest.Must(t, err)
	return nc, js
}

// addStream creates the stream EVENTS of the subjects outbox.>, changed.
func addStream(t testing.TB, js jetstream.JetStream, changes ...func(*jetstream.StreamConfig)) jetstream.Stream {
	t.Helper()
	config := jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"outbox.>"}, Storage: jetstream.MemoryStorage}
	for _, change := range changes {
		change(&config)
	}
	stream, err := js.CreateStream(t.Context(), config)
	pgtest.Must(t, err)
	return stream
}

// settingsOf returns a destination of the server's stream EVENTS, changed.
func settingsOf(url string, changes ...func(*relay.Destination)) relay.Destination {
	d := relay.Destination{Name: "audit", URL: url, Timeout: 5 * time.Second, NATS: relay.NATS{Subject: "outbox.{type}", Stream: "EVENTS"}}
	for _, change := range changes {
		change(&d)
	}
	return d
}

// endpointOf returns an endpoint of a destination that was found without mistakes.
func endpointOf(t testing.TB, d relay.Destination, egress relay.Egress) *post.Endpoint {
	t.Helper()
	d = d.WithDefaults(egress)
	for _, problem := range d.Problems("destinations." + d.Name) {
		t.Fatal(problem)
	}
	e, err := post.NewEndpoint(d, "test")
	pgtest.Must(t, err)
	t.Cleanup(e.Retire)
	return e
}

// to returns an endpoint of the server's stream EVENTS.
func to(t testing.TB, s *server.Server, changes ...func(*relay.Destination)) *post.Endpoint {
	t.Helper()
	return endpointOf(t, settingsOf("nats://"+addressOf(s), changes...), relay.Egress{})
}

// message returns an event of the given type with its own key.
func message(eventType, key string) post.Message {
	version := 1
	return post.Message{EventID: 7, Destination: "audit", Fence: 3, Attempt: 1, NotAfter: time.Unix(2e9, 0), Event: post.Event{
		EventType: &eventType, Version: &version, Key: &key, Payload: []byte(`{"n":1}`),
		CreatedAt: pgtype.Timestamptz{Time: time.Unix(1e9, 0), Valid: true},
	}}
}

// attempt makes one attempt with an event of type "paid".
func attempt(t testing.TB, e *post.Endpoint, key string) policy.Result {
	t.Helper()
	return attemptWith(t, e, message("paid", key))
}

func attemptWith(t testing.TB, e *post.Endpoint, m post.Message) policy.Result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), e.Destination.Timeout)
	defer cancel()
	return e.Deliver(ctx, m, nil)
}

// expect compares a result. Text is part of its message.
func expect(t testing.TB, v policy.Result, want policy.Result, text string) {
	t.Helper()
	got := v
	got.Message = ""
	if got != want || !strings.Contains(v.Message, text) {
		t.Errorf("got %+v,\nwant %+v with %q", v, want, text)
	}
}

// What became of an attempt.
var (
	delivered = policy.Result{Reason: policy.ReasonOK, Posted: true}
	duplicate = policy.Result{Reason: policy.ReasonOK, Posted: true, Duplicate: true}
)

// answered is an attempt that the server has answered, or may have.
func answered(reason policy.Reason) policy.Result { return policy.Result{Reason: reason, Posted: true} }

// unreached is an attempt that found no connection.
func unreached(reason policy.Reason) policy.Result {
	return policy.Result{Reason: reason, Posted: true, Unreached: true}
}

// outcome returns what becomes of a delivery by a result of its first attempt, while nothing else
// fails.
func outcome(v policy.Result) policy.Outcome {
	return policy.Decide(v, policy.Circumstances{Attempt: 1, Retry: policy.RetryPolicy{}.WithDefaults()}).Outcome
}

type conn = net.Conn

// portOf returns the port of an endpoint's server.
func portOf(t testing.TB, e *post.Endpoint) int {
	t.Helper()
	_, port, err := net.SplitHostPort(e.URL.Host)
	pgtest.Must(t, err)
	n, err := strconv.Atoi(port)
	pgtest.Must(t, err)
	return n
}

func split(t testing.TB, address string) (host string, port int) {
	t.Helper()
	host, text, err := net.SplitHostPort(address)
	pgtest.Must(t, err)
	port, err = strconv.Atoi(text)
	pgtest.Must(t, err)
	return host, port
}
