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
)

// A lone call leaves at once. What waits meanwhile shares requests, within the bounds of a batch, each key once.
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

// A call that has waited for half of its time is not sent any more, and a defect fails its batch alone.
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

// A receiver that refuses batches is asked again hours later.
func TestOffer(t *testing.T) {
	t.Parallel()
	var o Offer
	now := time.Now()
	state := func(at time.Time) [2]bool {
		made, asking := o.Made(at)
		return [2]bool{made, asking}
	}
	if state(now) != [2]bool{false, true} {
		t.Error("a receiver is asked first")
	}
	if !o.Learn(now, true) || o.Learn(now, true) || state(now) != [2]bool{true, false} {
		t.Error("an offer is news once, and holds")
	}
	if !o.Learn(now, false) || o.Learn(now, false) || state(now) != [2]bool{false, false} || state(now.Add(askAgain)) != [2]bool{false, true} {
		t.Error("a refusal is news once, and ends")
	}
}
