package bench

import (
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay"
)

// A user need not know the names of reasons to see why requests fail.
func TestFailuresAreDescribed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		attempts []relay.Attempt
		want     string
	}{
		{nil, ""},
		{[]relay.Attempt{{Outcome: policy.Delivered, StatusCode: 200}}, ""},
		{[]relay.Attempt{{Outcome: policy.Retry, Reason: policy.ReasonServerError, StatusCode: 500}}, "1 request failed, the last one with status 500"},
		{
			[]relay.Attempt{{Outcome: policy.Retry, Reason: policy.ReasonServerError, StatusCode: 500}, {Outcome: policy.Retry, Reason: policy.ReasonConnect}},
			"2 requests failed, the last one because the receiver accepts no connection: nothing listens at its address",
		},
		{[]relay.Attempt{{Outcome: policy.Retry, Reason: policy.ReasonDNS}}, "because the name of the receiver's host has no address"},
		{[]relay.Attempt{{Outcome: policy.Hold, Reason: policy.ReasonPanic}}, "with the reason panic"},
	} {
		running := runningRelay{answered: map[int64]time.Time{}}
		for _, a := range c.attempts {
			running.attempted(a)
		}
		if _, _, failures := running.state(); !strings.Contains(failures, c.want) || (c.want == "") != (failures == "") {
			t.Errorf("%+v: %q, want %q", c.attempts, failures, c.want)
		}
	}
}
