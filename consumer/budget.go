package consumer

import (
	"context"
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

	// waitPerByte delays the turn of a body by its length. A body goes before one that is 16 KiB
	// longer and came up to ten seconds earlier, so long bodies wait behind the events. Bodies of
	// one length are served in the order of arrival.
	waitPerByte = 10 * time.Second / (16 << 10)
)

// A budget is the memory that all unverified bodies share. A body gets room for its whole length at
// once, or waits for it without holding any. While one waits, the body that is furthest behind
// fullSpeed loses its room. A budget is safe for concurrent use.
//
// It has no share for each peer address: behind a proxy all senders have one address, and an
// attacker may have many.
type budget struct {
	unbounded sync.Once // said that BodyTimeout has no effect

	mu      sync.Mutex
	free    int64
	coming  int64               // lost by bodies that have not given it back yet
	reading map[*share]struct{} // those that can lose their room
	waiting []*share            // by turn
	recheck *time.Timer         // calls serve when the next body falls behind
}

// A share is the room of one body.
type share struct {
	bytes   int64
	end     func()       // makes the body's Read fail; nil: nothing can, and the room is kept
	arrived atomic.Int64 // bytes

	// The budget's mutex guards the fields below.
	turn  time.Time
	since time.Time // it has room
	ready chan struct{}
	lost  bool
}

// behind returns the time at which the body falls behind unless more of it arrives.
func (s *share) behind() time.Time {
	return s.since.Add(slack + time.Duration(s.arrived.Load())*time.Second/fullSpeed)
}

func newBudget(bytes int64) *budget {
	return &budget{free: bytes, reading: map[*share]struct{}{}}
}

// take waits for the room of s. It reports false when ctx ends or until comes first.
func (b *budget) take(ctx context.Context, until time.Time, s *share) bool {
	s.turn, s.ready = time.Now().Add(time.Duration(s.bytes)*waitPerByte), make(chan struct{})
	b.mu.Lock()
	at, _ := slices.BinarySearchFunc(b.waiting, s.turn, func(w *share, turn time.Time) int { return w.turn.Compare(turn) })
	b.waiting = slices.Insert(b.waiting, at, s)
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
	at = slices.Index(b.waiting, s)
	if at < 0 {
		return true // it came meanwhile
	}
	b.waiting = slices.Delete(b.waiting, at, at+1)
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
	delete(b.reading, s)
	return !s.lost
}

// give returns the room of s to the budget.
func (b *budget) give(s *share) {
	if s == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.reading, s)
	b.free += s.bytes
	if s.lost {
		b.coming -= s.bytes
	}
	b.serve()
}

// serve gives room to the waiting bodies, in turn. When none is free it takes the room of bodies
// that are behind. The caller holds mu.
func (b *budget) serve() {
	for len(b.waiting) > 0 {
		next := b.waiting[0]
		if b.free >= next.bytes {
			b.waiting = slices.Delete(b.waiting, 0, 1)
			b.free -= next.bytes
			next.since = time.Now()
			if next.end != nil {
				b.reading[next] = struct{}{}
			}
			close(next.ready)
			continue
		}
		if b.free+b.coming >= next.bytes {
			return // when it is given back
		}
		last, falls := b.furthestBehind()
		if last == nil {
			return
		}
		if wait := time.Until(falls); wait > 0 {
			b.checkIn(wait)
			return
		}
		delete(b.reading, last)
		last.lost = true
		b.coming += last.bytes
		last.end()
	}
}

// furthestBehind returns the body that falls behind first, and when it does.
func (b *budget) furthestBehind() (last *share, falls time.Time) {
	for s := range b.reading {
		if at := s.behind(); last == nil || at.Before(falls) {
			last, falls = s, at
		}
	}
	return last, falls
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
