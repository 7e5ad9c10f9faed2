package post_test

import (
	"bufio"
	"context"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/kafkapost"
	"github.com/outbox-relay/outbox-relay/internal/relay/natspost"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// logs are destinations of which nothing answers.
func logs() []post.Destination {
	return []post.Destination{
		{Name: "nats", URL: "nats://127.0.0.1:1", NATS: natspost.Settings{Subject: "{type}", Stream: "EVENTS"}},
		{Name: "kafka", URL: "kafka://127.0.0.1:1", Kafka: kafkapost.Settings{Topic: "{type}"}},
	}
}

// A type that would be a command to a log, or no name there, fails its event before anything is
// sent.
func TestSecurityTypesThatNoLogCanExpress(t *testing.T) {
	t.Parallel()
	for _, d := range logs() {
		e := endpointOf(t, d.WithDefaults(post.Egress{}))
		for _, eventType := range []string{"$JS.API.STREAM.PURGE.EVENTS", "outbox.*", "a b", "a\r\nPUB x 1\r\nx"} {
			m := order()
			m.EventType = &eventType
			if v := e.Deliver(t.Context(), m, nil); v.Reason != policy.ReasonInvalidEvent || v.Posted {
				t.Errorf("%s of %q: %+v", d.Name, eventType, v)
			}
		}
	}
}

// The servers of logs are dialled as egress allows, like receivers, and nothing is promised to one
// that was not reached.
func TestSecurityLogsAreDialledAsEgressAllows(t *testing.T) {
	t.Parallel()
	for _, d := range logs() {
		e := endpointOf(t, d.WithDefaults(post.Egress{AllowPrivate: []netip.Prefix{}}))
		if v := e.Deliver(t.Context(), order(), nil); v.Reason != policy.ReasonEgress || !v.Unreached {
			t.Errorf("%s: %+v", d.Name, v)
		}
	}
	for _, reached := range post.ReachAll(t.Context(), logs(), post.Egress{AllowPrivate: []netip.Prefix{}}) {
		if reached.Err == nil {
			t.Errorf("%s is reached", reached.Destination)
		}
	}
}

// A reload while a destination is asked whether it is ready leaves no connection behind.
func TestRetiredEndpointIsClosedAfterReach(t *testing.T) {
	t.Parallel()
	closed := make(chan struct{})
	s := relaytest.NewRawServer(t, func(_ *relaytest.RawServer, conn net.Conn) {
		defer close(closed)
		answers := map[string]string{"PING": "PONG", "PUB": `-ERR 'Permissions Violation for Publish to "$JS.API.STREAM.INFO.EVENTS"'`}
		_, _ = conn.Write([]byte(`INFO {"proto":1,"headers":true,"jetstream":true,"max_payload":1048576}` + "\r\n"))
		for in := bufio.NewScanner(conn); in.Scan(); {
			if answer := answers[strings.Fields(in.Text() + " -")[0]]; answer != "" {
				_, _ = conn.Write([]byte(answer + "\r\n"))
			}
		}
	})
	d := destinationOf(strings.Replace(strings.TrimSuffix(s.URL, "/"), "http", "nats", 1), post.Wire{}, post.Egress{})
	d.NATS = natspost.Settings{Subject: "{type}", Stream: "EVENTS"}
	e, err := post.NewEndpoint(d, "")
	relaytest.Must(t, err)
	e.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		e.Retire()
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}
	_, err = e.Reach(t.Context())
	relaytest.Must(t, err)
	select {
	case <-closed:
	case <-time.After(relaytest.Patience):
		t.Error("the connection is open")
	}
}
