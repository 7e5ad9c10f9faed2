package relay

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/session"
)

// armed is true while relays want to be notified.
const armed = `SELECT last_value > extract(epoch FROM now()) * 1000 FROM outbox_armed`

// The relay is armed when it is idle or has little to do: a notification is all it needs to go on. It is disarmed while much
// comes in, and armed again when that has ended.
func TestRelayIsArmedAtALowLoad(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	cfg := db.config(to(rc.URL))
	cfg.PollInterval = time.Hour
	r := start(t, cfg)
	becomes(db, true, armed)
	for round := 1; round <= 3; round++ {
		db.insert(1, fmt.Sprint("round", round))
		r.settles(t, policy.Delivered, round)
		if !row[bool](db, armed) {
			t.Errorf("round %d: disarmed by one event", round)
		}
	}
	eventually(db, "disarmed while much comes in", func() bool {
		r.wake.commits.Add(1000) // as from as many producers at once
		r.wake.notify(false)
		return !row[bool](db, armed)
	})
	db.insert(1, "found by polling")
	r.settles(t, policy.Delivered, 4)
	becomes(db, true, armed)
}

// What arms a relay costs producers nothing that lasts: no row that they read gets a new version.
func TestArmingLeavesNoRowVersions(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := newDatabase(t)
	s := &store{pool: db.pool}
	size := row[int64](db, `SELECT pg_relation_size('outbox_armed') + pg_relation_size('outbox_relay')`)
	for i := range 1000 {
		must(t, s.arm(t.Context(), i%2 == 0))
	}
	if n := row[int64](db, `SELECT pg_relation_size('outbox_armed') + pg_relation_size('outbox_relay')`); n != size {
		t.Errorf("%d bytes became %d", size, n)
	}
	if row[bool](db, armed) {
		t.Error("armed by a relay that said it is busy")
	}
}

// Producers go on notifying a relay that stays idle, also when another one that is busy has stopped them.
func TestIdleRelayStaysArmed(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	r := sessionOf(t, db.config(to("http://receiver.test/")))
	wakeUp(t, r) // as every new session
	must(t, r.store.arm(t.Context(), true))
	wakeUp(t, r) // as every relay
	must(t, (&store{pool: db.pool}).arm(t.Context(), false))
	wakeUp(t, r) // for what was committed meanwhile, which no producer announced
	becomes(db, true, armed)
}

// sessionOf runs nothing of a relay but its session: what wakes up stays in the channel.
func sessionOf(t testing.TB, cfg Config) *Relay {
	t.Helper()
	return sessionThrough(t, cfg, func(pool pg.Pool) pg.Pool { return pool })
}

// sessionThrough is sessionOf with something between the store and the pool, which the session sees from the beginning.
func sessionThrough(t testing.TB, cfg Config, through func(pg.Pool) pg.Pool) *Relay {
	t.Helper()
	r, err := New(cfg)
	must(t, err)
	pool, err := pgxpool.NewWithConfig(t.Context(), r.session.Config.PoolConfig())
	must(t, err)
	r.setDatabase(session.Database{Direct: pool, Pool: through(pool)})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { r.session.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
		pool.Close()
	})
	eventually(t, "the registration", func() bool { _, alive := r.current(); return alive })
	return r
}

// wakeUp waits for a token and returns whether it asks for a sweep.
func wakeUp(t testing.TB, r *Relay) bool {
	t.Helper()
	select {
	case sweep := <-r.wake.notified:
		return sweep
	case <-time.After(patience):
		t.Fatal("never came: a wake-up")
		return false
	}
}

// Without any polling: a producer's commit wakes an idle relay, and a busy one is left alone.
func TestNotificationsReachTheRelay(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	r := sessionOf(t, db.config(to("http://receiver.test/")))
	if !wakeUp(t, r) {
		t.Error("a new session has to look at everything: it may have missed notifications")
	}
	db.insert(1, "busy")
	must(t, r.store.arm(t.Context(), true))
	if wakeUp(t, r) { // every relay hears that producers notify now
		t.Error("to be armed asks for a sweep")
	}
	db.insert(1, "idle")
	if wakeUp(t, r) {
		t.Error("a new event asks for a sweep")
	}
	db.exec(`NOTIFY outbox_wake, 'sweep public'`)
	if !wakeUp(t, r) {
		t.Error("another relay's goodbye asks for no sweep")
	}
	for _, other := range []string{`elsewhere`, `sweep elsewhere`, ``, ` `, `public2`, `sweep`} {
		db.exec(`SELECT pg_notify('outbox_wake', $1)`, other)
	}
	db.exec(`NOTIFY outbox_wake, 'public'`) // arrives after those
	if wakeUp(t, r) {
		t.Error("a notification of another schema was heard")
	}
	select {
	case <-r.wake.notified:
		t.Error("a notification too many")
	default:
	}
}

// A declaration fails, and by the next turn there is nothing to declare any more. Beats go on as the claimer does: a relay that
// believes that producers notify keeps them notifying.
func TestFailedDeclarationChangesNothing(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	failed, cancel := context.WithCancel(t.Context())
	cancel()
	for _, before := range []bool{true, false} {
		s := &store{pool: db.pool}
		must(t, s.arm(t.Context(), before))
		if err := s.arm(failed, !before); err == nil || s.producers.Armed() != before {
			t.Errorf("armed: %t, then not declared: %v; beats say %t", before, err, s.producers.Armed())
		}
	}
}
