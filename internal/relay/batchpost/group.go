package batchpost

import (
	"cmp"
	"context"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// requests is how many batches are under way at once, unless more than a full one waits. A lone
// event finds one of them free and leaves at once; with fewer, it would wait for a batch before it,
// with more, batches would be small.
const requests = 4

// A Call is one attempt that may share a request with others.
type Call struct {
	Key  string
	Line []byte            // of the batch's body
	Sent map[string]string // the headers of the event
	// Result is set by the function that sends the batch. Alone: it is not, the receiver did not
	// take the batch, and the attempt is to be made by its own request.
	Result policy.Result
	Alone  bool

	begun time.Time
	done  chan struct{}
	lead  chan struct{} // holds something when it is this call's turn to send
}

// A Group sends calls in batches. It is safe for concurrent use.
type Group struct {
	// Max and MaxBytes bound a batch. A line is not larger than the latter.
	Max, MaxBytes int
	// Timeout of a call. Half of it is the longest time that a call waits for its turn.
	Timeout time.Duration
	// Send makes the request of a batch and sets the result of each call. ctx ends when the first
	// call has to have its result.
	Send func(ctx context.Context, batch []*Call)

	mu      sync.Mutex
	waiting []*Call
	sending int

	limit    int           // how many calls a batch has at most, as found; 0: Max
	strained time.Time     // when that was last reduced
	calm     time.Duration // for how long it is not raised then
}

// Times for which batches stay small after they were too large.
const (
	firstCalm   = time.Second
	longestCalm = 5 * time.Minute
)

// strained reports whether a batch was too much for its receiver: handlers that wait for each
// other's locks, or that are together slower than the timeout, fail many events of a batch, and
// none that comes alone.
func strained(batch []*Call) bool {
	failed := 0
	for _, c := range batch {
		if !c.Alone && mayBeShared(c.Result) {
			failed++
		}
	}
	return failed > max(1, len(batch)/10)
}

// mayBeShared reports whether a result may come from what the event was sent with.
func mayBeShared(v policy.Result) bool {
	switch v.Reason {
	case policy.ReasonServerError, policy.ReasonUnavailable, policy.ReasonTimeout, policy.ReasonNetwork, policy.ReasonMalformed, policy.ReasonUnexpected:
		return v.Posted && !v.Unreached
	}
	return false
}

// learn finds how many events a batch may have: half as many after one that was too much, and after
// a while some more with each full one that was not, as a window of TCP does (RFC 5681, section
// 3.1). The while doubles each time that more was too much again: where handlers lock the rows of
// each other, every attempt costs a second of waiting.
func (g *Group) learn(batch []*Call, now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	limit := g.most()
	switch {
	case strained(batch):
		if batch[0].begun.Before(g.strained) { // as large as the one before, which has been learned from
			return
		}
		g.limit, g.strained = max(1, min(limit, len(batch))/2), now
		g.calm = min(max(2*g.calm, firstCalm), longestCalm)
	case g.limit > 0 && len(batch) >= limit && now.Sub(g.strained) >= g.calm:
		if g.limit = limit + 1 + limit/16; g.limit >= g.Max {
			g.limit, g.calm = 0, 0
		}
	}
}

// most is how many events a batch may have. g.mu is held.
func (g *Group) most() int { return cmp.Or(g.limit, g.Max) }

// Do has c sent with what waits beside it, and returns when c has its result. Nothing waits for
// more to come. All calls have one context: the end of the relay.
func (g *Group) Do(ctx context.Context, c *Call) {
	c.begun, c.done, c.lead = time.Now(), make(chan struct{}), make(chan struct{}, 1)
	g.mu.Lock()
	g.waiting = append(g.waiting, c)
	if g.sending < requests || len(g.waiting) >= g.most() {
		g.sending++
		c.lead <- struct{}{}
	}
	g.mu.Unlock()
	select {
	case <-c.done:
		g.pass(c)
		return
	case <-c.lead:
	case <-ctx.Done(): // what waits is sent, and fails, at once
		g.mu.Lock()
		g.sending++
		g.mu.Unlock()
	}
	runtime.Gosched() // calls that are about to come share the batch
	for {
		select {
		case <-c.done:
			g.pass(c)
			g.handOver()
			return
		default:
		}
		if batch := g.next(); batch != nil {
			g.post(ctx, batch)
		} else {
			<-c.done // in another one's batch
		}
	}
}

// pass hands the turn of a call over that has got it beside its result.
func (g *Group) pass(c *Call) {
	select {
	case <-c.lead:
		g.handOver()
	default:
	}
}

// handOver gives the turn to send to a call that waits, if there is one.
func (g *Group) handOver() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.waiting) == 0 {
		g.sending--
		return
	}
	select {
	case g.waiting[0].lead <- struct{}{}:
	default: // it has one already
		g.sending--
	}
}

func (g *Group) post(ctx context.Context, batch []*Call) {
	defer func() {
		if defect := recover(); defect != nil {
			for _, c := range batch {
				c.Result, c.Alone = policy.Panicked(defect), false
			}
		}
		g.learn(batch, time.Now())
		first := true // of the failures that the request has made, which is one
		for _, c := range batch {
			if mayBeShared(c.Result) {
				c.Result.Shared, first = !first, false
			}
			close(c.done)
		}
	}()
	ctx, cancel := context.WithDeadline(ctx, batch[0].begun.Add(g.Timeout))
	defer cancel()
	g.Send(ctx, batch)
}

// next takes the calls of the next batch; nil: none waits. A call that has waited for long gets its
// result here: nothing was sent. Two calls with one key never share a batch, whose answers name
// keys.
func (g *Group) next() (batch []*Call) {
	g.mu.Lock()
	defer g.mu.Unlock()
	size, now := 0, time.Now()
	taken := 0
	for ; taken < len(g.waiting) && len(batch) < g.most(); taken++ {
		c := g.waiting[taken]
		if now.Sub(c.begun) > g.Timeout/2 {
			c.Result = policy.Result{Reason: policy.ReasonLease}
			close(c.done)
			continue
		}
		if size += len(c.Line); size > g.MaxBytes || slices.ContainsFunc(batch, func(other *Call) bool { return other.Key == c.Key }) {
			break
		}
		batch = append(batch, c)
	}
	g.waiting = slices.Delete(g.waiting, 0, taken)
	return batch
}
