package history

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/relay"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

func TestRing(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	r := NewAt(func() time.Time { return now })
	called := 0
	hooks := r.Hooks(relay.Hooks{Attempted: func(relay.Attempt) { called++ }, Settled: func(string, policy.Outcome, policy.Reason, int) { called++ }, LaneChanged: func(relay.LaneState) { called++ }})
	for i := range 100 {
		hooks.Attempted(relay.Attempt{Destination: "shop", Outcome: policy.Delivered, Duration: time.Duration(i) * time.Millisecond, SinceCreated: time.Duration(i) * time.Minute})
	}
	hooks.Attempted(relay.Attempt{Destination: "shop", Outcome: policy.Retry, Duration: time.Hour})
	hooks.Settled("shop", policy.Delivered, policy.ReasonOK, 100)
	hooks.Settled("other", policy.Fail, policy.ReasonRejected, 2)
	hooks.Settled("other", policy.Hold, policy.ReasonBreaker, 7)
	hooks.LaneChanged(relay.LaneState{Destination: "shop", Concurrency: 3})
	r.NoteBacklog(map[string]int64{"shop": 5, "other": 0})
	if called != 105 {
		t.Errorf("the next hooks were called %d times", called)
	}
	if rate := r.LastMinute("shop"); rate.Delivered != 100 || rate.Failed != 0 || *rate.P50 < 0.03 || *rate.P50 > 0.07 || *rate.P99 > 0.15 {
		t.Errorf("%+v, p50 %v", rate, *rate.P50)
	}
	// Latency counts from the commit, with all waits, and a response from the request.
	if rate := r.LastMinute(""); *rate.LatencyP50 < 30*60 || *rate.LatencyP50 > 70*60 || *rate.LatencyP99 > 150*60 {
		t.Errorf("p50 %v, p99 %v of the latency", *rate.LatencyP50, *rate.LatencyP99)
	}
	if s := r.Series(""); len(s.Times) != 0 {
		t.Errorf("the present step is shown: %+v", s)
	}
	now = now.Add(Step)
	s := r.Series("")
	if len(s.Times) != 1 || s.Delivered[0] != 600 || s.Failed[0] != 12 || *s.Backlog[0] != 5 || s.P99[0] == nil || s.LatencyP50[0] == nil || *s.LatencyP99[0] <= *s.P99[0] {
		t.Errorf("%+v", s)
	}
	if state, known := r.Lane("shop"); !known || state.Concurrency != 3 {
		t.Errorf("%+v", state)
	}
	now = now.Add(2 * Span)
	s = r.Series("shop")
	if len(s.Times) != int(slots)-1 || s.Delivered[0] != 0 || s.P50[0] != nil || s.Backlog[0] != nil {
		t.Errorf("what is older than an hour is shown: %d points, %v", len(s.Times), s.Delivered[0])
	}
	if rate := r.LastMinute(""); rate != (Rate{}) {
		t.Errorf("%+v", rate)
	}
}
