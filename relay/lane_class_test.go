package relay

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
)

// A replay that stands before a live event of its ordering key is sent with it, and does not make it wait among the replays.
func TestReplaysDoNotSlowTheirKey(t *testing.T) {
	t.Parallel()
	l := laneOf(1)
	key := "k"
	queued := make([]delivery, 200)
	for i := range queued {
		queued[i] = delivery{eventID: int64(i), class: replays}
	}
	last := &queued[len(queued)-1]
	last.event.OrderingKey = &key
	l.countClaimed(key, 1, last.placeInKey())
	l.push(time.Now(), replays, singly(queued))
	l.makeReady(key, ordering.Place{Event: last.eventID + 1}, live)
	if run, _ := l.nextRun(time.Now()); len(run) != 1 || run[0].eventID != last.eventID || run[0].class != live {
		t.Errorf("sent first: %+v", run)
	}
	if held := l.held(); held != [classes]int{live: 1, replays: len(queued) - 1} {
		t.Errorf("the lane holds %v", held)
	}
}
