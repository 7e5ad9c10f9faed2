package natstest

import (
	"bytes"
	"context"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/testkit"

	"github.com/outbox-relay/outbox-relay/relay"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

func TestAcknowledgedMessageIsDelivered(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	_, js := admin(t, s)
	stream := addStream(t, js)
	e := to(t, s, func(d *relay.Destination) { d.Headers = map[string]string{"X-Tenant": "finance"} })
	m := message("invoice.paid", "invoice-4711")
	m.Headers = []byte(`{"Nats-Rollup": "all", "nats-ttl": "1s", "traceparent": "00-abc-def-01"}`)
	delivered, duplicate := delivered, duplicate
	delivered.DroppedHeaders, duplicate.DroppedHeaders = 2, 2 // those of NATS
	expect(t, attemptWith(t, e, m), delivered, "")
	expect(t, attemptWith(t, e, m), duplicate, "") // as after an attempt whose outcome was unknown
	other := m
	other.Destination = "billing" // fans out to the same stream
	expect(t, attemptWith(t, e, other), delivered, "")
	replay := m
	replay.Replay = true
	expect(t, attemptWith(t, e, replay), delivered, "")
	expect(t, attemptWith(t, e, replay), duplicate, "")

	stored, err := stream.GetMsg(t.Context(), 1)
	pgtest.Must(t, err)
	if stored.Subject != "outbox.invoice.paid" || string(stored.Data) != `{"n":1}` {
		t.Errorf("%s: %s", stored.Subject, stored.Data)
	}
	want := map[string]string{
		"X-Idempotency-Key": "invoice-4711", "X-Outbox-Event-Type": "invoice.paid", "X-Outbox-Event-Id": "7", "X-Outbox-Attempt": "1",
		"X-Outbox-Delivery-Id": "7-audit-3", "X-Outbox-Destination": "audit", "X-Outbox-Event-Version": "1", "X-Tenant": "finance", "Traceparent": "00-abc-def-01",
		"X-Outbox-Not-After": "2033-05-18T03:33:20.000000Z", "X-Outbox-Created-At": "2001-09-09T01:46:40.000000Z",
		"Content-Type": "application/json", "Nats-Msg-Id": "invoice-4711/audit/fi4lmrhd1c0"[:len("invoice-4711/audit/")],
	}
	for name, value := range want {
		if got := stored.Header.Get(name); got != value && !(name == "Nats-Msg-Id" && strings.HasPrefix(got, value)) {
			t.Errorf("%s: %q, want %q", name, got, value)
		}
	}
	for _, name := range []string{"Nats-Rollup", "Nats-Ttl", "Nats-TTL", "User-Agent", "Authorization"} {
		if got := stored.Header.Values(name); len(got) > 0 {
			t.Errorf("%s: %q", name, got)
		}
	}
	if info, err := stream.Info(t.Context()); err != nil || info.State.Msgs != 3 {
		t.Errorf("%d messages, %v; want one for each destination, and one for the replay", info.State.Msgs, err)
	}
}

// A streamError is a message that is not stored.
type streamError struct {
	server  func(*server.Options)
	prepare func(t *testing.T, js jetstream.JetStream, nc *nats.Conn)
	send    post.Message
	want    policy.Result
	outcome policy.Outcome
	text    string
}

// Rows of the table in docs/nats.md that a server decides; the others are those of natspost and of
// identity_test.go.
func TestErrorsOfAStream(t *testing.T) {
	t.Parallel()
	maxPayload := func(o *server.Options) { o.MaxPayload = 2048 }
	large := func(n int) post.Message {
		m := message("paid", "large")
		m.Payload = bytes.Repeat([]byte("1"), n)
		return m
	}
	tooLarge := policy.Result{Reason: policy.ReasonTooLarge}
	for name, c := range map[string]streamError{
		"no stream": {want: answered(policy.ReasonNotFound), outcome: policy.Retry, text: `there is no stream "EVENTS"; create it with the subject "outbox.paid"`},
		"subject not bound": {prepare: func(t *testing.T, js jetstream.JetStream, _ *nats.Conn) {
			addStream(t, js, func(c *jetstream.StreamConfig) { c.Subjects = []string{"outbox.invoice.*"} })
		}, want: answered(policy.ReasonNotFound), outcome: policy.Retry, text: `the stream "EVENTS" takes "outbox.invoice.*", and not "outbox.paid"`},
		"another stream": {prepare: func(t *testing.T, js jetstream.JetStream, _ *nats.Conn) {
			addStream(t, js, func(c *jetstream.StreamConfig) { c.Name = "OTHER" })
		}, want: answered(policy.ReasonNotFound), outcome: policy.Retry, text: `another stream than "EVENTS" takes the subject "outbox.paid"`},
		"no JetStream": {
			server: func(o *server.Options) { o.JetStream = false },
			want:   answered(policy.ReasonNotFound), outcome: policy.Retry, text: "has no JetStream; enable it",
		},
		"larger than the server takes": {
			server: maxPayload, prepare: func(t *testing.T, js jetstream.JetStream, _ *nats.Conn) { addStream(t, js) },
			send: large(2048), want: tooLarge, outcome: policy.Fail, text: "max_payload is 2048; raise that and replay the event",
		},
		"larger than the stream takes": {prepare: func(t *testing.T, js jetstream.JetStream, _ *nats.Conn) {
			addStream(t, js, func(c *jetstream.StreamConfig) { c.MaxMsgSize = 1024 })
		}, send: large(1024), want: answered(policy.ReasonTooLarge), outcome: policy.Fail, text: `raise max_msg_size of the stream "EVENTS"`},
		"too many messages": {prepare: func(t *testing.T, js jetstream.JetStream, _ *nats.Conn) {
			addStream(t, js, func(c *jetstream.StreamConfig) { c.MaxMsgs, c.Discard = 1, jetstream.DiscardNew })
			_, err := js.Publish(t.Context(), "outbox.first", []byte("1"))
			pgtest.Must(t, err)
		}, want: answered(policy.ReasonUnavailable), outcome: policy.Retry, text: `maximum messages exceeded (10077): the stream "EVENTS" is full`},
		"too many bytes": {prepare: func(t *testing.T, js jetstream.JetStream, _ *nats.Conn) {
			addStream(t, js, func(c *jetstream.StreamConfig) { c.MaxBytes, c.Discard = 100, jetstream.DiscardNew })
		}, want: answered(policy.ReasonUnavailable), outcome: policy.Retry, text: `maximum bytes exceeded (10077): the stream "EVENTS" is full`},
		"quota of the server": {server: func(o *server.Options) { o.JetStreamMaxMemory = 1024 }, prepare: func(t *testing.T, js jetstream.JetStream, _ *nats.Conn) {
			addStream(t, js)
			for range 20 {
				_, _ = js.Publish(t.Context(), "outbox.first", bytes.Repeat([]byte("1"), 200))
			}
		}, want: answered(policy.ReasonUnavailable), outcome: policy.Retry, text: "raise its limits"},
		"sealed": {prepare: func(t *testing.T, js jetstream.JetStream, _ *nats.Conn) {
			config := addStream(t, js).CachedInfo().Config
			config.Sealed = true
			_, err := js.UpdateStream(t.Context(), config)
			pgtest.Must(t, err)
		}, want: answered(policy.ReasonNotFound), outcome: policy.Retry, text: "takes nothing any more"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t, func(o *server.Options) {
				if c.server != nil {
					c.server(o)
				}
			})
			nc, js := admin(t, s)
			if c.prepare != nil {
				c.prepare(t, js, nc)
			}
			if c.send.Key == nil {
				c.send = message("paid", "k")
			}
			v := attemptWith(t, to(t, s), c.send)
			expect(t, v, c.want, c.text)
			testkit.Equal(t, "outcome", outcome(v), c.outcome)
		})
	}
}

// A message in flight when its connection ends may have been stored; the next attempt connects
// again.
func TestShutdownOfTheServer(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	nc, _ := admin(t, s)
	_, err := nc.Subscribe("outbox.>", func(*nats.Msg) { go s.Shutdown() })
	pgtest.Must(t, err)
	pgtest.Must(t, nc.Flush())
	e := to(t, s)
	expect(t, attempt(t, e, "k"), answered(policy.ReasonNetwork), "the server closed the connection before it acknowledged the message")
	s.WaitForShutdown()
	expect(t, attempt(t, e, "k"), unreached(policy.ReasonConnect), "connection refused")

	options := &server.Options{Host: "127.0.0.1", Port: portOf(t, e), JetStream: true, StoreDir: t.TempDir(), NoLog: true, NoSigs: true}
	_, js := admin(t, startWith(t, options))
	addStream(t, js)
	expect(t, attempt(t, e, "k"), delivered, "")
}

// A server in lame duck mode asks its clients to leave: what waits for its answer may stay, what
// comes next goes elsewhere.
func TestLameDuck(t *testing.T) {
	t.Parallel()
	s := startServer(t, func(o *server.Options) {
		o.LameDuckDuration, o.LameDuckGracePeriod = 30*time.Second, -20*time.Millisecond
	})
	_, js := admin(t, s)
	addStream(t, js)
	second := startServer(t)
	_, js = admin(t, second)
	stored := addStream(t, js)
	e := endpointOf(t, settingsOf("nats://"+addressOf(s)+","+addressOf(second)), relay.Egress{})
	expect(t, attempt(t, e, "first"), delivered, "")
	go s.LameDuckShutdown()
	s.WaitForShutdown()
	testkit.Eventually(t, "a delivery over the other server", func() bool { return attempt(t, e, "next").Reason == policy.ReasonOK })
	info, err := stored.Info(t.Context())
	if pgtest.Must(t, err); info.State.Msgs == 0 {
		t.Error("nothing reached the other server")
	}
}

// What a cluster names is dialled as the configuration allows, like what the configuration names.
func TestSecurityDiscoveredServersAreGuarded(t *testing.T) {
	t.Parallel()
	clustered := func(name, advertised string, routes ...*url.URL) *server.Server {
		return startServer(t, func(o *server.Options) {
			o.ServerName, o.Cluster.Name, o.Cluster.Host, o.Cluster.Port = name, "c", "127.0.0.1", -1
			o.ClientAdvertise, o.JetStream, o.Routes = advertised, false, routes
		})
	}
	s := clustered("a", "")
	clustered("b", "169.254.169.254:4222", &url.URL{Scheme: "nats", Host: s.ClusterAddr().String()})
	testkit.Eventually(t, "a cluster of two", func() bool { return s.NumRoutes() > 0 })
	e := to(t, s)
	var dialled []string
	var refused []error
	dial := e.Dial
	e.Dial = func(ctx context.Context, network, address string) (c conn, err error) {
		c, err = dial(ctx, network, address)
		dialled, refused = append(dialled, address), append(refused, err)
		return c, err
	}
	expect(t, attempt(t, e, "k"), answered(policy.ReasonNotFound), "")
	s.Shutdown()
	s.WaitForShutdown()
	e.CloseIdleConnections()
	expect(t, attempt(t, e, "k"), unreached(policy.ReasonConnect), "refused")
	at := slices.Index(dialled, "169.254.169.254:4222")
	if at < 0 || refused[at] == nil || !strings.Contains(refused[at].Error(), "prohibited") {
		t.Errorf("dialled %v with %v", dialled, refused)
	}
}

func TestReach(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	_, js := admin(t, s)
	reach := func(changes ...func(*relay.Destination)) string {
		if _, err := to(t, s, changes...).Reach(t.Context()); err != nil {
			return err.Error()
		}
		return ""
	}
	testkit.Contains(t, "found", reach(), `there is no stream "EVENTS"; create it with the subject "outbox.>"`)
	addStream(t, js, func(c *jetstream.StreamConfig) { c.Subjects = []string{"outbox.invoice.*"} })
	testkit.Equal(t, "found", reach(), "")
	testkit.Contains(t, "found", reach(func(d *relay.Destination) { d.NATS.Subject = "events.{type}" }), `the stream "EVENTS" takes "outbox.invoice.*", and not "events.>"`)
}

// A stream acknowledges a message and loses it all the same where its owner has said so. The relay
// can see that only beforehand.
func TestStreamsThatLoseWhatTheyAcknowledge(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(*jetstream.StreamConfig)
		events int
		text   string
	}{
		"interest":        {func(c *jetstream.StreamConfig) { c.Retention = jetstream.InterestPolicy }, 1, "(retention interest)"},
		"oldest":          {func(c *jetstream.StreamConfig) { c.MaxMsgs = 1 }, 2, "(discard old)"},
		"bytes":           {func(c *jetstream.StreamConfig) { c.MaxBytes = 1000 }, 5, "(discard old)"},
		"one per subject": {func(c *jetstream.StreamConfig) { c.MaxMsgsPerSubject = 1 }, 2, "(discard old)"},
		"none":            {func(c *jetstream.StreamConfig) { c.MaxMsgs, c.Discard = 1, jetstream.DiscardNew }, 1, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t)
			_, js := admin(t, s)
			stream := addStream(t, js, c.change)
			e := to(t, s)
			for i := range c.events {
				expect(t, attempt(t, e, fmt.Sprint("k", i)), delivered, "")
			}
			info, err := stream.Info(t.Context())
			pgtest.Must(t, err)
			warnings, err := e.Reach(t.Context())
			pgtest.Must(t, err)
			if lost := int(info.State.Msgs) < c.events; lost != (c.text != "") || !strings.Contains(strings.Join(warnings, " "), c.text) || len(warnings) > 1 {
				t.Errorf("%d of %d messages are stored, the relay warns %q", info.State.Msgs, c.events, warnings)
			}
		})
	}
}
