package post_test

import (
	"net/netip"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/kafkapost"
	"github.com/outbox-relay/outbox-relay/internal/relay/natspost"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
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
