package relay

import (
	"net/http"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/session"
)

// A stop in the middle of a beat must not cost the connection on which the relay has to say goodbye.
func TestStopDuringABeat(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	l := newLink(t, db.dsn)
	cfg := db.config(to("http://receiver.test/"))
	cfg.Pool = settings(t, l.dsn)
	r := start(t, cfg)
	r.instance()
	within(t, "a beat", l.holdFrom(session.Beat))
	r.cancel()
	l.pass()
	r.stop()
	if n := row[int](db, `SELECT count(*) FROM outbox_relay`); n != 0 {
		t.Errorf("%d relays are left in the registry", n)
	}
}

// Everybody loses the database for a while and comes back one after the other: none of them is dead.
func TestRelaysThatComeBackDoNotRescueEachOther(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := newDatabase(t)
	g := newGate(t)
	rc := newReceiver(t, func(_ http.ResponseWriter, r request) { g.pass(r) })
	db.insert(100, "key")
	var links []*link
	var relays []*running
	var instances []int32
	for range 2 {
		l := newLink(t, db.dsn)
		cfg := db.config(to(rc.URL))
		cfg.Pool = settings(t, l.dsn)
		cfg.Destinations[0].MaxInFlight, cfg.Destinations[0].Timeout = 10, patience // a POST that gives up is sent again
		cfg.Lease = patience + leaseMargin
		r := start(t, cfg)
		links, relays, instances = append(links, l), append(relays, r), append(instances, r.instance())
	}
	for _, r := range relays { // a claim that is cut off would wait for its lease
		r.await(t, "full lanes", func(o *observer) bool { return o.claimed == 20 })
	}
	for _, l := range links {
		l.block(true)
	}
	for _, r := range relays { // long enough for a relay with growing pauses to be late
		r.await(t, "ten vain attempts to come back", func(o *observer) bool { return o.failures["session"] >= 10 })
	}
	links[0].block(false)
	relays[0].instance()
	n := sees(relays[1].observer, func(o *observer) int { return o.failures["session"] })
	relays[1].await(t, "one more vain attempt", func(o *observer) bool { return o.failures["session"] > n })
	links[1].block(false)
	g.open()
	becomes(db, 0, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending'`)
	for i, r := range relays {
		if again := r.instance(); again != instances[i] {
			t.Errorf("instance %d became %d", instances[i], again)
		}
		if rescued := sees(r.observer, func(o *observer) []int32 { return o.rescued }); len(rescued) > 0 {
			t.Errorf("instance %d rescued %v", instances[i], rescued)
		}
	}
	if rc.total() != 100 {
		t.Errorf("%d requests for 100 events", rc.total())
	}
}

// A session that fails half-way must not leave one registration after the other behind.
func TestFailingSessionLeavesOneRegistration(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`ALTER TABLE outbox_route RENAME TO away`)
	rc := newReceiver(t, nil)
	r := start(t, db.config(to(rc.URL)))
	r.await(t, "failures", func(o *observer) bool { return o.failures["session"] >= 4 })
	if n := row[int](db, `SELECT count(*) FROM outbox_relay`); n > 1 {
		t.Errorf("%d registrations of one relay", n)
	}
	db.exec(`ALTER TABLE away RENAME TO outbox_route`)
	db.insert(1, "key")
	r.settles(t, policy.Delivered, 1)
}

// A relay that starts takes what it finds: those who died before it came are rescued at once.
func TestStartingRelayRescuesAtOnce(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.insert(5, "key")
	db.exec(`INSERT INTO outbox_relay (name, version, lease, session_pid) VALUES ('dead', '', '1 day', 0)`)
	db.exec(`UPDATE outbox_delivery SET claimed_by = (SELECT instance FROM outbox_relay), lease_expires_at = now() + interval '1 day'`)
	rc := newReceiver(t, nil)
	r := start(t, db.config(to(rc.URL)))
	r.settles(t, policy.Delivered, 5)
	becomes(db, 1, `SELECT count(*) FROM outbox_relay`)
}

// A relay that beats is alive, however often the others look.
func TestLivingRelaysAreNotRescued(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	cfg := db.config(to("http://receiver.test/"))
	relays := []*running{start(t, cfg), start(t, cfg)}
	instances := []int32{relays[0].instance(), relays[1].instance()}
	becomes(db, true, `SELECT pg_postmaster_start_time() < now() - interval '4 seconds'`) // before that, dead relays are not looked for
	began := row[time.Time](db, `SELECT now()`)
	becomes(db, true, `SELECT min(heartbeat_at) > $1::timestamptz + interval '2 seconds' FROM outbox_relay`, began)
	for i, r := range relays {
		if again := r.instance(); again != instances[i] {
			t.Errorf("instance %d became %d", instances[i], again)
		}
		if n := sees(r.observer, func(o *observer) int { return len(o.rescued) }); n != 0 {
			t.Errorf("instance %d rescued %d living relays", instances[i], n)
		}
	}
}

// A listen_url beside a url that needs none: both lead to the server itself.
func TestSessionOfItsOwnBesideADirectPool(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	cfg := db.config(to(newReceiver(t, nil).URL))
	cfg.Pooler.Session = settings(t, db.dsn)
	r := start(t, cfg)
	db.insert(3, "key")
	r.settles(t, policy.Delivered, 3)
}

// The session of an idle relay is silent between two beats, for longer than the database allows.
func TestIdleSessionOutlivesTheTimeoutOfIdleSessions(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	cfg := db.config(to("http://receiver.test/"))
	cfg.Pool.ConnConfig.RuntimeParams["idle_session_timeout"] = "100" // as role or database may have it
	r := start(t, cfg)
	r.instance()
	becomes(db, true, `SELECT heartbeat_at > started_at FROM outbox_relay`)
	if failed := sees(r.observer, func(o *observer) int { return len(o.failures) }); failed != 0 {
		t.Errorf("%d operations failed", failed)
	}
}
