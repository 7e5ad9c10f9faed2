package batchpost

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A lone call leaves at once. What waits meanwhile shares requests, within the bounds of a batch,
// each key once.
func TestWhatWaitsTogetherIsSentTogether(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var sizes []int
		g := &Group{Max: 10, MaxBytes: 100, Timeout: time.Minute, Send: func(_ context.Context, batch []*Call) {
			<-time.After(time.Second) // of the bubble
			mu.Lock()
			defer mu.Unlock()
			sizes = append(sizes, len(batch))
			keys := map[string]bool{}
			for _, c := range batch {
				if keys[c.Key] {
					t.Errorf("key %s is twice in a batch", c.Key)
				}
				keys[c.Key] = true
				c.Result = policy.Result{Reason: policy.ReasonOK, Posted: true}
			}
		}}
		begun := time.Now()
		alone := &Call{Key: "alone", Line: []byte("x")}
		g.Do(t.Context(), alone)
		if took := time.Since(begun); took != time.Second || alone.Result.Reason != policy.ReasonOK {
			t.Errorf("a lone call took %s: %+v", took, alone.Result)
		}
		var done sync.WaitGroup
		calls := make([]*Call, 100)
		for i := range calls {
			calls[i] = &Call{Key: fmt.Sprint(i % 99), Line: make([]byte, 20)}
			done.Go(func() { g.Do(t.Context(), calls[i]) })
		}
		done.Wait()
		for i, c := range calls {
			if c.Result.Reason != policy.ReasonOK {
				t.Errorf("call %d: %+v", i, c.Result)
			}
		}
		if most := slices.Max(sizes); most > 5 || most < 2 {
			t.Errorf("the largest batch has %d lines of 20 bytes, want up to 5 in 100 bytes", most)
		}
		if len(sizes) > 60 {
			t.Errorf("%d requests for 101 calls", len(sizes))
		}
	})
}

// A call that has waited for half of its time is not sent any more, and a defect fails its batch
// alone.
func TestCallsThatCannotBeSent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := &Group{Max: 1, MaxBytes: 100, Timeout: 10 * time.Second, Send: func(ctx context.Context, batch []*Call) {
			if batch[0].Key == "defect" {
				panic("defect")
			}
			<-ctx.Done()
			batch[0].Result = policy.Result{Reason: policy.ReasonTimeout, Posted: true}
		}}
		defect := &Call{Key: "defect"}
		g.Do(t.Context(), defect)
		if defect.Result != policy.Panicked("defect") {
			t.Errorf("%+v", defect.Result)
		}
		g.Max = 100 // so that a call that waits is not sent for being a full batch
		var done sync.WaitGroup
		calls := make([]*Call, requests+3)
		for i := range calls {
			calls[i] = &Call{Key: fmt.Sprint(i), Line: make([]byte, 100)}
			done.Go(func() { g.Do(t.Context(), calls[i]) })
			synctest.Wait()
		}
		done.Wait()
		count := map[policy.Reason]int{}
		for _, c := range calls {
			count[c.Result.Reason]++
		}
		if count[policy.ReasonTimeout] != requests || count[policy.ReasonLease] != 3 {
			t.Errorf("%v", count)
		}
	})
}

// A receiver that fails many events of a batch gets smaller ones, and later larger ones again. Of
// the failures of a batch, one counts.
func TestBatchesFitTheReceiver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, testBatchesFitTheReceiver)
}

func testBatchesFitTheReceiver(t *testing.T) {
	bears := 20 // events in a batch
	var counted, largest int
	g := &Group{Max: 100, MaxBytes: 1 << 20, Timeout: time.Minute}
	g.Send = func(_ context.Context, batch []*Call) {
		largest = max(largest, len(batch))
		for i, c := range batch {
			c.Result = policy.Result{Reason: policy.ReasonOK, Posted: true}
			if len(batch) > bears || i == 7 && counted == 0 { // one in a batch says nothing
				c.Result.Reason = policy.ReasonServerError
			}
		}
	}
	send := func() {
		<-time.After(time.Second)
		batch := make([]*Call, g.most())
		for i := range batch {
			batch[i] = &Call{Key: fmt.Sprint(i), done: make(chan struct{}), begun: time.Now()}
		}
		g.post(t.Context(), batch)
		failed := 0
		for _, c := range batch {
			switch {
			case c.Result.Reason == policy.ReasonOK && c.Result.Shared:
				t.Error("a success is shared")
			case c.Result.Reason != policy.ReasonOK && !c.Result.Shared:
				failed++
			}
		}
		if failed > 1 {
			t.Errorf("of %d failures of one request %d count", len(batch), failed)
		}
		counted += failed
	}
	for range 3 {
		send()
	}
	if g.most() > bears || counted != 3 {
		t.Errorf("batches have %d events, %d failures", g.most(), counted)
	}
	late := &Call{Key: "sent before", done: make(chan struct{}), begun: g.strained.Add(-time.Second), Result: policy.Result{Reason: policy.ReasonServerError, Posted: true}}
	before := g.most()
	if g.learn([]*Call{late, late, late}, time.Now()); g.most() != before {
		t.Errorf("a batch of before has made batches of %d events of %d", g.most(), before)
	}
	largest, counted = 0, 0
	began := time.Now()
	for time.Since(began) < time.Hour {
		send()
	}
	if largest > bears+bears/4 || g.most() < bears/4 {
		t.Errorf("batches had up to %d events, and have %d", largest, g.most())
	}
	if counted > 3600/100 {
		t.Errorf("in an hour %d batches were too large", counted)
	}
	bears = 100
	for range 500 {
		send()
	}
	if g.most() != g.Max {
		t.Errorf("batches have %d events", g.most())
	}
	lone := []*Call{{Key: "a", done: make(chan struct{})}}
	g.Send = func(_ context.Context, batch []*Call) {
		batch[0].Result = policy.Result{Reason: policy.ReasonServerError, Posted: true}
	}
	if g.post(t.Context(), lone); lone[0].Result.Shared || g.most() != g.Max {
		t.Errorf("the failure of an event alone: %+v", lone[0].Result)
	}
}

// A receiver that refuses batches is asked again hours later.
func TestOffer(t *testing.T) {
	t.Parallel()
	var o Offer
	now := time.Now()
	state := func(at time.Time) [2]bool {
		made, asking := o.Made(at)
		return [2]bool{made, asking}
	}
	testkit.Equal(t, "a receiver is asked first", state(now), [2]bool{false, true})
	if !o.Learn(now, true) || o.Learn(now, true) || state(now) != [2]bool{true, false} {
		t.Error("an offer is news once, and holds")
	}
	if !o.Learn(now, false) || o.Learn(now, false) || state(now) != [2]bool{false, false} || state(now.Add(askAgain)) != [2]bool{false, true} {
		t.Error("a refusal is news once, and ends")
	}
	if o.Learn(now.Add(time.Hour), true) || state(now.Add(time.Hour)) != [2]bool{false, false} || !o.Learn(now.Add(askAgain), true) {
		t.Error("an offer in an answer to an earlier event, or to one that did not ask, ends the refusal")
	}
}
