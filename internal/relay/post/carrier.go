package post

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// A carrier makes the attempts of one destination, in the way that the scheme of its URL names.
// Everything else about a delivery is the same for all carriers: when it is sent, beside how many
// others, and what its result means. A carrier is safe for concurrent use.
type carrier interface {
	// Deliver makes exactly one attempt, within the destination's timeout, which ends with ctx.
	// After the message has been expressed as what is sent it calls ready, if that is not nil. If
	// ready returns a result, that is the result, and nothing is sent.
	Deliver(ctx context.Context, m Message, ready func() *policy.Result) policy.Result
	// Reach connects, checks what can be checked without an attempt, and sends no message. An error
	// says that no delivery can succeed. A warning says which ones cannot, or what is stored twice.
	Reach(ctx context.Context) (warnings []string, err error)
	// CloseIdleConnections closes what no attempt uses. A later attempt connects again.
	CloseIdleConnections()
}

// newCarrier returns the carrier of an endpoint's scheme. agent says who sends: the program and its
// version.
func newCarrier(e *Endpoint, agent string) (carrier, error) {
	switch e.URL.Scheme {
	case "http", "https":
		return newHTTP(e, agent)
	case "nats", "tls":
		return newNATS(e, agent), nil
	case "kafka", "kafka+ssl":
		return newKafka(e, agent), nil
	}
	return nil, fmt.Errorf("scheme %q is not supported; write %s", e.URL.Scheme, supportedSchemes)
}

// supportedSchemes lists what a destination's URL may begin with, for people.
const supportedSchemes = "http:// or https://, nats:// or tls:// (NATS), kafka:// or kafka+ssl:// (Kafka)"

// schemeProblems returns the mistakes that follow from the scheme of a destination's URL: settings
// that it lacks, and settings that belong to another one.
func (d Destination) schemeProblems(path string) []check.Problem {
	var v check.Problems
	const nats, kafka = "NATS, whose url begins with nats:// or tls://", "Kafka, whose url begins with kafka:// or kafka+ssl://"
	kind := ""
	switch schemeOf(d.URL) {
	case "nats", "tls":
		kind = nats
		v.Add(d.natsProblems(path))
	case "kafka", "kafka+ssl":
		kind = kafka
		v.Add(d.kafkaProblems(path))
	}
	for _, setting := range []struct {
		name, of string
		given    bool
	}{
		{"nats.subject", nats, d.NATS.Subject != ""},
		{"nats.partitions", nats, d.NATS.Partitions != 0},
		{"nats.stream", nats, d.NATS.Stream != ""},
		{"nats.inbox_prefix", nats, d.NATS.InboxPrefix != ""},
		{"nats.credentials_file", nats, d.NATS.Credentials != nil},
		{"nats.nkey_file", nats, d.NATS.Seed != nil},
		{"kafka.topic", kafka, d.Kafka.Topic != ""},
		{"kafka.key", kafka, d.Kafka.Key != ""},
		{"kafka.sasl", kafka, d.Kafka.Mechanism != ""},
	} {
		v.Require(!setting.given || setting.of == kind, path+"."+setting.name, "is for destinations of %s; remove it", setting.of)
	}
	v.Require(d.Batch.Max <= 1 || kind == "", path+".batch.max", "is for destinations of HTTP, and events for %s share requests without it; remove it", kind)
	return v
}

// logProblems returns the mistakes that destinations of all logs share. identity names the settings
// by which the relay proves who it is.
func (d Destination) logProblems(path, kind, identity string) []check.Problem {
	var v check.Problems
	for name, codes := range map[string][]int{"retry": d.Responses.Retry, "fail": d.Responses.Fail} {
		v.Require(len(codes) == 0, path+".responses."+name, "has no effect: %s answers without a status code of HTTP; remove it", kind)
	}
	v.Require(d.Wire.Proxy == "" || d.Wire.Proxy == NoProxy, path+".proxy", "has no effect: %s is not reached through a proxy of HTTP; remove it", kind)
	v.Require(d.Wire.egress.Proxy == "" || d.Wire.Proxy == NoProxy, path+".proxy",
		"is not none, although egress.proxy names a proxy through which %s is not reached; write proxy: none to connect directly", kind)
	for name := range d.Headers {
		canonical := http.CanonicalHeaderKey(name)
		v.Require(canonical != "Authorization", path+".headers."+name, "does not identify the relay to %s; write %s", kind, identity)
		v.Require(!webhook.SameName(canonical, "User-Agent"), path+".headers."+name, "says nothing to %s; remove it", kind)
	}
	return v
}

// largestPayload is what the outbox takes, in bytes.
const largestPayload = 1 << 20

// largest returns the size of the largest payload that this destination gets, in bytes.
func (d Destination) largest() int64 {
	if d.Wire.MaxPayloadBytes > 0 {
		return min(d.Wire.MaxPayloadBytes, largestPayload)
	}
	return largestPayload
}

// again returns the earliest time from the begin of an attempt that had no answer to that of the
// next one.
func (d Destination) again() time.Duration {
	first := d.Retry.Schedule[0]
	return d.Timeout + first + time.Duration(float64(first)**d.Retry.Jitter)
}

// overLog is the [carrier] of a log of messages, such as a stream or a topic: one message an
// attempt.
type overLog struct {
	logClient
	to *Endpoint
	// address returns where a message is published.
	address func(m *Message) (string, error)
	// publish publishes a message at its address, within the destination's timeout.
	publish func(ctx context.Context, address string, m *Message, req *Request) policy.Result
}

// A logClient has the connections to a log.
type logClient interface {
	Reach(ctx context.Context) (warnings []string, err error)
	CloseIdleConnections()
}

// Deliver implements [carrier].
func (c overLog) Deliver(ctx context.Context, m Message, ready func() *policy.Result) policy.Result {
	req, err := NewRequest(c.to, m, time.Now())
	if err != nil {
		return Refused(err)
	}
	address, err := c.address(&m)
	if err != nil {
		return Refused(err)
	}
	if ready != nil {
		if instead := ready(); instead != nil {
			return *instead
		}
	}
	c.to.begin()
	defer c.to.end()
	result := c.publish(ctx, address, &m, req)
	result.DroppedHeaders = req.dropped
	return result
}
