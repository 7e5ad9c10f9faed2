package relay

import (
	"net/http"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// A claimer whose lanes are all full has nothing to do: it must wait for room, not ask again and again.
func TestClaimerWaitsWhileEveryLaneIsFull(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	r := prepared(t, db.config(to("http://receiver.test/")))
	r.presence.set(1, true)
	for c := range class(classes) {
		r.lane("default").push(time.Now(), c, singly(make([]delivery, 2*post.DefaultLaneInFlight)))
	}
	for name, p := range map[string]pace{
		"busy":    {poll: time.Second, lastWork: time.Now()},
		"idle":    {poll: time.Second, idle: true, interval: firstArmedPoll},
		"waiting": {poll: time.Second, idle: true, interval: 2 * time.Second},
	} {
		c := r.newClaimer()
		c.pace, c.writers.next = p, time.Now().Add(time.Hour)
		c.clock.set(time.Now())
		wait, err := c.turn(t.Context())
		if err != nil || wait >= 0 && wait < minPace {
			t.Errorf("%s: next turn in %s, %v", name, wait, err)
		}
	}
}

// The lane is full of POSTs that hang; when they end, the rest follows without anything else waking the claimer.
func TestFullLaneGoesOnWhenThereIsRoom(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	g := newGate(t)
	rc := newReceiver(t, func(w http.ResponseWriter, r request) { g.pass(r) })
	db.insert(50, "key")
	d := to(rc.URL)
	d.MaxInFlight = 2
	cfg := db.config(d)
	cfg.PollInterval = time.Hour
	r := start(t, cfg)
	<-g.arrived
	<-g.arrived
	g.open()
	r.settles(t, policy.Delivered, 50)
}
