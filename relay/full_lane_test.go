package relay

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// A claimer whose lanes are all full has nothing to do: it must wait for room, not ask again and
// again.
func TestClaimerWaitsWhileEveryLaneIsFull(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	r := sessionOf(t, config(db, to("http://receiver.test/")))
	for c := range lane.Class(lane.Classes) {
		r.lane("default").Push(time.Now(), c, singly(make([]lane.Delivery, 2*post.DefaultLaneInFlight)))
	}
	for name, p := range map[string]agenda.Pace{
		"busy":    {Poll: time.Second, LastWork: time.Now().Add(time.Hour)},
		"idle":    {Poll: time.Second, Idle: true, Interval: 500 * time.Millisecond},
		"waiting": {Poll: time.Second, Idle: true, Interval: 2 * time.Second},
	} {
		c := r.newClaimer()
		c.pace, c.agenda = p, agenda.Agenda{}
		c.clock.Set(time.Now())
		begun := time.Now()
		turnOf(t, c)
		if wait, next := c.agenda.Next(begun); next != 0 && wait < lane.MinPace { // however long the turn took
			t.Errorf("%s: next turn %s after this one began", name, wait)
		}
	}
}

// There is a little room beside POSTs that may hang for long, right after a claim, and nothing else
// wakes the relay.
func TestLittleRoomIsFilledSoon(t *testing.T) {
	t.Parallel()
	for _, c := range []lane.Class{lane.Live, lane.Backlog} {
		db := relaytest.Covered(t)
		r := prepared(t, config(db, to("http://receiver.test/")))
		r.presence.Set(1, true)
		r.mailbox.listening.Store(true)
		l := r.lane("default")
		for other := range lane.Class(lane.Classes) {
			l.Push(time.Now(), other, singly(make([]lane.Delivery, 2*post.DefaultLaneInFlight-1)))
			l.Cursors[other].Rest(time.Now().Add(time.Hour))
		}
		l.Cursors[c] = lane.Cursor{More: true}
		l.RecordClaim(time.Now().Add(time.Hour))
		claimer := r.newClaimer()
		claimer.agenda = agenda.Agenda{}
		claimer.pace = agenda.Pace{Poll: time.Second, Armed: true, Interval: 2 * time.Second, LastWork: time.Now().Add(time.Hour), NextPoll: time.Now().Add(time.Hour)}
		claimer.clock.Set(time.Now())
		if wait := turnOf(t, claimer); wait < 0 || wait > lane.MinPace {
			t.Errorf("class %d: next turn in %s", c, wait)
		}
	}
}

// The lane is full of POSTs that hang; when they end, the rest follows without anything else waking
// the claimer.
func TestFullLaneGoesOnWhenThereIsRoom(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	g, rc := relaytest.NewGated(t)
	db.Insert(50, "key")
	d := to(rc.URL)
	d.MaxInFlight = 2
	r := start(t, rarely(config(db, d)))
	<-g.Arrived
	<-g.Arrived
	g.Open()
	r.settles(t, policy.Delivered, 50)
}
