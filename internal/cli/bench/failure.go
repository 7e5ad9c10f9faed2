package bench

import (
	"fmt"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay"
)

// describeFailure says how a request failed, in words that follow "the last one".
func describeFailure(a relay.Attempt) string {
	if a.StatusCode > 0 {
		return fmt.Sprintf("with status %d", a.StatusCode)
	}
	switch a.Reason {
	case policy.ReasonDNS:
		return "because the name of the receiver's host has no address"
	case policy.ReasonConnect:
		return "because the receiver accepts no connection: nothing listens at its address, or a firewall or proxy is in the way"
	case policy.ReasonTLS:
		return "because no TLS connection came about: the receiver's certificate is not trusted, or it does not speak TLS"
	case policy.ReasonTimeout:
		return "because the receiver did not answer in time"
	case policy.ReasonNetwork:
		return "because the connection broke before the receiver answered"
	case policy.ReasonMalformed:
		return "because the receiver's answer is not HTTP"
	case policy.ReasonEgress:
		return "because the relay may not connect to the receiver's address: see egress in its configuration"
	}
	return "with the reason " + string(a.Reason)
}
