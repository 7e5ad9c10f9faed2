package consumer

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// Many more strangers than the budget holds, each with a body that does not end, and each of which
// comes again when it has lost its room, let an event of 20 KiB wait for less than a second,
// whatever the length of their bodies. If theirs are of about the length of the event, its sender
// must be known. The clock is the bubble's.
func TestSecurityStrangersOfAnyLengthKeepNoEvent(t *testing.T) {
	t.Parallel()
	const event = 20 << 10
	for _, length := range []int64{4100, 12 << 10, event, 40 << 10, 256 << 10, 1 << 20} {
		for rank := range ranks {
			if rank == 0 && length > 16<<10 && length <= 32<<10 {
				continue // nothing tells the event from bodies of its length
			}
			t.Run(fmt.Sprint(length, " bytes, rank ", rank), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					b := newBudget(1 << 20)
					ctx, cancel := context.WithCancel(t.Context())
					var strangers sync.WaitGroup
					for range 375 { // 3,000 at the usual 8 MiB
						strangers.Go(func() {
							for ctx.Err() == nil {
								lost, end := context.WithCancel(ctx)
								s := &share{bytes: length, end: end}
								if b.take(ctx, time.Now().Add(time.Hour), s) {
									<-lost.Done()
									b.keep(s)
									b.give(s)
								}
								end()
							}
						})
					}
					<-time.After(15 * time.Second)
					for range 20 {
						began := time.Now()
						s := &share{bytes: event, rank: rank, end: func() {}}
						if !b.take(ctx, time.Now().Add(time.Hour), s) || time.Since(began) > time.Second {
							t.Errorf("an event waits for %v", time.Since(began))
						}
						b.keep(s)
						b.give(s)
						<-time.After(37 * time.Millisecond)
					}
					cancel()
					strangers.Wait()
					if b.free != 1<<20 || b.coming != 0 || len(b.reading) != 0 {
						t.Errorf("%d bytes are free, %d are coming, %d bodies are read", b.free, b.coming, len(b.reading))
					}
				})
			})
		}
	}
}

func TestSendersAreKnownByConnectionAndAddress(t *testing.T) {
	t.Parallel()
	var s senders
	for range 2 {
		s.add("192.0.2.1:1000")
	}
	s.add("") // a message of a log
	for remote, want := range map[string]int{"192.0.2.1:1000": 2, "192.0.2.1:1001": 1, "192.0.2.2:1000": 0, "[2001:db8::1]:1000": 0, "": 0} {
		if got := s.rank(remote); got != want {
			t.Errorf("%q has rank %d, want %d", remote, got, want)
		}
	}
	for i := range 10 * mostSenders {
		s.add(fmt.Sprintf("192.0.2.3:%d", i))
	}
	if n := len(s.known); n > mostSenders+1 || s.rank("192.0.2.3:40959") != 2 {
		t.Errorf("%d are remembered", n)
	}
}
