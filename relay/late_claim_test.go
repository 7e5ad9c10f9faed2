package relay

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/session"
)

// TestRescueWaitsForTheLastClaim holds a dead relay's last claim inside the database, where killing a process does not
// end it: the rescue must not overlook what that claim is about to take.
func TestRescueWaitsForTheLastClaim(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := newDatabase(t)
	db.insert(1, "k")
	db.exec(`CREATE FUNCTION wait_for_test() RETURNS trigger LANGUAGE plpgsql AS
		'BEGIN PERFORM pg_advisory_xact_lock_shared(4711); RETURN NEW; END'`)
	db.exec(`CREATE TRIGGER wait_for_test BEFORE UPDATE ON outbox_delivery FOR EACH ROW
		WHEN (NEW.claimed_by IS NOT NULL) EXECUTE FUNCTION wait_for_test()`)
	connect := func() *pgx.Conn {
		conn, err := pgx.Connect(ctx, db.dsn)
		must(t, err)
		t.Cleanup(func() { _ = conn.Close(ctx) })
		return conn
	}
	holder := connect()
	_, err := holder.Exec(ctx, "SELECT pg_advisory_lock(4711)")
	must(t, err)

	victim := connect()
	instance, err := session.Register(ctx, victim, true, "victim", "", time.Hour)
	must(t, err)
	s := &store{pool: db.pool}
	claimed := make(chan int, 1)
	go func() {
		result, err := s.claim(ctx, instance, time.Hour, []claimRequest{{destination: "default", scans: []scan{{free: 10}}}})
		if err != nil {
			t.Error(err)
		}
		claimed <- len(result.deliveries)
	}()
	becomes(db, 1, "SELECT count(*)::int FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'")
	must(t, victim.Close(ctx))

	rescuer := connect()
	becomes(db, false, "SELECT "+pg.HasSession+" FROM outbox_relay r")
	rescued := make(chan bool, 1)
	go func() {
		dead, _, err := session.Rescue(ctx, rescuer, instance)
		if err != nil {
			t.Error(err)
		}
		rescued <- dead
	}()
	becomes(db, 1, "SELECT count(*)::int FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND wait_event <> 'advisory'")
	_, err = holder.Exec(ctx, "SELECT pg_advisory_unlock(4711)")
	must(t, err)
	if n := <-claimed; n != 1 {
		t.Errorf("the last claim took %d deliveries, want 1", n)
	}
	if !<-rescued {
		t.Error("the dead relay was not rescued")
	}
	if left := row[int](db, "SELECT count(*)::int FROM outbox_delivery d WHERE NOT "+pg.IsFree); left != 0 {
		t.Errorf("%d deliveries are left to their lease", left)
	}

	// Nor does a relay take anything once it has been taken for dead.
	after, err := s.claim(ctx, instance, time.Hour, []claimRequest{{destination: "default", scans: []scan{{free: 10}}}})
	must(t, err)
	if n := len(after.deliveries); n != 0 {
		t.Errorf("a relay that was rescued claimed %d deliveries", n)
	}
}

// A relay that comes back while a rescue waits for its last claim is not taken for dead, although its new session was not
// there when the rescue began.
func TestRelayThatComesBackDuringItsRescue(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	instance := db.dead()
	claim := db.locker(`SELECT FROM outbox_relay FOR KEY SHARE`)
	rescued := make(chan bool, 1)
	go func() {
		dead, _, err := session.Rescue(t.Context(), db.pool, instance)
		if err != nil {
			t.Error(err)
		}
		rescued <- dead
	}()
	becomes(db, 1, "SELECT count(*)::int FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
	conn, err := pgx.Connect(t.Context(), db.dsn)
	must(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	if resumed, err := session.Resume(t.Context(), conn, true, instance); err != nil || !resumed {
		t.Fatalf("resumed %t, %v", resumed, err)
	}
	_, err = claim.Exec(t.Context(), `COMMIT`)
	must(t, err)
	if <-rescued {
		t.Error("a relay that had come back was taken for dead")
	}
}
