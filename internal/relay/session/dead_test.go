package session

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// dead registers a relay that does not live, and returns its number.
func dead(db *relaytest.Database) int32 {
	db.Helper()
	return relaytest.Row[int32](db, `INSERT INTO outbox_relay (name, version, lease, session_pid) VALUES ('dead', '', '1 hour', 0) RETURNING id`)
}

// A registration is that of a relay whose session a test holds.
type registration struct {
	conn    *pgx.Conn
	relayID int32
}

func registered(t *testing.T, db *relaytest.Database, name string) registration {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), db.DSN)
	relaytest.Must(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	relayID, err := Register(t.Context(), conn, true, name, "", time.Hour)
	relaytest.Must(t, err)
	return registration{conn, relayID}
}

// claimed makes the deliveries for which where holds claimed by a relay.
func claimed(db *relaytest.Database, relayID int32, where string) {
	db.Helper()
	db.Exec(`UPDATE outbox_delivery SET claim = 1, claimed_by = $1, lease_expires_at = now() + interval '1 hour' WHERE `+where, relayID)
}

// wantFree checks which events' deliveries no relay has in flight.
func wantFree(db *relaytest.Database, want ...int64) {
	db.Helper()
	if got := relaytest.Rows[int64](db, `SELECT event_id FROM outbox_delivery d WHERE `+pg.IsFree+` ORDER BY 1`); !slices.Equal(got, want) {
		db.Errorf("free are %v, want %v", got, want)
	}
}

// claiming returns a claim that the database still executes: as each does, it has locked its
// relay's row.
func claiming(db *relaytest.Database, relayID int32) pgx.Tx {
	db.Helper()
	tx := db.Begin()
	_, err := tx.Exec(db.Context(), `SELECT FROM outbox_relay WHERE id = $1 FOR KEY SHARE`, relayID)
	relaytest.Must(db, err)
	return tx
}

const waiting = `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`

// behind runs a function that has to wait for a claim; then the claim takes everything, and
// commits.
func behind(db *relaytest.Database, claim pgx.Tx, relayID int32, wait func() error) {
	db.Helper()
	done := make(chan error, 1)
	go func() { done <- wait() }()
	relaytest.Becomes(db, 1, waiting)
	_, err := claim.Exec(db.Context(), `UPDATE outbox_delivery SET claim = 1, claimed_by = $1, lease_expires_at = clock_timestamp() + interval '1 hour'`, relayID)
	relaytest.Must(db, err)
	relaytest.Must(db, claim.Commit(db.Context()))
	relaytest.Must(db, <-done)
}

func rescue(db *relaytest.Database, relayID int32, want bool) error {
	rescued, _, err := Rescue(db.Context(), db.Pool, relayID)
	if err == nil && rescued != want {
		err = fmt.Errorf("rescued: %t", rescued)
	}
	return err
}

// A dead relay's last claim still runs in the database, where killing a process does not end it:
// the rescue must not overlook what that claim is about to take.
func TestRescueWaitsForTheLastClaim(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(2, "k")
	victim := registered(t, db, "victim")
	relaytest.Must(t, rescue(db, victim.relayID, false))
	claim := claiming(db, victim.relayID)
	relaytest.Must(t, victim.conn.Close(t.Context()))
	relaytest.Becomes(db, false, `SELECT `+pg.HasSession+` FROM outbox_relay r`)
	behind(db, claim, victim.relayID, func() error { return rescue(db, victim.relayID, true) })
	wantFree(db, 1, 2)
	relaytest.Must(t, rescue(db, victim.relayID, false)) // another relay was faster
}

// A lease that was written before the clock was put back ends later than any other, and later than
// what a rescue ends.
func TestLeaseFromTheFutureHoldsNothing(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(2, "k")
	relayID := dead(db)
	claimed(db, relayID, "event_id = 1")
	db.Exec(`UPDATE outbox_delivery SET claim = 1, claimed_by = $1, lease_expires_at = now() + interval '1 year' WHERE event_id = 2`, relayID)
	relaytest.Must(t, rescue(db, relayID, true))
	wantFree(db, 1, 2)
}

// A relay that comes back while a rescue waits for its last claim is not taken for dead, although
// its new session was not there when the rescue began.
func TestRelayThatComesBackDuringItsRescue(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	relayID := dead(db)
	claim := claiming(db, relayID)
	rescued := make(chan error, 1)
	go func() { rescued <- rescue(db, relayID, false) }()
	relaytest.Becomes(db, 1, waiting)
	conn, err := pgx.Connect(t.Context(), db.DSN)
	relaytest.Must(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	if resumed, err := resume(t.Context(), conn, true, relayID, time.Minute); err != nil || !resumed {
		t.Fatalf("resumed %t, %v", resumed, err)
	}
	relaytest.Must(t, claim.Commit(t.Context()))
	relaytest.Must(t, <-rescued)
}

// Rescuing and leaving touch no delivery, so that they cost the same whatever is pending or locked,
// and free nothing of the living. A trial ends with its relay, unless an operator has locked it.
func TestEndOfARelayTouchesNoDelivery(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(10, "key")
	killed, leaving, alive := dead(db), dead(db), dead(db)
	claimed(db, killed, "event_id <= 3")
	claimed(db, leaving, "event_id BETWEEN 4 AND 6")
	claimed(db, alive, "event_id > 6")
	db.Exec(`INSERT INTO outbox_destination (destination, breaker, breaker_opened_at, breaker_until, breaker_relay_id)
		SELECT d, 'half_open', now(), now() + interval '1 day', CASE d WHEN 'left' THEN $2::int ELSE $1 END FROM unnest(ARRAY['locked', 'killed', 'left']) d`, killed, leaving)
	before := relaytest.Rows[string](db, `SELECT d::text FROM outbox_delivery d ORDER BY event_id`)
	operator := db.Begin()
	_, err := operator.Exec(t.Context(), `LOCK TABLE outbox_delivery; SELECT FROM outbox_destination WHERE destination = 'locked' FOR UPDATE`)
	relaytest.Must(t, err)
	ended := make(chan error, 1)
	go func() {
		ended <- errors.Join(rescue(db, killed, true), Deregister(t.Context(), db.Pool, leaving))
	}()
	select {
	case err := <-ended:
		relaytest.Must(t, err)
	case <-time.After(relaytest.Patience):
		t.Fatal("the end of a relay waits for a lock of deliveries")
	}
	relaytest.Must(t, operator.Commit(t.Context()))
	wantFree(db, 1, 2, 3, 4, 5, 6)
	// What was sent before is settled under its claim all the same.
	if after := relaytest.Rows[string](db, `SELECT d::text FROM outbox_delivery d ORDER BY event_id`); !slices.Equal(before, after) {
		t.Errorf("%q became %q", before, after)
	}
	want := []string{"killed open t", "left open t", "locked half_open f"}
	if got := relaytest.Rows[string](db, `SELECT concat_ws(' ', destination, breaker, breaker_relay_id IS NULL AND breaker_until <= now()) FROM outbox_destination ORDER BY 1`); !slices.Equal(got, want) {
		t.Errorf("trials are %q, want %q", got, want)
	}
	// To leave is not to die: it counts as no rescue.
	testkit.Equal(t, "rescues of", relaytest.Rows[int32](db, `SELECT relay_id FROM outbox_rescue UNION ALL SELECT relay_id FROM outbox_void WHERE died`), []int32{killed, killed})
}

// A claim that the database still executes when its connection is lost is waited for. A later claim
// stands.
func TestGiveBackWaitsForARunningClaim(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "key")
	relayID := dead(db)
	var lost Unacknowledged
	giveBack := func() error { return lost.GiveBack(t.Context(), db.Pool, relayID) }
	lost.Failed(relayID, &pgconn.PgError{SeverityUnlocalized: "ERROR"}) // the server has undone it
	relaytest.Must(t, giveBack())
	testkit.Equal(t, "given back although nothing can have been taken", relaytest.Row[int](db, `SELECT count(*) FROM outbox_void`), 0)
	lost.Failed(relayID, errors.New("unexpected EOF"))
	behind(db, claiming(db, relayID), relayID, giveBack)
	wantFree(db, 1)
	claimed(db, relayID, "true")
	relaytest.Must(t, giveBack()) // there is nothing more to give back
	wantFree(db)
	at := relaytest.Row[time.Time](db, `SELECT lease_expires_at - interval '1 hour' FROM outbox_delivery`)
	lost.Acknowledged(relayID, at, time.Hour)
	lost.Failed(relayID, errors.New("unexpected EOF"))
	relaytest.Must(t, giveBack()) // a later one is lost, and the acknowledged one stands
	wantFree(db)
}

// A claim without an answer is given back, and nothing that the relay has in hand of a range and
// has written a row of meanwhile: it sends that. Its death ends both.
func TestGiveBackLeavesRanges(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(2, "key")
	relayID := dead(db)
	claimed(db, relayID, "true")
	db.Exec(`UPDATE outbox_delivery SET claim = 2 WHERE event_id = 2`) // an even one
	relaytest.Must(t, GiveBackUnacknowledged(t.Context(), db.Pool, relayID, time.Time{}))
	wantFree(db, 1)
	relaytest.Must(t, rescue(db, relayID, true))
	wantFree(db, 1, 2)
}

// A relay that lives loses acknowledgements for days: what is over does not pile up.
func TestVoidClaimsAreForgotten(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	relayID := dead(db)
	for range 3 {
		relaytest.Must(t, GiveBackUnacknowledged(t.Context(), db.Pool, relayID, time.Time{}))
		db.Exec(`UPDATE outbox_void SET until = until - interval '2 hours' WHERE until > now()`)
	}
	testkit.Equal(t, "rows", relaytest.Row[int](db, `SELECT count(*) FROM outbox_void`), 1)
}

// Relays with and without a session live side by side: neither takes the other for dead, each
// rescues the other kind when it is, and none rescues one that waits for an operator.
func TestRelaysWithAndWithoutSession(t *testing.T) {
	t.Parallel()
	for _, mode := range []PoolerMode{PoolerNone, PoolerTransaction} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			registered(t, db, "connected")
			db.Exec(`INSERT INTO outbox_relay (name, version, session_pid, heartbeat_at, lease, quarantined) VALUES
				('gone', '', 0, now(), '2 hours', NULL), ('quarantined', '', NULL, now(), '2 hours', 'reason'),
				('heard', '', NULL, now() - interval '1 hour', '2 hours', NULL), ('silent', '', NULL, now() - interval '3 hours', '2 hours', NULL)`)
			db.Exec(`UPDATE outbox_relay SET heartbeat_at = now() + interval '14 seconds' WHERE name = 'connected'`)
			r := prepared(db)
			r.Config.Pooler.Mode = mode
			r.WatchFor = time.Nanosecond
			r.begin()
			r.await("two rescues", func() bool { return len(r.rescued) >= 2 })
			testkit.Equal(t, "registered", relaytest.Row[string](db, `SELECT string_agg(name, ' ' ORDER BY name) FROM outbox_relay`), "connected heard quarantined test")
		})
	}
}

// A frozen relay's session lasts, and reads nothing: the relay that rescues it ends the session.
func TestSessionOfASilentRelayIsEnded(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	frozen := registered(t, db, "frozen")
	r := prepared(db)
	r.WatchFor = time.Nanosecond
	r.begin().alive()
	awaitServer(db)
	db.Exec(`UPDATE outbox_relay SET heartbeat_at = now() - interval '1 hour' WHERE id = $1`, frozen.relayID)
	r.await("the rescue", func() bool { return len(r.rescued) == 1 })
	relaytest.Becomes(db, 0, `SELECT count(*) FROM pg_stat_activity WHERE pid = $1`, frozen.conn.PgConn().PID())
}

// A stranger's session has the name of a relay that dies, and its number as a lock. The relay is
// rescued all the same, also when its heartbeat says nothing.
func TestSecurityStrangerKeepsNoDeadRelayAlive(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	victim := registered(t, db, "victim")
	other := relaytest.Stranger(db, fmt.Sprint("outbox-relay session ", victim.relayID))
	_, err := other.Exec(t.Context(), `SELECT pg_advisory_lock('outbox_relay'::regclass::oid::int, $1)`, victim.relayID)
	relaytest.Must(t, err)
	r := started(db)
	r.alive()
	awaitServer(db)
	db.Exec(`UPDATE outbox_relay SET heartbeat_at = now() + interval '1 hour' WHERE id = $1`, victim.relayID)
	r.wantRescued()
	relaytest.Must(t, victim.conn.Close(t.Context()))
	r.await("the rescue", func() bool { return len(r.rescued) == 1 })
	r.wantRescued(victim.relayID)
}
