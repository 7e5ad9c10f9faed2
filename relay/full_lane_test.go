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
	r.presence.Set(1, true)
	for c := range class(classes) {
		r.lane("default").push(time.Now(), c, singly(make([]delivery, 2*post.DefaultLaneInFlight)))
	}
	for name, p := range map[string]policy.Pace{
		"busy":    {Poll: time.Second, LastWork: time.Now()},
		"idle":    {Poll: time.Second, Idle: true, Interval: 50 * time.Millisecond},
		"waiting": {Poll: time.Second, Idle: true, Interval: 2 * time.Second},
	} {
		c := r.newClaimer()
		c.pace, c.writers.Next = p, time.Now().Add(time.Hour)
		c.clock.set(time.Now())
		wait, err := c.claimIfDue(t.Context())
		if err != nil || wait >= 0 && wait < minPace {
			t.Errorf("%s: next turn in %s, %v", name, wait, err)
		}
	}
}

// There is a little room beside POSTs that may hang for long, right after a claim, and nothing else wakes the relay.
func TestLittleRoomIsFilledSoon(t *testing.T) {
	t.Parallel()
	for _, c := range []class{live, backlog} {
		db := newDatabase(t)
		r := prepared(t, db.config(to("http://receiver.test/")))
		r.presence.Set(1, true)
		r.wake.listening.Store(true)
		l := r.lane("default")
		for other := range class(classes) {
			l.push(time.Now(), other, singly(make([]delivery, 2*post.DefaultLaneInFlight-1)))
			l.walks[other].rest(time.Now().Add(time.Hour))
		}
		l.walks[c] = walk{more: true}
		l.recordClaim(time.Now().Add(time.Hour))
		claimer := r.newClaimer()
		claimer.pace = policy.Pace{Poll: time.Second, Armed: true, Interval: 2 * time.Second, LastWork: time.Now().Add(time.Hour), NextLook: time.Now().Add(time.Hour)}
		claimer.writers.Next = time.Now().Add(time.Hour)
		claimer.clock.set(time.Now())
		if wait, err := claimer.claimIfDue(t.Context()); err != nil || wait < 0 || wait > minPace {
			t.Errorf("class %d: next turn in %s, %v", c, wait, err)
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
