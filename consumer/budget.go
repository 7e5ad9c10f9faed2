package consumer

import (
	"container/heap"
	"context"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// fullSpeed is in bytes a second. A slower body falls behind once it has used up slack, which
	// the network and a busy machine need. A body that is behind loses its room to one that waits.
	// Clients that want to keep the budget full must therefore send as much as it holds, again and
	// again.
	fullSpeed = 2 << 20
	slack     = 250 * time.Millisecond

	// sizes is how many classes of length bodies have: up to 8 KiB, up to 16 KiB, and so on.
	sizes = 8
)

// A budget is the memory that all unverified bodies share. A body gets room for its whole length at
// once, or waits for it without holding any. While one waits, the body that is furthest behind
// fullSpeed loses its room. A budget is safe for concurrent use.
//
// Those that wait do so in queues, by their length and by what is known of their sender, and each
// queue gets the same share of the room. So many bodies of one length keep none of another length,
// and strangers keep none of a sender that has proven itself. Within a queue the first comes first.
type budget struct {
	unbounded sync.Once // said that BodyTimeout has no effect

	mu      sync.Mutex
	free    int64
	coming  int64   // lost by bodies that have not given it back yet
	reading reading // those that can lose their room
	waiting [sizes * ranks]queue
	level   int64       // what the queue that was served last has had
	recheck *time.Timer // calls serve when the next body falls behind
}

// A queue is of bodies that wait for room, the first ones first.
type queue struct {
	shares []*share
	had    int64 // bytes of room; comparable among queues that have shares
}

// A share is the room of one body.
type share struct {
	bytes   int64
	rank    int          // of the sender
	end     func()       // makes the body's Read fail; nil: nothing can, and the room is kept
	arrived atomic.Int64 // bytes

	// The budget's mutex guards the fields below.
	since time.Time // it has room
	falls time.Time // behind, not before then
	at    int       // among those that are read; -1: none of them
	ready chan struct{}
	lost  bool
}

// behind returns the time at which the body falls behind unless more of it arrives.
func (s *share) behind() time.Time {
	return s.since.Add(slack + time.Duration(s.arrived.Load())*time.Second/fullSpeed)
}

func newBudget(bytes int64) *budget { return &budget{free: bytes} }

// take waits for the room of s. It reports false when ctx ends or until comes first.
func (b *budget) take(ctx context.Context, until time.Time, s *share) bool {
	s.ready, s.at = make(chan struct{}), -1
	b.mu.Lock()
	q := &b.waiting[s.rank*sizes+min(bits.Len64(uint64(s.bytes-1)>>13), sizes-1)]
	if len(q.shares) == 0 {
		q.had = max(q.had, b.level) // what it did not need meanwhile is no credit
	}
	q.shares = append(q.shares, s)
	b.serve()
	b.mu.Unlock()
	select {
	case <-s.ready: // without a timer
		return true
	default:
	}
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-s.ready:
		return true
	case <-ctx.Done():
	case <-timer.C:
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	at := slices.Index(q.shares, s)
	if at < 0 {
		return true // it came meanwhile
	}
	q.shares = slices.Delete(q.shares, at, at+1)
	b.serve()
	return false
}

// keep ends the reading of a body and reports whether it still has its room, or needs none. The
// body keeps the room until give is called.
func (b *budget) keep(s *share) bool {
	if s == nil {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reading.remove(s)
	return !s.lost
}

// give returns the room of s to the budget.
func (b *budget) give(s *share) {
	if s == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reading.remove(s)
	b.free += s.bytes
	if s.lost {
		b.coming -= s.bytes
	}
	b.serve()
}

// serve gives room to the waiting bodies, in turn. When none is free it takes the room of bodies
// that are behind. The caller holds mu.
func (b *budget) serve() {
	for q := b.next(); q != nil; q = b.next() {
		next := q.shares[0]
		if b.free >= next.bytes {
			q.shares = slices.Delete(q.shares, 0, 1)
			b.level = q.had
			q.had += next.bytes
			b.free -= next.bytes
			next.since = time.Now()
			if next.end != nil {
				next.falls = next.behind()
				heap.Push(&b.reading, next)
			}
			close(next.ready)
			continue
		}
		if b.free+b.coming >= next.bytes {
			return // when it is given back
		}
		last := b.reading.furthestBehind()
		if last == nil {
			return
		}
		if wait := time.Until(last.falls); wait > 0 {
			b.checkIn(wait)
			return
		}
		b.reading.remove(last)
		last.lost = true
		b.coming += last.bytes
		last.end()
	}
}

// next returns the queue whose turn it is: of those with shares the one that has had least; nil:
// none has any.
func (b *budget) next() (next *queue) {
	for i := range b.waiting {
		if q := &b.waiting[i]; len(q.shares) > 0 && (next == nil || q.had < next.had) {
			next = q
		}
	}
	return next
}

func (b *budget) checkIn(wait time.Duration) {
	if b.recheck != nil {
		b.recheck.Reset(wait)
		return
	}
	b.recheck = time.AfterFunc(wait, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.serve()
	})
}

// reading is a heap of the bodies that are read, by when they fall behind. A body that has arrived
// further since falls behind later than it says.
type reading []*share

// furthestBehind returns the body that falls behind first; nil: there is none.
func (r *reading) furthestBehind() *share {
	for len(*r) > 0 {
		first := (*r)[0]
		falls := first.behind()
		if falls.Equal(first.falls) {
			return first
		}
		first.falls = falls
		heap.Fix(r, 0)
	}
	return nil
}

func (r *reading) remove(s *share) {
	if s.at >= 0 {
		heap.Remove(r, s.at)
	}
}

// The methods of heap.Interface.

func (r reading) Len() int           { return len(r) }
func (r reading) Less(i, j int) bool { return r[i].falls.Before(r[j].falls) }
func (r reading) Swap(i, j int)      { r[i], r[j], r[i].at, r[j].at = r[j], r[i], j, i }

func (r *reading) Push(s any) {
	s.(*share).at = len(*r)
	*r = append(*r, s.(*share))
}

func (r *reading) Pop() any {
	last := len(*r) - 1
	s := (*r)[last]
	(*r)[last], *r = nil, (*r)[:last]
	s.at = -1
	return s
}
