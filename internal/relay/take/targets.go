package take

import (
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// A target is a destination as the claimer finds it when it hands out a range.
type target struct {
	lane    *lane.Lane    // nil: this relay does not serve it
	reason  policy.Reason // why nothing may be sent there now; empty: it may
	promise time.Duration
	room    int // how many deliveries the lane may still get
}

// whyNot returns why a delivery must become pending at once. Otherwise it counts the delivery, and
// returns nothing.
func (t *target) whyNot(d *lane.Delivery) policy.Reason {
	switch {
	case t.reason != "":
		return t.reason
	case d.Given.UntilDue(time.Now()) > 0:
		return policy.ReasonEarly
	case t.room == 0:
		return policy.ReasonFull
	}
	t.room--
	return ""
}

// targets are those of a range.
type targets struct {
	lanes  *lane.Lanes
	closed map[string]bool // of which this relay may send nothing
	lease  time.Duration
	all    map[string]*target
}

func (t *Taker) newTargets() *targets {
	return &targets{lanes: t.Lanes, closed: t.closed, lease: t.Lease, all: map[string]*target{}}
}

// of returns a destination's target.
func (ts *targets) of(destination string) *target {
	if t, known := ts.all[destination]; known {
		return t
	}
	t := &target{lane: ts.lanes.Get(destination)}
	switch {
	case t.lane == nil:
		t.reason = policy.ReasonRemoved
	case ts.closed[destination]:
		t.reason = policy.ReasonPaused
	default:
		ts.lanes.Engage(t.lane)
		now := time.Now()
		t.reason, t.room = t.lane.StopReason(now), t.lane.RoomForRange(now, ts.lease)
	}
	if t.lane != nil {
		t.promise = t.lane.Current().Destination.Retry.NotAfter
	}
	ts.all[destination] = t
	return t
}
