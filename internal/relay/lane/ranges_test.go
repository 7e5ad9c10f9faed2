package lane

import (
	"slices"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// keyed returns deliveries of a range, of one ordering key.
func keyed(key string, ids ...int64) (list []Delivery) {
	for _, id := range ids {
		list = append(list, Delivery{EventID: id, Given: &settle.InHand{}, Event: post.Event{OrderingKey: &key}, LeaseEnds: time.Now().Add(time.Hour)})
	}
	return list
}

func ids(deliveries []Delivery) (list []int64) {
	for _, d := range deliveries {
		list = append(list, d.EventID)
	}
	return list
}

func wantIDs(t *testing.T, what string, got []Delivery, want ...int64) {
	t.Helper()
	if !slices.Equal(ids(got), want) {
		t.Errorf("%s: %v, want %v", what, ids(got), want)
	}
}

// The deliveries of a key in hand are sent one after the other. When one is not delivered, what
// waits behind it is given back, and nothing of the key is sent until that is written.
func TestKeyInHandIsSentInOrder(t *testing.T) {
	t.Parallel()
	l := laneOf(8)
	now := time.Now()
	start, refused := l.Give(append(keyed("k", 1, 2, 3), keyed("other", 4)...))
	if start != 2 || len(refused) > 0 {
		t.Fatalf("%d senders, %v refused", start, ids(refused))
	}
	run, _ := l.NextRun(now)
	wantIDs(t, "first", run, 1)
	other, _ := l.NextRun(now)
	wantIDs(t, "of another key", other, 4)
	wantIDs(t, "after it was delivered", l.NextOfKey("k"), 2, 3)
	_, _ = l.Give(keyed("k", 5))
	wantIDs(t, "behind one that was not delivered", l.StopKey("k"), 5)
	if _, refused := l.Give(keyed("k", 6)); len(refused) != 1 {
		t.Error("a delivery overtakes the one that was not delivered")
	}
	for range 4 {
		l.keySettled("k", Live, false, true)
	}
	if _, refused := l.Give(keyed("k", 7)); len(refused) != 1 {
		t.Error("a delivery overtakes a row that the claimer has not asked about")
	}
	l.ForgetBlocked() // a statement that begins now sees the row
	if _, refused := l.Give(keyed("k", 8)); len(refused) != 0 {
		t.Error("a key is stopped for ever")
	}
}

// While a delivery of a key is about to become a row, and after that until the claimer asks about
// rows, nothing later of the key is taken.
func TestSpilledKeyRefusesWhatFollows(t *testing.T) {
	t.Parallel()
	l := laneOf(8)
	l.BeginSpill("k")
	if _, refused := l.Give(keyed("k", 2)); len(refused) != 1 {
		t.Error("what follows a delivery that becomes a row is sent before it")
	}
	key := "k"
	l.SettleKey(&settle.Settlement{OrderingKey: &key, Spilled: true, InHand: &settle.InHand{}}, false, true)
	if _, refused := l.Give(keyed("k", 3)); len(refused) != 1 {
		t.Error("what follows a new row is sent before it")
	}
	l.ForgetBlocked()
	if _, refused := l.Give(keyed("k", 4)); len(refused) != 0 {
		t.Error("the key is refused for ever")
	}
}

// A row that is about to be written, and joins its key when it is due, precedes what is due later,
// and nothing that was due before.
func TestArrivalPrecedesWhatIsDueLater(t *testing.T) {
	t.Parallel()
	l := laneOf(8)
	due := time.Now()
	l.BeginArrival("k", due.Add(time.Second))
	l.BeginArrival("k", due)
	for at, waits := range map[time.Time]bool{due.Add(-time.Millisecond): false, due: true, due.Add(time.Hour): true} {
		if got := l.AwaitsArrival("k", at); got != waits {
			t.Errorf("due %s after the row: waits %t", at.Sub(due), got)
		}
	}
	key := "k"
	for range 2 {
		l.SettleKey(&settle.Settlement{OrderingKey: &key, Spilled: true, InHand: &settle.InHand{Scheduled: due}}, false, false)
	}
	if l.AwaitsArrival("k", due.Add(time.Hour)) {
		t.Error("a key waits for rows that are written")
	}
}

// Rows that the settler has made are read once more from when the first of them was due.
func TestDueRowsAreNoted(t *testing.T) {
	t.Parallel()
	l := laneOf(1)
	at := time.Now()
	for _, due := range []time.Time{at, at.Add(-time.Second), at.Add(time.Second)} {
		l.NoteDue(due)
	}
	if since, are := l.TakeDue(time.Now()); !are || !since.Equal(at.Add(-time.Second)) {
		t.Errorf("since %s", since)
	}
	if _, are := l.TakeDue(time.Now()); are {
		t.Error("they are noted for ever")
	}
}

// A lane has room for what it sends within about a second, and for nothing while it is held.
func TestRoomForRange(t *testing.T) {
	t.Parallel()
	l := laneOf(10)
	if room := l.RoomForRange(time.Now(), lease); room != maxTaken {
		t.Errorf("room for %d before anything was sent", room)
	}
	l.perPost = 100 * time.Millisecond
	if room := l.RoomForRange(time.Now(), lease); room != 10+int(100*settle.RowsAfter.Seconds()) {
		t.Errorf("room for %d at 100 a second", room)
	}
	l.Push(time.Now(), Live, singly(make([]Delivery, 60)))
	if room := l.RoomForRange(time.Now(), lease); room != 10+int(100*settle.RowsAfter.Seconds())-60 {
		t.Errorf("room for %d beside 60", room)
	}
	l.Change(func(b *policy.Breaker) { b.Enter(time.Now(), policy.BreakerOpen) })
	if room := l.RoomForRange(time.Now(), lease); room != 0 {
		t.Errorf("room for %d while the destination is down", room)
	}
}

// A claim's runs begin with the head of each key. A delivery whose predecessor was not claimed with
// it is given back.
func TestRuns(t *testing.T) {
	t.Parallel()
	claimed := append(keyed("k", 1, 2, 3), keyed("j", 7, 9)...)
	claimed[1].After, claimed[2].After = 1, 2
	claimed[4].After = 8 // another session had locked it
	claimed = append(claimed, Delivery{EventID: 5})
	all, broken := Runs(claimed)
	if len(all) != 3 {
		t.Fatalf("%d runs", len(all))
	}
	wantIDs(t, "of k", all[0], 1, 2, 3)
	wantIDs(t, "of j", all[1], 7)
	wantIDs(t, "without a key", all[2], 5)
	wantIDs(t, "broken", broken, 9)
	if !all[0][2].LastOfRun || all[0][1].LastOfRun {
		t.Error("the last of a run is not marked")
	}
	parts := ByDestination([]Delivery{{EventID: 1, Destination: "a"}, {EventID: 2, Destination: "b"}, {EventID: 3, Destination: "a"}})
	wantIDs(t, "to a", parts["a"], 1, 3)
	wantIDs(t, "to b", parts["b"], 2)
}

// What is queued at a stop is given back, with what waits behind it in its key.
func TestTakeUnsent(t *testing.T) {
	t.Parallel()
	l := laneOf(1)
	_, _ = l.Give(append(keyed("k", 1, 2), keyed("j", 3)...))
	l.Push(time.Now(), Backlog, [][]Delivery{{{EventID: 4}}})
	unsent := ids(l.TakeUnsent())
	slices.Sort(unsent)
	testkit.Equal(t, "given back", unsent, []int64{1, 2, 3, 4})
	if run, wait := l.NextRun(time.Now()); run != nil || wait > 0 {
		t.Errorf("%v is left", ids(run))
	}
}

// A delivery of a run takes a token of the destination's rate, unless it will not be sent.
func TestTakeToken(t *testing.T) {
	t.Parallel()
	d := to("d")
	d.RateLimit, d.MaxInFlight = 0.01, 1
	e, err := post.NewEndpoint(d, "")
	testkit.Must(t, err)
	l := newLane(e)
	now := time.Now()
	sent := Delivery{LeaseEnds: now.Add(24 * time.Hour)}
	if wait, inTime := l.TakeToken(now, &sent); wait > 0 || !inTime {
		t.Errorf("the first waits for %s", wait)
	}
	if wait, inTime := l.TakeToken(now, &sent); wait <= 0 || !inTime {
		t.Errorf("the second waits for %s, in time %t", wait, inTime)
	}
	if _, inTime := l.TakeToken(now, &Delivery{LeaseEnds: now.Add(time.Minute)}); inTime {
		t.Error("a delivery waits for a turn that comes after its lease")
	}
	l.Pause()
	if wait, inTime := l.TakeToken(now, &sent); wait > 0 || !inTime {
		t.Errorf("one that will not be sent waits for %s", wait)
	}
}
