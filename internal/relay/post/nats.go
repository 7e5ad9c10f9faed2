package post

import (
	"context"
	"net/http"
	"strconv"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/relay/natspost"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// newNATS returns the carrier of nats and tls: one message to a stream of JetStream an attempt.
// agent says who sends it.
func newNATS(e *Endpoint, agent string) carrier {
	d := e.Destination
	e.setHeader("")
	client := natspost.New(natspost.Config{
		Settings: d.NATS, Destination: d.Name, Servers: servers(e.URL.Host, "4222"), Secure: e.URL.Scheme == "tls",
		TLS: d.Wire.TLS.current, Authorization: d.Wire.Authorization,
		Dial: e.dial, Timeout: d.Timeout, Again: d.again(), Largest: d.largest(), Agent: agent, Log: &e.Log,
	})
	return overLog{
		logClient: client, to: e,
		address: func(m *Message) (string, error) { return client.Subject(*m.EventType, m.order()) },
		publish: func(ctx context.Context, subject string, m *Message, req *Request) policy.Result {
			return client.Publish(ctx, subject, natspost.Message{ID: messageID(m), Header: req.natsHeader, Payload: m.Payload})
		},
	}
}

// order returns what events that keep an order have in common: their ordering key, or else nothing
// but the event itself.
func (m *Message) order() string {
	if m.OrderingKey != nil {
		return *m.OrderingKey
	}
	return strconv.FormatInt(m.EventID, 10)
}

// messageID returns what a stream knows a delivery by, within its duplicate window. The idempotency
// key alone is not enough where one stream takes the messages of several destinations, or of
// several databases whose keys are alike: the stream would drop the second one, and the event would
// be lost. A replay is another message, or the stream would drop it, too.
func messageID(m *Message) string {
	id := *m.Key + "/" + m.Destination + "/" + strconv.FormatInt(m.CreatedAt.Time.UnixMicro(), 36)
	if m.Replay {
		id += "/" + strconv.FormatInt(m.NotAfter.UnixMicro(), 36)
	}
	return id
}

// natsHeader yields the headers of a message to NATS. Attributes of CloudEvents are in lower case
// there. What an event brings along must not command the server: Nats-Rollup would empty the
// stream.
func (r *Request) natsHeader(yield func(name, value string) bool) {
	for i := range r.header {
		name := r.header[i].name
		switch {
		case strings.HasPrefix(name, natsPrefix):
			continue
		case strings.HasPrefix(name, "Ce-"):
			name = strings.ToLower(name)
		}
		if !yield(name, r.header[i].value) {
			return
		}
	}
}

// natsPrefix begins the headers that a server of NATS obeys.
const natsPrefix = "Nats-"

// natsProblems returns the mistakes in a destination of NATS.
func (d Destination) natsProblems(path string) []check.Problem {
	var v check.Problems
	v.Add(d.NATS.Problems(path+".nats", d.Name))
	v.Add(d.logProblems(path, "NATS", "nats.credentials_file, nats.nkey_file, basic_auth or bearer_token"))
	for name := range d.Headers {
		v.Require(!strings.HasPrefix(http.CanonicalHeaderKey(name), natsPrefix), path+".headers."+name, "is a command to the server; remove it")
	}
	const identities = "is set beside basic_auth or bearer_token, and a connection can have one identity; remove one of them"
	v.Require(d.Wire.Authorization == nil || d.NATS.Credentials == nil, path+".nats.credentials_file", identities)
	v.Require(d.Wire.Authorization == nil || d.NATS.Seed == nil, path+".nats.nkey_file", identities)
	return v
}
