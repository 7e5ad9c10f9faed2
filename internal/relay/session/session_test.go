package session

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/identity"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

// alone returns a session for a relay that does nothing else.
func alone(t testing.TB, db *relaytest.Database) *Session {
	t.Helper()
	pool, err := pgxpool.ParseConfig(db.DSN)
	relaytest.Must(t, err)
	failed := func(operation string, err error) { t.Errorf("%s: %v", operation, err) }
	return &Session{
		Config: Config{Pool: pool, Name: "test", Lease: time.Minute, AllowSuperuser: true}, Guard: identity.NewGuard(identity.Config{Failed: failed}),
		Presence: &Presence{}, Producers: &Producers{}, Failed: failed,
		Restore: func(context.Context, pg.Pool, int32) error { return nil },
		Enter:   func(_ context.Context, _ bool, alive func()) error { alive(); return nil },
		Beaten:  func(time.Time, int32, News) {}, Wake: func(Requests) {}, Listening: func(bool) {}, Waits: func() []string { return nil },
		Idle: func() bool { return false }, Rescued: func(int32) {},
	}
}

// beating returns the session of a registered relay whose beats the test sends itself.
func beating(t *testing.T, db *relaytest.Database, change ...func(*Session)) (*Session, *standing) {
	t.Helper()
	s := alone(t, db)
	for _, change := range change {
		change(s)
	}
	s.throttle()
	relaytest.Must(t, s.Open(t.Context()))
	t.Cleanup(s.Database.Direct.Close)
	on, err := s.connect(t.Context())
	relaytest.Must(t, err)
	t.Cleanup(func() { _ = on.conn.Close(context.WithoutCancel(t.Context())) })
	relaytest.Must(t, s.enter(t.Context(), on))
	return s, on
}

// The database stood still, or its clock was set: all heartbeats look old. A relay that beats twice
// before another one has beaten once, as a busy relay beside an idle one does, must not take that
// one for dead.
func TestLateBeatConvictsNoRelay(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	s, on := beating(t, db)
	silent, err := db.Pool.Acquire(t.Context())
	relaytest.Must(t, err)
	defer silent.Release()
	_, err = Register(t.Context(), silent, true, "silent", "", time.Hour)
	relaytest.Must(t, err)
	relaytest.Becomes(db, true, `SELECT pg_postmaster_start_time() < now() - interval '4 seconds'`)
	const relays = `SELECT count(*) FROM outbox_relay`
	for _, clockWas := range []string{"-1 hour", "1 year", "-1 hour"} {
		began := time.Now()
		db.Exec(`UPDATE outbox_relay SET heartbeat_at = now() + $1::interval`, clockWas)
		for range 3 {
			relaytest.Must(t, s.beat(t.Context(), on, began))
			if n := relaytest.Row[int](db, relays); n != 2 {
				t.Fatalf("%d relays are left of 2", n)
			}
		}
	}
	db.Exec(`UPDATE outbox_relay SET heartbeat_at = now() + interval '1 year' WHERE name = 'silent'`)
	relaytest.Eventually(t, "the rescue of the silent relay", func() bool {
		s.grace.silent = time.Time{} // as if this relay had watched for long enough
		db.Exec(`UPDATE outbox_relay SET heartbeat_at = now() WHERE name <> 'silent'`)
		relaytest.Must(t, s.beat(t.Context(), on, time.Now()))
		return relaytest.Row[int](db, relays) == 1
	})
}

// An idle relay that is alone beats less often, until another relay registers, an alert is open, a
// destination is in trouble, or a notification comes.
func TestCalmRelayBeatsLessOften(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	idle := true
	s, on := beating(t, db, func(s *Session) { s.Idle = func() bool { return idle } })
	wants := func(what string, interval time.Duration) {
		t.Helper()
		on.beaten = time.Now()
		testkit.Equal(t, what, s.nextBeat(on).Sub(on.beaten), interval)
	}
	testkit.Equal(t, "the first beat is due at", s.nextBeat(on), time.Time{})
	beats := func(what string, interval time.Duration) {
		t.Helper()
		relaytest.Eventually(t, what, func() bool { // no notification is on its way any more
			relaytest.Must(t, s.beat(t.Context(), on, time.Now()))
			return on.calm == (interval == calmBeatInterval)
		})
		wants(what, interval)
	}
	heard := func(what string) {
		t.Helper()
		relaytest.Eventually(t, what, func() bool {
			relaytest.Must(t, s.listen(t.Context(), on, time.Now().Add(10*time.Millisecond)))
			return !on.calm
		})
		wants(what, idleBeatInterval)
	}
	beats("alone", calmBeatInterval)
	idle = false
	wants("busy", beatInterval)
	idle = true

	other, err := Register(t.Context(), db.Pool, false, "other", "", time.Hour)
	relaytest.Must(t, err)
	heard("another relay registers")
	beats("beside another relay", idleBeatInterval)
	relaytest.Must(t, Deregister(t.Context(), db.Pool, other))
	beats("alone again", calmBeatInterval)
	db.Insert(1, "k")
	heard("an event comes")
	beats("afterwards", calmBeatInterval)
	for _, trouble := range []string{
		`INSERT INTO outbox_alert (rule, subject) VALUES ('lag', 'default')`,
		`INSERT INTO outbox_destination (destination, breaker_failures) VALUES ('default', 1)
			ON CONFLICT (destination) DO UPDATE SET breaker_failures = 1`,
	} {
		db.Exec(trouble)
		beats(trouble, idleBeatInterval)
		db.Exec(`DELETE FROM outbox_alert`)
		db.Exec(`UPDATE outbox_destination SET breaker_failures = 0`)
		beats("after it", calmBeatInterval)
	}
	pooled := *on
	pooled.conn = nil
	testkit.Equal(t, "without a session", s.nextBeat(&pooled).Sub(on.beaten), idleBeatInterval)
}
