package relay

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// armed is true while relays want to be notified.
const armed = `SELECT last_value > extract(epoch FROM now()) * 1000 FROM outbox_armed`

// The relay is armed when it is idle or has little to do: a notification is all it needs to
// continue. It is disarmed while much comes in, and armed again when that has ended.
func TestRelayIsArmedAtALowLoad(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	r := start(t, rarely(config(db, to(rc.URL))))
	relaytest.Becomes(db, true, armed)
	for round := 1; round <= 3; round++ {
		db.Insert(1, fmt.Sprint("round", round))
		r.settles(t, policy.Delivered, round)
		if !relaytest.Row[bool](db, armed) {
			t.Errorf("round %d: disarmed by one event", round)
		}
	}
	relaytest.Eventually(db, "disarmed while much comes in", func() bool {
		r.mailbox.commits.Add(1000) // as from as many producers at once
		r.mailbox.post(agenda.CauseNotified)
		return !relaytest.Row[bool](db, armed)
	})
	db.Insert(1, "found by polling")
	r.settles(t, policy.Delivered, 4)
	relaytest.Becomes(db, true, armed)
}

// A relay that waits for notifications, and has long found nothing by polling, still polls after
// each poll interval: a notification may be lost, as when the server's queue of them is full.
func TestLostNotificationIsMadeUpFor(t *testing.T) {
	t.Parallel()
	r := sessionOf(t, config(relaytest.Covered(t), to("http://receiver.test/")))
	c := r.newClaimer()
	turnOf(t, c)
	c.pace = agenda.Pace{Poll: c.pollInterval, Armed: true, Idle: true, Interval: time.Hour, NextPoll: time.Now().Add(time.Hour)}
	c.agenda = agenda.Agenda{}
	c.agenda.At(agenda.CauseTick, time.Now())
	if wait := turnOf(t, c); wait < 0 || wait > c.pollInterval {
		t.Errorf("the next turn comes after %s, want %s", wait, c.pollInterval)
	}
}

// A relay whose connections last for a transaction alone, as behind a pooler, asks producers for no
// notification, which it would not hear, and finds events by polling.
func TestRelayWithoutASessionIsNotArmed(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	cfg := config(db, to(relaytest.NewReceiver(t, nil).URL))
	cfg.Pooler.Mode = PoolerTransaction
	r := start(t, cfg)
	r.await(t, "idleness", func(o *observer) bool { return o.idle > 0 })
	if relaytest.Row[bool](db, armed) {
		t.Error("a relay that nothing can notify is armed")
	}
	db.Insert(10, "key")
	r.settles(t, policy.Delivered, 10)
}

// sessionOf runs nothing of a relay but its session: what wakes up stays in the channel, and
// claimers of the test may take turns.
func sessionOf(t testing.TB, cfg Config) *Relay {
	t.Helper()
	return sessionThrough(t, cfg, func(pool pg.Pool) pg.Pool { return pool })
}

// sessionThrough is sessionOf with something between the store and the pool, which the session sees
// from the beginning.
func sessionThrough(t testing.TB, cfg Config, through func(pg.Pool) pg.Pool) *Relay {
	t.Helper()
	r, err := New(cfg)
	relaytest.Must(t, err)
	r.phases.Taking, r.phases.Doing, r.phases.Settling = t.Context(), t.Context(), t.Context()
	pool, err := pgxpool.NewWithConfig(t.Context(), r.session.Config.PoolConfig())
	relaytest.Must(t, err)
	r.setDatabase(session.Database{Direct: pool, Pool: through(pool)})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { r.session.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
		pool.Close()
	})
	relaytest.Eventually(t, "the registration", func() bool { _, alive := r.current(); return alive })
	return r
}

// awaitPost waits until something was posted for a claimer of the test.
func awaitPost(t testing.TB, r *Relay, cause agenda.Cause) {
	t.Helper()
	relaytest.Eventually(t, "what is posted: "+cause.String(), func() bool {
		return agenda.Cause(r.mailbox.posted.Load()).Has(cause)
	})
}

// turnOf takes a turn, and returns how long the claimer waits then; negative: until something is
// posted.
func turnOf(t testing.TB, c *claimer) time.Duration {
	t.Helper()
	_, err := c.turn(t.Context())
	relaytest.Must(t, err)
	return nextOf(c)
}

func nextOf(c *claimer) time.Duration {
	wait, next := c.agenda.Next(time.Now())
	if next == 0 {
		return -1
	}
	return wait
}

// Without its session a relay does nothing, and what is due meanwhile does not keep a processor
// busy.
func TestClaimerWithoutASessionRests(t *testing.T) {
	t.Parallel()
	r := prepared(t, Config{Pool: settings(t, "postgres://nowhere.test/"), Destinations: []post.Destination{to("http://receiver.test/")}})
	c := r.newClaimer()
	now := time.Now()
	c.agenda.At(agenda.CausePoll|agenda.CauseTick|agenda.CauseJoinKeys, now.Add(-time.Minute))
	turnOf(t, c)
	if wait, next := c.agenda.Next(now); wait < agenda.TurnGap {
		t.Errorf("%s follows after %s", next, wait)
	}
}
