package lane

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func lanesOf(t *testing.T, destinations ...post.Destination) *Lanes {
	t.Helper()
	ls := New(func(d post.Destination) (*post.Endpoint, error) { return post.NewEndpoint(d, "") })
	set(t, ls, destinations...)
	return ls
}

// set changes the destinations as a reload does.
func set(t *testing.T, ls *Lanes, destinations ...post.Destination) {
	t.Helper()
	changed, err := ls.Endpoints(destinations)
	if err == nil {
		err = ls.Set(time.Now(), destinations, changed)
	}
	testkit.Must(t, err)
}

func to(name string) post.Destination {
	d := post.Destination{Name: name, URL: "http://receiver.test/" + name, Breaker: policy.BreakerPolicy{Failures: 1}}
	return d.WithDefaults(post.Egress{})
}

// many returns more destinations than are made with the relay.
func many(n int) (list []post.Destination) {
	for i := range n {
		list = append(list, to(fmt.Sprintf("d%03d", i)))
	}
	return list
}

// A reload keeps lanes whose destination stays as it is, gives others a new endpoint, and keeps
// what was removed from sending.
func TestSetKeepsLanes(t *testing.T) {
	t.Parallel()
	ls := lanesOf(t, to("a"), to("b"), to("c"))
	a, b, c := ls.Get("a"), ls.Get("b"), ls.Get("c")
	endpointA, endpointB := a.Current(), b.Current()
	changed := to("b")
	changed.URL += "/elsewhere"
	set(t, ls, to("a"), changed)
	if ls.Get("a") != a || a.Current() != endpointA {
		t.Error("a lane whose destination stays is another one")
	}
	if ls.Get("b") != b || b.Current() == endpointB || b.Current().URL.Path != "/b/elsewhere" {
		t.Errorf("b still leads to %s", b.Current().URL)
	}
	if !c.IsRemoved() || c.StopReason(time.Now()) != policy.ReasonRemoved || ls.Get("c") != c || slices.Contains(ls.List(), c) || !slices.Contains(ls.All(), c) {
		t.Error("the lane of a removed destination is not kept for what is in flight")
	}
	if ls.Get("d") != nil {
		t.Error("a lane of a destination that is not configured")
	}
	set(t, ls, to("a"), to("c"))
	if c.IsRemoved() || ls.Get("c") != c {
		t.Error("a destination that came back is still removed")
	}
}

// Of many destinations a lane is made when it is asked for, visited while it works, at rest when a
// turn has nothing to do for it, and forgotten after a while, unless it remembers what a new one
// would not know.
func TestManyLanesRestAndAreForgotten(t *testing.T) {
	t.Parallel()
	ls := lanesOf(t, many(Few+20)...)
	if !ls.AreMany() || len(ls.List()) != 0 {
		t.Fatalf("%d lanes were made with the relay", len(ls.List()))
	}
	now := time.Now()
	quiet, asked := ls.Get("d001"), ls.Get("d002")
	testkit.Equal(t, "a lane that was only asked for is visited", len(ls.Visited()), 0)
	for _, l := range []*Lane{quiet, asked} {
		ls.Engage(l)
		l.RestartScans()
	}
	if got := ls.Visited(); len(got) != 2 {
		t.Fatalf("%d lanes work", len(got))
	}
	ls.Dismiss(now, nil)
	testkit.Equal(t, "a lane rests that has yet to read what is due", len(ls.Visited()), 2)
	for _, l := range []*Lane{quiet, asked} { // as if all had been read
		l.Cursors[Backlog].Rest(now.Add(time.Hour))
		l.Cursors[Replays].Rest(now.Add(time.Hour))
	}
	asked.flow.Close(now, time.Hour) // its receiver has asked to wait
	var reported []State
	now = now.Add(2 * time.Second)
	ls.Dismiss(now, func(s State) { reported = append(reported, s) })
	if len(ls.Visited()) != 0 || len(reported) != 2 {
		t.Errorf("%d lanes work, %d states were reported", len(ls.Visited()), len(reported))
	}
	ls.Dismiss(now.Add(forgetAfter/2), nil)
	if ls.Get("d001") != quiet {
		t.Error("a lane was forgotten too soon")
	}
	ls.Dismiss(now.Add(2*forgetAfter), nil)
	if len(ls.List()) != 1 || ls.List()[0] != asked {
		t.Errorf("%d lanes are left", len(ls.List()))
	}
	if again := ls.Get("d001"); again == quiet || again == nil || !again.Stopped {
		t.Error("a lane that was forgotten is not made again, at rest")
	}
	ls.Engage(quiet) // by a goroutine that still has it
	testkit.Equal(t, "a lane that was forgotten works", len(ls.Visited()), 0)
}

// Lanes that were few become many, and the other way round, and each stays what it was.
func TestLanesBecomeManyAndFew(t *testing.T) {
	t.Parallel()
	all := many(Few + 1)
	ls := lanesOf(t, all[:10]...)
	first := ls.Get("d000")
	set(t, ls, all...)
	if ls.Get("d000") != first || len(ls.Visited()) != 10 {
		t.Errorf("of 10 lanes that were made %d work", len(ls.Visited()))
	}
	set(t, ls, all[:20]...)
	if ls.Get("d000") != first || len(ls.Visited()) != 20 || ls.AreMany() {
		t.Errorf("%d of 20 lanes are visited", len(ls.Visited()))
	}
}

// What a beat read of destinations opens and closes breakers, and makes lanes work that have to be
// probed.
func TestApplyStates(t *testing.T) {
	t.Parallel()
	ls := lanesOf(t, many(Few+20)...)
	now := time.Now()
	open := []policy.DestinationState{{Destination: "d003", Breaker: "open", Remaining: time.Minute}, {Destination: "unknown", Breaker: "open"}}
	if changed, closed := ls.ApplyStates(now, now, open, 1); !changed || closed != nil {
		t.Error("no breaker opened")
	}
	l := ls.Get("d003")
	if got := ls.Visited(); len(got) != 1 || got[0] != l || l.State().Breaker != "open" || l.State().Concurrency != 0 || l.StopReason(time.Now()) != policy.ReasonBreaker {
		t.Errorf("%+v, %d lanes work", l.State(), len(got))
	}
	if changed, _ := ls.ApplyStates(now, now, open, 1); changed {
		t.Error("the same state is a change")
	}
	if changed, closed := ls.ApplyStates(now.Add(time.Second), now.Add(time.Second), nil, 1); !changed || len(closed) != 1 || closed[0] != l.Name || l.State().Breaker != "closed" {
		t.Errorf("another relay closed the breaker, and it is %s", l.State().Breaker)
	}
}

// A relay that is refused alone holds and tries the lane, and says so.
func TestStateOfARefusedRelay(t *testing.T) {
	t.Parallel()
	l, now := lanesOf(t, to("shop")).Get("shop"), time.Now()
	var states []string
	for _, change := range []func(*policy.Breaker){
		func(b *policy.Breaker) { b.Enter(now, policy.BreakerOpen); b.HoldAlone(now) },
		func(b *policy.Breaker) { b.TryAlone(now) },
		func(b *policy.Breaker) { b.Close(now); b.ClosedAlone(now) },
	} {
		l.Change(change)
		states = append(states, l.State().Breaker)
	}
	testkit.Equal(t, "states", states, []string{"open", "half_open", "closed"})
}

// A take brings as much as each lane that sends quickly has room for, whatever the others hold.
func TestRangeSize(t *testing.T) {
	t.Parallel()
	ls := lanesOf(t, to("fast"), to("slow"))
	now := time.Now()
	testkit.Equal(t, "for lanes that hold nothing", ls.RangeSize(now, lease, 2000), 2000)
	fast, slow := ls.Get("fast"), ls.Get("slow")
	for _, l := range []*Lane{fast, slow} {
		l.Push(now, Live, singly(make([]Delivery, 3900)))
		l.Release(Live, 100)
	}
	fast.rate.PerSecond = fastLane
	testkit.Equal(t, "beside a fast lane that holds 3,800", ls.RangeSize(fast.releasedAt, lease, 2000), maxTaken-3800)
	if parts := ls.Divide(256, nil); parts.Part(policy.BreakerClosed, true) != 128 {
		t.Errorf("a part of two lanes that work: %d of 256", parts.Part(policy.BreakerClosed, true))
	}
}
