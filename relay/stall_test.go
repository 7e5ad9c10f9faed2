package relay

import (
	"fmt"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/capacity"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// The turns of a slow rate come further apart than a lease lasts beside a POST. What waits for its turn must not lose it
// to a lease that ended meanwhile, over and over.
func TestRateSlowerThanTheLease(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	for name, key := range map[string]string{"unordered": "NULL", "of one key": "'k'"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			rc := relaytest.NewReceiver(t, nil)
			db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', i, ` + key + ` FROM generate_series(1, 3) i`)
			d := to(rc.URL)
			d.Timeout, d.RateLimit = time.Second, 0.25
			cfg := config(db, d)
			cfg.Lease = d.Timeout + leaseMargin
			r := start(t, cfg)
			r.settles(t, policy.Delivered, 3)
			if n := sees(r.observer, func(o *observer) int { return o.outcomes[policy.Hold] }); n > 2 {
				t.Errorf("%d were claimed in vain", n)
			}
		})
	}
}

// What is queued when the rate drops waits for turns that come after its lease; giving it back must cost none of them.
func TestOutlivedLeaseTakesNoTurn(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	d := post.Destination{Name: "d", Timeout: post.DefaultTimeout, MaxInFlight: 1, RateLimit: 0.1}
	l := newLane(&post.Endpoint{Destination: d})
	queued := make([]delivery, 4)
	for i := range queued {
		queued[i].leaseEnds = now.Add(time.Minute)
	}
	queued[1].leaseEnds, queued[2].leaseEnds = now, now
	l.push(now, live, singly(queued))
	for i, waits := range []bool{false, false, false, true} {
		if run, wait := l.nextRun(now); waits == (run != nil) || waits != (wait > 0) {
			t.Errorf("delivery %d: has to wait for %s", i, wait)
		}
	}
}

// An operator's forgotten transaction has locked what the breaker of one destination has to write. All others go on.
func TestLockedDestinationKeepsNoOther(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := relaytest.Covered(t, "a", "b")
	rc := relaytest.NewReceiver(t, nil)
	down := relaytest.NewReceiver(t, relaytest.Status(http.StatusServiceUnavailable))
	toA, toB := named("a", to(down.URL)), named("b", to(rc.URL))
	operator := locker(db, `INSERT INTO outbox_destination (destination) VALUES ('a')`)
	r := start(t, config(db, toA, toB))
	db.Insert(50, "first")
	r.await(t, "a breaker that cannot be written", func(o *observer) bool { return o.failures["claim"]+o.failures["breaker"] > 1 })
	for i := range 5 {
		db.Insert(10, fmt.Sprint("more-", i))
		r.settles(t, policy.Delivered, 50+10*(i+1))
	}
	if _, err := operator.Exec(t.Context(), `COMMIT`); err != nil {
		t.Fatal(err)
	}
	relaytest.Becomes(db, "open", `SELECT breaker FROM outbox_destination WHERE destination = 'a'`)
}

// A payload that cannot be read, as on a damaged page, is tried again now and then, not all the time.
func TestUnreadablePayloadIsLeftAlone(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', to_json(repeat('x', 32768)), 'damaged')`)
	letPass(db, time.Minute)
	db.Exec(`CREATE FUNCTION damaged() RETURNS json LANGUAGE plpgsql AS $$ BEGIN RAISE 'missing chunk number 0 for toast value' USING ERRCODE = 'XX001'; END $$;
		ALTER TABLE outbox RENAME TO stored;
		CREATE VIEW outbox AS SELECT id, event_type, event_version, idempotency_key, ordering_key, related_reference, headers, available_at, created_at, xid,
			CASE WHEN current_query() LIKE 'SELECT payload %' THEN damaged() ELSE payload END AS payload FROM stored`)
	began := time.Now()
	r := start(t, config(db, to(rc.URL)))
	const times = 6
	r.await(t, "an unreadable payload", func(o *observer) bool { return o.failures["load payload"] >= times })
	if took := time.Since(began); took < (times-2)*time.Second/2 {
		t.Errorf("tried %d times within %s", times, took)
	}
}

// A lane whose limit grows while much is queued gets the senders it may have, though nothing more is to be claimed.
func TestQueueGetsSendersWhenTheLimitGrows(t *testing.T) {
	t.Parallel()
	const most, waiting = 8, 60
	db := relaytest.Covered(t)
	arrived, answer := make(chan struct{}, waiting), make(chan struct{}, waiting)
	rc := relaytest.NewReceiver(t, func(http.ResponseWriter, relaytest.Request) {
		arrived <- struct{}{}
		select {
		case <-answer:
		case <-t.Context().Done():
		}
	})
	d := to(rc.URL)
	d.MaxInFlight, d.Timeout = most, 2*relaytest.Patience // no request ends but by its answer
	cfg := config(db, d)
	cfg.Lease = time.Hour
	r := prepared(t, cfg)
	l := r.lane("default")
	l.flow.AtOnce = 1
	l.rate.PerSecond = 10_000 // so that all of it is claimed ahead
	db.Insert(waiting, "key")
	r.begin()
	<-arrived
	relaytest.Becomes(db, waiting, `SELECT count(*)::int FROM outbox_delivery WHERE claimed_by IS NOT NULL`)
	l.mu.Lock()
	l.flow.AtOnce = most // its receiver was found to bear more
	l.mu.Unlock()
	answer <- struct{}{}
	for range most {
		select {
		case <-arrived:
		case <-time.After(relaytest.Patience):
			t.Fatal("never came: as many requests at once as there may be")
		}
	}
	close(answer)
	r.settles(t, policy.Delivered, waiting)
}

// A walk through much that is blocked goes on by itself, also when the relay has nothing else to do.
func TestWalkGoesOnInAnIdleRelay(t *testing.T) {
	t.Parallel()
	r := prepared(t, Config{Pool: settings(t, "postgres://nowhere.test/"), Destinations: []post.Destination{to("http://receiver.test/")}})
	r.presence.Set(1, true)
	now := time.Now()
	r.lane("default").cursors[backlog] = cursor{position: keyset{now, 1}, more: true, foundNothing: true, due: now.Add(time.Minute)}
	c := r.newClaimer()
	c.agenda = agenda.Agenda{}
	c.pace = agenda.Pace{Poll: time.Second, Idle: true, Interval: time.Hour, NextPoll: now.Add(time.Hour)}
	c.clock.set(now)
	r.lane("default").cursors[replays].rest(now.Add(time.Hour))
	if wait := turnOf(t, c); wait < 0 || wait > time.Minute {
		t.Errorf("the next turn in %s", wait)
	}
}

// What another relay has claimed takes a scan to its bound: whatever lies behind is gone on to, in a relay that nothing else wakes.
func TestScanGoesOnPastWhatOthersHaveClaimed(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		class  class
		age    time.Duration
		rescan bool
	}{"live": {live, 0, false}, "backlog": {backlog, time.Hour, false}, "looking back": {backlog, time.Hour, true}} {
		db := relaytest.Covered(t)
		r := sessionOf(t, config(db, to("http://receiver.test/")))
		l := r.lane("default")
		db.Insert(scanPasses+20*scanExtra, "key")
		letPass(db, c.age)
		db.Exec(`UPDATE outbox_delivery SET claimed_by = 99, claim = 1, lease_expires_at = now() + interval '1 day'`)
		far := time.Now().Add(time.Hour)
		if c.rescan {
			l.cursors[backlog].rest(far)
			l.rescanSince(time.Now().Add(-2 * time.Hour))
		}
		idle := r.newClaimer()
		idle.pace = agenda.Pace{Poll: time.Hour, Armed: true, Idle: true, Interval: 3 * time.Hour}
		turns := 0
		for more := true; more; turns++ {
			wait := turnOf(t, idle)
			more = l.cursors[c.class].more || l.rescanFrom != (keyset{})
			if more && (wait < 0 || wait > time.Minute) {
				t.Errorf("%s: the next turn in %s", name, wait)
				break
			}
			idle.pace.NextPoll = far
			l.recordClaim(time.Time{}) // that time has passed
			if more {
				l.cursors[c.class].due = time.Time{}
			}
		}
		if turns < 3 {
			t.Errorf("%s: at its end after %d turns", name, turns)
		}
	}
}

// However often something asks for walks to begin anew, one through what cannot be claimed comes to its end.
func TestBarrenWalkComesToItsEnd(t *testing.T) {
	t.Parallel()
	l := laneOf(1)
	position := keyset{time.Unix(1_000_000, 0), 1}
	l.cursors[backlog] = cursor{position: position, more: true, foundNothing: true}
	l.cursors[replays] = cursor{position: position, more: true}
	l.restartScans()
	if l.cursors[backlog].position != position || l.cursors[replays].position == position {
		t.Errorf("walks %+v", l.cursors)
	}
	l.cursors[backlog].advance(backlog, scanResult{}, 0, position.at, 0, agenda.Rest{Least: time.Hour})
	if w := l.cursors[backlog]; w.position == position || !w.isDue(time.Now()) {
		t.Errorf("what was asked for meanwhile is forgotten: %+v", w)
	}
	l.cursors[backlog].advance(backlog, scanResult{}, 0, position.at, 0, agenda.Rest{Least: time.Hour})
	if w := l.cursors[backlog]; w.isDue(time.Now()) {
		t.Errorf("walking never ends: %+v", w)
	}
}

// A look that comes when a lane has no room, or no turn, is made up for when it has.
func TestLookIsOwedToAFullLane(t *testing.T) {
	t.Parallel()
	r := prepared(t, Config{Pool: settings(t, "postgres://nowhere.test/"), Destinations: []post.Destination{to("http://receiver.test/")}})
	l := r.lane("default")
	c := r.newClaimer()
	now := time.Now()
	c.clock.set(now)
	for class := range l.cursors {
		l.cursors[class].rest(now.Add(time.Hour))
	}
	l.push(now, live, singly(make([]delivery, 2*post.DefaultLaneInFlight)))
	if claims := c.rows.laneClaims(now, true); len(claims) != 0 {
		t.Fatalf("a full lane asks for %+v", claims)
	}
	l.release(live, 2*post.DefaultLaneInFlight)
	if claims := c.rows.laneClaims(now, false); len(claims) != 1 {
		t.Errorf("then: %+v", claims)
	}
	if claims := c.rows.laneClaims(now, false); len(claims) != 0 {
		t.Errorf("again and again: %+v", claims)
	}
}

// A trial that has nothing more to send ends, but not before all that waits has been looked at: what a look for new
// events does not find may be a backlog for which slow start is meant.
func TestTrialEndsWhenNothingWaits(t *testing.T) {
	t.Parallel()
	now := time.Now()
	l := laneOf(64)
	l.breaker.Try(now, time.Minute)
	l.breaker.Accepted = true
	l.cursors[backlog].due, l.cursors[replays].due = now.Add(time.Minute), now
	if l.endTrial(now) {
		t.Error("ended before the replays were looked for")
	}
	l.cursors[replays].rest(now.Add(time.Minute))
	l.cursors[backlog].more = true
	if l.endTrial(now) {
		t.Error("ended in the middle of the backlog")
	}
	l.cursors[backlog].rest(now.Add(time.Minute))
	if !l.endTrial(now) || l.breaker.Write != policy.WriteClosed {
		t.Error("never ends")
	}
}

// A lane of one sender whose receiver is slow still has a live delivery at hand when it has sent one.
func TestNarrowLaneHasOneAhead(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	for name, c := range map[string]struct {
		limit float64
		takes time.Duration
		want  int
	}{
		"a second each":                {takes: time.Second, want: 1},
		"longer than a lease can wait": {takes: 40 * time.Second},
		"ten a second":                 {limit: 10, takes: time.Second, want: 1},
		"one in a minute":              {limit: 1. / 60, takes: time.Second},
	} {
		l := newLane(&post.Endpoint{Destination: post.Destination{Name: "d", Timeout: post.DefaultTimeout, MaxInFlight: 1, RateLimit: c.limit}})
		l.rate, l.perPost = capacity.Throughput{PerSecond: 1, Since: now}, c.takes
		l.push(now, live, singly(make([]delivery, 1)))
		if free, _ := l.room(now, DefaultLease); free[live] != c.want {
			t.Errorf("%s: room for %d beside what is being sent", name, free[live])
		}
	}
}

// The database's clock was put back by an hour while a breaker was open: it is tried without waiting for an hour.
func TestBreakerOutlivesAClockThatWasPutBack(t *testing.T) {
	t.Parallel()
	for name, state := range map[string]string{"open": `'open', now() + interval '1 hour', NULL`, "half-open": `'half_open', now() + interval '1 hour', 77`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			rc := relaytest.NewReceiver(t, nil)
			db.Exec(`INSERT INTO outbox_destination (destination, breaker_opened_at, breaker, breaker_until, breaker_owner)
				SELECT 'default', now() + interval '59 minutes', ` + state)
			db.Insert(3, "key")
			start(t, config(db, to(rc.URL))).settles(t, policy.Delivered, 3)
			relaytest.Becomes(db, "closed", `SELECT breaker FROM outbox_destination`)
		})
	}
}

// Ordering keys that go on fill whatever room there is; others are looked for nevertheless.
func TestKeysThatGoOnLeaveRoomForOthers(t *testing.T) {
	t.Parallel()
	r := prepared(t, Config{Pool: settings(t, "postgres://nowhere.test/"), Destinations: []post.Destination{to("http://receiver.test/")}})
	l := r.lane("default")
	c := r.newClaimer()
	c.clock.set(time.Now())
	for i := range 2 * post.DefaultLaneInFlight {
		l.makeReady(fmt.Sprint(i), ordering.Place{Event: 1}, live)
	}
	for _, of := range c.rows.laneClaims(time.Now(), true) {
		if len(of.request.keys) == 0 || len(of.request.scans) == 0 || of.request.scans[0].free == 0 {
			t.Errorf("%d keys go on, with %+v for others", len(of.request.keys), of.request.scans)
		}
	}
}

// A probe of a destination that is down is no sign that there is work: a relay that is idle otherwise stays idle.
func TestProbeEndsNoIdleness(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(3, "key")
	r := sessionOf(t, config(db, to("http://127.0.0.1:1/")))
	c := r.newClaimer()
	c.pace = agenda.Pace{Poll: time.Hour}
	c.clock.set(time.Now())
	instance, _ := r.current()
	// In the database too: a beat that comes meanwhile would close a breaker of which it finds no row.
	db.Exec(`INSERT INTO outbox_destination (destination, breaker_opened_at, breaker, breaker_until, breaker_owner)
		VALUES ('default', now(), 'half_open', now() + interval '1 minute', $1)`, instance)
	l := r.lane("default")
	l.mu.Lock()
	l.breaker.Try(time.Now(), time.Minute)
	l.mu.Unlock()
	var probes atomic.Int32
	r.senders.settle = func(settle.Settlement) { probes.Add(1) }
	turnOf(t, c)
	r.senders.wait()
	if probes.Load() == 0 || !c.pace.LastWork.IsZero() {
		t.Errorf("%d probes, the last work at %s", probes.Load(), c.pace.LastWork)
	}
}

// The sweep after an outage may fail, too. It is repeated before the next one.
func TestFailedSweepIsRepeated(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	cfg := rarely(config(db, to("http://receiver.test/")))
	r := sessionOf(t, cfg)
	c := r.newClaimer()
	c.pace = agenda.Pace{Poll: time.Hour, Armed: true}
	turnOf(t, c)
	for _, l := range c.lanes.list() {
		l.restartScans()
	}
	c.rows.claimFailed(c.rows.laneClaims(time.Now(), false))
	c.pace.Interval = 2 * time.Hour // so long has it been idle
	if wait := turnOf(t, c); wait < 0 || wait > DefaultPollInterval {
		t.Errorf("next turn in %s", wait)
	}
}
