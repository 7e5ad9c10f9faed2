package relay

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/claim"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// A stop in the middle of the work: what is in flight ends and is settled, what waits is given back
// unspent, and the relay leaves the registry.
func TestGracefulStop(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	g, rc := relaytest.NewGated(t)
	db.Insert(500, "key")
	d := to(rc.URL)
	d.MaxInFlight = 5
	r := start(t, config(db, d))
	for range 5 {
		<-g.Arrived
	}
	relaytest.Becomes(db, true, `SELECT count(*) > 5 FROM outbox_delivery WHERE claimed_by IS NOT NULL`)
	r.cancel()
	relaytest.Becomes(db, 5, `SELECT count(*) FROM outbox_delivery WHERE claimed_by IS NOT NULL`)
	g.Open()
	r.stop()
	if got := relaytest.Row[string](db, `SELECT concat_ws(' ', count(*) FILTER (WHERE status = 'delivered' AND attempts = 1),
		count(*) FILTER (WHERE status = 'pending' AND attempts = 0 AND rescues = 0),
		count(*) FILTER (WHERE claimed_by IS NOT NULL)) FROM outbox_delivery`); got != "5 495 0" {
		t.Errorf("delivered, given back, still claimed: %s", got)
	}
	testkit.Equal(t, "requests", rc.Total(), 5)
	testkit.Equal(t, "relays are registered", relaytest.Row[int](db, `SELECT count(*) FROM outbox_relay`), 0)
	// The next relay has all the rest at once.
	next := start(t, config(db, to(rc.URL)))
	next.settles(t, policy.Delivered, 495)
	testkit.Equal(t, "requests", rc.Total(), 500)
}

// What a stopping relay gives back lies behind the others' positions; its goodbye makes them look
// there, instead of at their next sweep, which here is an hour away.
func TestGoodbyeWakesTheOthers(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	g, rc := relaytest.NewGated(t, "key-1")
	db.Insert(20, "key")
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 minute'`)
	d := to(rc.URL)
	d.MaxInFlight = 1
	cfg := rarely(config(db, d))
	a := start(t, cfg)
	<-g.Arrived // and the next one waits behind it
	db.Insert(2, "live")
	relaytest.Becomes(db, 4, `SELECT count(*) FROM outbox_delivery WHERE claimed_by IS NOT NULL`)
	b := start(t, cfg)
	b.settles(t, policy.Delivered, 18)
	db.Insert(1, "later")
	b.settles(t, policy.Delivered, 19)
	a.cancel()
	g.Open()
	a.stop()
	b.settles(t, policy.Delivered, 22)
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND attempts = 1`); n != 23 || rc.Total() != 23 {
		t.Errorf("%d of 23 delivered, %d requests", n, rc.Total())
	}
}

// Abort cuts off what hangs. Each such POST was one, so it counts, and is repeated.
func TestAbortCutsOffTheDrain(t *testing.T) {
	t.Parallel()
	for name, early := range map[string]bool{"during the drain": false, "before the stop": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			g, rc := relaytest.NewGated(t)
			db.Insert(3, "key")
			cfg := config(db, post.Destination{Name: "default", URL: rc.URL})
			cfg.DrainTimeout = time.Hour
			r := start(t, cfg)
			for range 3 {
				<-g.Arrived
			}
			if early {
				r.Abort()
			}
			r.cancel()
			r.Abort()
			r.stop()
			if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending' AND attempts = 1
				AND last_reason = 'shutdown' AND claimed_by IS NULL AND next_attempt_at > last_attempt_at`); n != 3 {
				t.Errorf("%d of 3 are to be repeated", n)
			}
			testkit.Equal(t, "relays are registered", relaytest.Row[int](db, `SELECT count(*) FROM outbox_relay`), 0)
		})
	}
}

// A delivery is not given up because its relay was told to stop while its last attempt was under
// way.
func TestCutOffLastAttemptIsNotAFailure(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	g, rc := relaytest.NewGated(t)
	db.Insert(1, "key")
	db.Exec(`UPDATE outbox_delivery SET attempts = 7`)
	r := start(t, config(db, post.Destination{Name: "default", URL: rc.URL}))
	<-g.Arrived
	r.cancel()
	r.Abort()
	r.stop()
	testkit.Equal(t, "found", relaytest.Row[string](db, `SELECT concat_ws(' ', status, last_reason) FROM outbox_delivery`), "pending shutdown")
}

// The drain is bounded by itself too.
func TestDrainTimeout(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	g, rc := relaytest.NewGated(t)
	db.Insert(1, "key")
	cfg := config(db, post.Destination{Name: "default", URL: rc.URL, Timeout: 10 * time.Minute})
	cfg.Lease = time.Hour
	cfg.DrainTimeout = time.Millisecond
	r := start(t, cfg)
	<-g.Arrived
	r.stop()
	testkit.Equal(t, "found", relaytest.Row[string](db, `SELECT concat_ws(' ', status, attempts, last_reason) FROM outbox_delivery`), "pending 1 shutdown")
}

// Without a database nothing can be settled: the stop ends all the same, and the deliveries are
// left to their lease.
func TestStopWhileTheDatabaseIsAway(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := relaytest.Covered(t)
	l := newLink(t, db.DSN)
	g, rc := relaytest.NewGated(t)
	db.Insert(10, "key")
	cfg := config(db, to(rc.URL))
	cfg.Pool = settings(t, l.dsn)
	r := start(t, cfg)
	for range 10 {
		<-g.Arrived
	}
	knows(db, db.DSN)
	l.block(true)
	g.Open()
	r.await(t, "a failed settle", func(o *observer) bool { return o.failures["settle"] > 0 })
	r.stop()
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending' AND attempts = 0 AND claimed_by IS NOT NULL`); n != 10 {
		t.Errorf("%d of 10 are left to the next relay", n)
	}
	next := start(t, config(db, to(rc.URL))) // which need not wait for the lease
	next.settles(t, policy.Delivered, 10)
}

// hangs lets a relay stop whose database hangs from a statement on: it is neither answered nor
// refused.
func hangs(t *testing.T, what, statement string, drain time.Duration) *running {
	t.Helper()
	db := relaytest.Covered(t)
	l := newLink(t, db.DSN)
	cfg := config(db, to(relaytest.NewReceiver(t, nil).URL))
	cfg.Pool, cfg.DrainTimeout = settings(t, l.dsn), drain
	r := start(t, cfg)
	r.await(t, "idleness", func(o *observer) bool { return o.idle > 0 })
	within(t, what, l.holdFrom(statement))
	r.stop()
	return r
}

func TestStopWhileTheDatabaseHangs(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	hangs(t, "a beat", session.Beat, 0)
}

// A claim that the database does not answer is given up with the outcomes, and does not wait for
// the end of its statement.
func TestStopWhileAClaimHangs(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	r := hangs(t, "a claim", claim.ClaimDue, time.Millisecond)
	r.await(t, "no failed claim", func(o *observer) bool { return o.failures["claim"] == 0 })
}

func TestStopBeforeTheDatabaseWasEverReached(t *testing.T) {
	t.Parallel()
	cfg := Config{Pool: settings(t, "postgres://stranger@/none?host="+filepath.Join(t.TempDir(), "none")), Destinations: []post.Destination{to("http://receiver.test/")}}
	r := start(t, cfg)
	r.await(t, "failures", func(o *observer) bool { return o.failures["prepare"] >= 3 })
	r.stop()

	// And before it even began.
	relay, err := New(cfg)
	relaytest.Must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	relaytest.Must(t, relay.Run(ctx))
}
