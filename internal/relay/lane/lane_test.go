package lane

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/outbox-relay/outbox-relay/internal/relay/capacity"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
)

// singly makes a run of each delivery.
func singly(deliveries []Delivery) (all [][]Delivery) {
	for i := range deliveries {
		all = append(all, deliveries[i:i+1])
	}
	return all
}

const lease = time.Minute

func laneOf(limit int) *Lane {
	d := post.Destination{Name: "d", Timeout: post.DefaultTimeout, MaxInFlight: limit}
	return newLane(&post.Endpoint{Destination: d})
}

// However claims, senders, settlements and limits interleave: every delivery is handed out once,
// and none stays in the queue without a sender.
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
				run, _ := l.NextRun(time.Now())
				if run == nil {
					return
				}
				sent[run[0].EventID].Add(1)
				for now := running.Load(); ; {
					seen := most.Load()
					if now <= seen || most.CompareAndSwap(seen, now) {
						break
					}
				}
				l.Release(run[0].Class, 1)
			}
		}
		pushed, widest := 0, l.share
		for range rapid.IntRange(1, 40).Draw(t, "claims") {
			batch := make([]Delivery, rapid.IntRange(0, 50).Draw(t, "batch"))
			for i := range batch {
				batch[i].EventID = int64(pushed + i)
			}
			pushed += len(batch)
			class := Class(rapid.IntRange(0, Classes-1).Draw(t, "class"))
			for i := range batch {
				batch[i].Class = class
			}
			for range l.Push(time.Now(), class, singly(batch)) {
				senders.Go(send)
			}
			if rapid.Bool().Draw(t, "change the limit") {
				limit := rapid.IntRange(1, 8).Draw(t, "new limit")
				widest = max(widest, limit)
				l.mu.Lock()
				l.share = limit
				l.mu.Unlock()
			}
		}
		senders.Wait()
		for i := range pushed {
			if n := sent[i].Load(); n != 1 {
				t.Fatalf("delivery %d of %d was handed out %d times", i, pushed, n)
			}
		}
		if _, waiting := l.nextClass(); l.senders != 0 || l.busy() || waiting {
			t.Fatalf("%d senders are left, busy %t, waiting %t", l.senders, l.busy(), waiting)
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
			room, worthwhile := l.Room(now, lease)
			free := room[Backlog]
			if free < 0 || worthwhile && free == 0 && room[Live] == 0 {
				t.Fatalf("room for %d, worthwhile %t", free, worthwhile)
			}
			q := &l.queues[Backlog]
			if q.taken+free > max(2*limit, maxTaken) && free > 0 {
				t.Fatalf("%d taken and room for %d, with a limit of %d", q.taken, free, limit)
			}
			if q.taken == 0 && free < limit {
				t.Fatalf("an empty lane with a limit of %d has room for %d", limit, free)
			}
			n := rapid.IntRange(0, free).Draw(t, "claimed")
			l.Push(now, Backlog, singly(make([]Delivery, n)))
			queued += n
			settled := rapid.IntRange(0, queued).Draw(t, "settled")
			for range settled {
				q.pop()
			}
			queued -= settled
			l.Release(Backlog, settled)
		}
	})
}

func TestRoomIsWorthAClaimOnlyInBatches(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	l := laneOf(64)
	l.claimed = now
	for c := range Class(Classes) {
		l.Push(now, c, singly(make([]Delivery, 128)))
	}
	if free, worthwhile := l.Room(now, lease); free != [Classes]int{} || worthwhile {
		t.Errorf("a full lane has room for %d (%t)", free, worthwhile)
	}
	l.Release(Live, 1)
	if free, worthwhile := l.Room(now, lease); free[Live] != 1 || worthwhile {
		t.Errorf("one free place at once: %d (%t)", free, worthwhile)
	}
	if free, worthwhile := l.Room(now.Add(MinPace), lease); free[Live] != 1 || !worthwhile {
		t.Errorf("one free place after a while: %d (%t)", free, worthwhile)
	}
	l.Release(Live, 31)
	l.rate = capacity.Throughput{}
	if free, worthwhile := l.Room(now, lease); free[Live] != 32 || !worthwhile {
		t.Errorf("a quarter free: %d (%t)", free, worthwhile)
	}
}

// A drain's first claims need not be small until its rate has been measured: how long the first
// answers take says how many a lane can send.
func TestFirstAnswersSayHowMuchToClaim(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	for name, c := range map[string]struct {
		limit float64
		takes time.Duration
		want  int
	}{
		"no answer yet":   {want: 2 * 64},
		"10 ms each":      {takes: 10 * time.Millisecond, want: 64 + 20*64},
		"nearly no time":  {takes: time.Microsecond, want: maxTaken},
		"slowly":          {takes: 5 * time.Second, want: 64 + 2},
		"at a given rate": {limit: 100, takes: 10 * time.Millisecond, want: 64},
	} {
		l := newLane(&post.Endpoint{Destination: post.Destination{Name: "d", Timeout: post.DefaultTimeout, MaxInFlight: 64, RateLimit: c.limit}})
		l.perPost = c.takes
		if free, _ := l.Room(now, lease); free[Live] != c.want {
			t.Errorf("%s: room for %d, want %d", name, free[Live], c.want)
		}
	}
}

// What is written about memory (decision 6, the runbook) is what a lane may hold.
func TestPayloadsOfALaneAreBounded(t *testing.T) {
	t.Parallel()
	if most := (Classes*maxTaken + MaxBehind) * InlinePayload; most > 110<<20 {
		t.Errorf("a lane may hold %d MiB of payloads, and 110 are documented", most>>20)
	}
}
