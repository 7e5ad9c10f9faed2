package lane

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A replay that stands before a live event of its ordering key is sent with it, and does not make
// it wait among the replays.
func TestReplaysDoNotSlowTheirKey(t *testing.T) {
	t.Parallel()
	l := laneOf(1)
	key := "k"
	queued := make([]Delivery, 200)
	for i := range queued {
		queued[i] = Delivery{EventID: int64(i), Class: Replays}
	}
	last := &queued[len(queued)-1]
	last.Event.OrderingKey = &key
	l.CountClaimed(key, 1, last.PlaceInKey())
	l.Push(time.Now(), Replays, singly(queued))
	l.MakeReady(key, ordering.Place{Event: last.EventID + 1}, Live)
	if run, _ := l.NextRun(time.Now()); len(run) != 1 || run[0].EventID != last.EventID || run[0].Class != Live {
		t.Errorf("sent first: %+v", run)
	}
	testkit.Equal(t, "the lane holds", l.Counts(), [Classes]int{Live: 1, Replays: len(queued) - 1})
}
