package post

import (
	"context"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// A Carrier makes the attempts of one destination, in the way that the scheme of its URL names. Everything else about a delivery is
// the same for all carriers: when it is sent, beside how many others, and what its result means. A Carrier is safe for concurrent use.
type Carrier interface {
	// Deliver makes exactly one attempt, within the destination's timeout, which ends with ctx. After the message has been expressed as what is sent it calls ready,
	// if that is not nil. If ready returns a result, that is the result, and nothing is sent.
	Deliver(ctx context.Context, m Message, ready func() *policy.Result) policy.Result
	// Reach connects, checks what can be checked without an attempt, and sends no message.
	Reach(ctx context.Context) error
	// CloseIdleConnections closes what no attempt uses. A later attempt connects again.
	CloseIdleConnections()
}

// newCarrier returns the carrier of an endpoint's scheme. agent says who sends: the program and its version.
func newCarrier(e *Endpoint, agent string) (Carrier, error) {
	switch e.URL.Scheme {
	case "http", "https":
		return newHTTP(e, agent)
	case "nats", "tls":
		return newNATS(e, agent), nil
	}
	return nil, fmt.Errorf("scheme %q is not supported; write %s", e.URL.Scheme, supportedSchemes)
}

// supportedSchemes lists what a destination's URL may begin with, for people.
const supportedSchemes = "http:// or https://, nats:// or tls:// (NATS)"

// schemeProblems returns the mistakes that follow from the scheme of a destination's URL: settings that it lacks, and settings that
// belong to another one.
func (d Destination) schemeProblems(path string) []check.Problem {
	scheme := schemeOf(d.URL)
	if scheme == "nats" || scheme == "tls" {
		return d.natsProblems(path)
	}
	var v check.Problems
	for _, setting := range []struct {
		name  string
		given bool
	}{
		{"subject", d.NATS.Subject != ""},
		{"stream", d.NATS.Stream != ""},
		{"inbox_prefix", d.NATS.InboxPrefix != ""},
		{"credentials_file", d.NATS.Credentials != nil},
		{"nkey_file", d.NATS.Seed != nil},
	} {
		v.Require(!setting.given, path+"."+setting.name, "is for destinations of NATS, whose url begins with nats:// or tls://; remove it")
	}
	return v
}

// overHTTP is the [Carrier] of http and https: one POST an attempt.
type overHTTP struct{ to *Endpoint }

// Deliver implements [Carrier].
func (c overHTTP) Deliver(ctx context.Context, m Message, ready func() *policy.Result) policy.Result {
	req, err := NewRequest(c.to, m, time.Now())
	if err != nil {
		return Refused(err)
	}
	if ready != nil {
		if instead := ready(); instead != nil {
			return *instead
		}
	}
	return Send(ctx, c.to, req, m.Payload)
}

// CloseIdleConnections implements [Carrier].
func (c overHTTP) CloseIdleConnections() {
	c.to.Transport.CloseIdleConnections()
	if c.to.direct != nil {
		c.to.direct.closeIdle()
	}
}
