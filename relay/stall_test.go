package relay

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// The turns of a slow rate come further apart than a lease lasts beside a POST. What waits for its
// turn must not lose it to a lease that ended meanwhile, over and over.
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
			d.Timeout, d.RateLimit = 500*time.Millisecond, 0.5
			r := startWithLease(t, config(db, d), 3*time.Second)
			r.settles(t, policy.Delivered, 3)
			if n := sees(r.observer, func(o *observer) int { return o.outcomes[policy.Hold] }); n > 2 {
				t.Errorf("%d were claimed in vain", n)
			}
		})
	}
}

// An operator's forgotten transaction has locked what the breaker of one destination has to write.
// All others continue.
func TestLockedDestinationKeepsNoOther(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := relaytest.Covered(t, "a", "b")
	rc := relaytest.NewReceiver(t, nil)
	down := relaytest.NewReceiver(t, relaytest.Status(http.StatusServiceUnavailable))
	toA, toB := named("a", to(down.URL)), named("b", to(rc.URL))
	operator := db.Locker(`INSERT INTO outbox_destination (destination) VALUES ('a')`)
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

// A scan through much that cannot be claimed continues by itself, also when the relay has nothing
// else to do.
func TestScanContinuesInAnIdleRelay(t *testing.T) {
	t.Parallel()
	r := prepared(t, Config{Pool: settings(t, "postgres://nowhere.test/"), Destinations: []post.Destination{to("http://receiver.test/")}})
	r.presence.Set(1, true)
	now := time.Now()
	r.lane("default").Cursors[lane.Backlog] = lane.Cursor{Position: lane.Keyset{At: now, ID: 1}, More: true, FoundNothing: true, Due: now.Add(time.Minute)}
	c := r.newClaimer()
	c.agenda = agenda.Agenda{}
	c.pace = agenda.Pace{Poll: time.Second, Idle: true, Interval: time.Hour, NextPoll: now.Add(time.Hour)}
	c.clock.Set(now)
	r.lane("default").Cursors[lane.Replays].Rest(now.Add(time.Hour))
	if wait := turnOf(t, c); wait < 0 || wait > time.Minute {
		t.Errorf("the next turn in %s", wait)
	}
}

// What another relay has claimed takes a scan to its bound: whatever lies behind is gone on to, in
// a relay that nothing else wakes.
func TestScanGoesOnPastWhatOthersHaveClaimed(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		class  lane.Class
		age    time.Duration
		rescan bool
	}{"live": {lane.Live, 0, false}, "backlog": {lane.Backlog, time.Hour, false}, "rescan": {lane.Backlog, time.Hour, true}} {
		db := relaytest.Covered(t)
		r := sessionOf(t, config(db, to("http://receiver.test/")))
		l := r.lane("default")
		db.Insert(lane.ScanPasses+20*lane.ScanExtra, "key")
		letPass(db, c.age)
		db.Exec(`UPDATE outbox_delivery SET claimed_by = 99, claim = 1, lease_expires_at = now() + interval '1 day'`)
		far := time.Now().Add(time.Hour)
		if c.rescan {
			l.Cursors[lane.Backlog].Rest(far)
			l.RescanSince(time.Now().Add(-2 * time.Hour))
		}
		idle := r.newClaimer()
		idle.pace = agenda.Pace{Poll: time.Hour, Armed: true, Idle: true, Interval: 3 * time.Hour}
		turns := 0
		for more := true; more; turns++ {
			wait := turnOf(t, idle)
			more = l.Cursors[c.class].More || l.RescanFrom != (lane.Keyset{})
			if more && (wait < 0 || wait > time.Minute) {
				t.Errorf("%s: the next turn in %s", name, wait)
				break
			}
			idle.pace.NextPoll = far
			l.RecordClaim(time.Time{}) // that time has passed
			if more {
				l.Cursors[c.class].Due = time.Time{}
			}
		}
		if turns < 3 {
			t.Errorf("%s: at its end after %d turns", name, turns)
		}
	}
}

// The database's clock was put back by an hour while a breaker was open: it is tried without
// waiting for an hour.
func TestBreakerOutlivesAClockThatWasPutBack(t *testing.T) {
	t.Parallel()
	for name, state := range map[string]string{"open": `'open', now() + interval '1 hour', NULL`, "half-open": `'half_open', now() + interval '1 hour', 77`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			rc := relaytest.NewReceiver(t, nil)
			db.Exec(`INSERT INTO outbox_destination (destination, breaker_opened_at, breaker, breaker_until, breaker_relay_id)
				SELECT 'default', now() + interval '59 minutes', ` + state)
			db.Insert(3, "key")
			start(t, config(db, to(rc.URL))).settles(t, policy.Delivered, 3)
			relaytest.Becomes(db, "closed", `SELECT breaker FROM outbox_destination`)
		})
	}
}

// A probe of a destination that is down is no sign that there is work: a relay that is idle
// otherwise stays idle.
func TestProbeEndsNoIdleness(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(3, "key")
	r := sessionOf(t, config(db, to("http://127.0.0.1:1/")))
	c := r.newClaimer()
	c.pace = agenda.Pace{Poll: time.Hour}
	c.clock.Set(time.Now())
	relayID, _ := r.current()
	// In the database too: a beat that comes meanwhile would close a breaker of which it finds no
	// row.
	db.Exec(`INSERT INTO outbox_destination (destination, breaker_opened_at, breaker, breaker_until, breaker_relay_id)
		VALUES ('default', now(), 'half_open', now() + interval '1 minute', $1)`, relayID)
	r.lane("default").Change(func(b *policy.Breaker) { b.Try(time.Now(), time.Minute) })
	var probes atomic.Int32
	r.senders.Settle = func(settle.Settlement) { probes.Add(1) }
	turnOf(t, c)
	r.senders.Wait()
	if probes.Load() == 0 || !c.pace.LastWork.IsZero() {
		t.Errorf("%d probes, the last work at %s", probes.Load(), c.pace.LastWork)
	}
}

// While claims fail, the relay says so, whatever else works; and no more once they work.
func TestClaimsThatFailAreSeen(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	receiver := relaytest.NewReceiver(t, nil)
	r := start(t, config(db, to(receiver.URL)))
	r.relayID()
	db.Exec(`ALTER TABLE outbox_range RENAME TO outbox_range_away`)
	relaytest.Eventually(t, "claims that fail", func() bool { return !r.State().StuckSince.IsZero() })
	if s := r.State(); s.Trouble != nil {
		t.Errorf("it is told at once: %+v", s.Trouble)
	}
	db.Exec(`ALTER TABLE outbox_range_away RENAME TO outbox_range`)
	db.Insert(1, "k")
	relaytest.Eventually(t, "the event", func() bool { return receiver.Total() == 1 })
	relaytest.Eventually(t, "claims that work", func() bool { return r.State().StuckSince.IsZero() })
}

// Claims fail since the first that fails began, and not since the last that worked.
func TestClaimsFailSinceTheFirstThatFails(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	r := sessionOf(t, config(db, to("http://127.0.0.1:1/")))
	c := r.newClaimer()
	var worked time.Time
	works, fails := make(chan struct{}, 1), make(chan time.Duration, 1)
	c.markClaims = func(since time.Time, err error) {
		if err == nil {
			worked = time.Now()
			select {
			case works <- struct{}{}:
			default:
			}
			return
		}
		select {
		case fails <- since.Sub(worked):
		default:
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { c.run(ctx) })
	defer running.Wait()
	defer stop()
	<-works
	db.Exec(`ALTER TABLE outbox_range RENAME TO outbox_range_away`)
	if later := <-fails; later < 0 {
		t.Errorf("claims are said to fail %s before the last one worked", -later)
	}
}
