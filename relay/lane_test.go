package relay

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func laneOf(limit int) *lane {
	d := Destination{Name: "d", Timeout: DefaultTimeout, MaxInFlight: limit}
	return &lane{endpoint: &endpoint{destination: d}, limit: limit}
}

// However claims, senders, settlements and limits interleave: every delivery is handed out once, and none stays in the
// queue without a sender.
func TestLaneStrandsNoDelivery(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		l := laneOf(rapid.IntRange(1, 8).Draw(t, "limit"))
		var sent [2000]atomic.Int32
		var senders sync.WaitGroup
		var running, most atomic.Int32
		send := func() {
			running.Add(1)
			defer running.Add(-1)
			for {
				d, ok := l.next()
				if !ok {
					return
				}
				sent[d.eventID].Add(1)
				for now := running.Load(); ; {
					seen := most.Load()
					if now <= seen || most.CompareAndSwap(seen, now) {
						break
					}
				}
				l.release(1)
			}
		}
		pushed, widest := 0, l.limit
		for range rapid.IntRange(1, 40).Draw(t, "claims") {
			batch := make([]delivery, rapid.IntRange(0, 50).Draw(t, "batch"))
			for i := range batch {
				batch[i].eventID = int64(pushed + i)
			}
			pushed += len(batch)
			for range l.push(batch) {
				senders.Go(send)
			}
			if rapid.Bool().Draw(t, "change the limit") {
				limit := rapid.IntRange(1, 8).Draw(t, "new limit")
				widest = max(widest, limit)
				l.setLimit(limit)
			}
		}
		senders.Wait()
		for i := range pushed {
			if n := sent[i].Load(); n != 1 {
				t.Fatalf("delivery %d of %d was handed out %d times", i, pushed, n)
			}
		}
		if l.senders != 0 || l.taken != 0 || l.head != len(l.queue) {
			t.Fatalf("%d senders, %d taken, %d queued are left", l.senders, l.taken, len(l.queue)-l.head)
		}
		// One more than allowed can be seen while a sender that has left is still on its way out.
		if n := int(most.Load()); n > 2*widest {
			t.Fatalf("%d senders at once, with a limit of %d", n, widest)
		}
	})
}

func TestLaneNeverHoldsMoreThanItsRoom(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 10_000).Draw(t, "limit")
		l := laneOf(limit)
		now := time.Unix(1_000_000, 0)
		queued := 0
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.Int64Range(0, int64(2*time.Second)).Draw(t, "passes")))
			free, worthwhile := l.room(now, DefaultLease)
			if free < 0 || worthwhile && free == 0 {
				t.Fatalf("room for %d, worthwhile %t", free, worthwhile)
			}
			if l.taken+free > max(2*limit, maxTaken) && free > 0 {
				t.Fatalf("%d taken and room for %d, with a limit of %d", l.taken, free, limit)
			}
			if l.taken == 0 && free < limit {
				t.Fatalf("an empty lane with a limit of %d has room for %d", limit, free)
			}
			n := rapid.IntRange(0, free).Draw(t, "claimed")
			l.push(make([]delivery, n))
			queued += n
			settled := rapid.IntRange(0, queued).Draw(t, "settled")
			for range settled {
				l.head++
			}
			queued -= settled
			l.release(settled)
		}
	})
}

func TestRoomIsWorthAClaimOnlyInBatches(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	l := laneOf(64)
	l.asked = now
	l.push(make([]delivery, 128))
	if free, worthwhile := l.room(now, DefaultLease); free != 0 || worthwhile {
		t.Errorf("a full lane has room for %d (%t)", free, worthwhile)
	}
	l.release(1)
	if free, worthwhile := l.room(now, DefaultLease); free != 1 || worthwhile {
		t.Errorf("one free place at once: %d (%t)", free, worthwhile)
	}
	if free, worthwhile := l.room(now.Add(minPace), DefaultLease); free != 1 || !worthwhile {
		t.Errorf("one free place after a while: %d (%t)", free, worthwhile)
	}
	l.release(31)
	l.rate = rate{}
	if free, worthwhile := l.room(now, DefaultLease); free != 32 || !worthwhile {
		t.Errorf("a quarter free: %d (%t)", free, worthwhile)
	}
}

func TestRate(t *testing.T) {
	t.Parallel()
	start := time.Unix(1_000_000, 0)
	var r rate
	if _, known := r.measure(start, 50); known {
		t.Error("known at once")
	}
	if _, known := r.measure(start.Add(rateWindow-1), 50); known {
		t.Error("known before the first window")
	}
	if got, known := r.measure(start.Add(100*time.Millisecond), 50); !known || got != 1000 {
		t.Errorf("100 in 100 ms: %g (%t)", got, known)
	}
	if got, _ := r.measure(start.Add(200*time.Millisecond), 200); got != 1250 {
		t.Errorf("a quarter of the way from 1000 to 2000: %g", got)
	}
	if got, _ := r.measure(start.Add(time.Hour), 0); got != 1250 {
		t.Errorf("a pause changes it to %g", got)
	}
	if got, _ := r.measure(start.Add(time.Hour+100*time.Millisecond), 125); got != 1250 {
		t.Errorf("the pause counts: %g", got)
	}
	// A clock that stands still or jumps back yields no infinity and no negative rate.
	for _, now := range []time.Time{start.Add(time.Hour), start.Add(-time.Hour), start.Add(2 * time.Hour)} {
		if got, _ := r.measure(now, 1000); got < 0 || got > 1e12 {
			t.Errorf("%g", got)
		}
	}
}
