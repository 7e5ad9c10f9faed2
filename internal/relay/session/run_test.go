package session

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/identity"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// A relay is one that does nothing but keep its session, with what the session made it do.
type relay struct {
	*Session
	db   *relaytest.Database
	away atomic.Bool // no connection can be made
	stop func()
	ends error // the cause of stop

	mu        sync.Mutex
	beats     int
	rescued   []int32
	failures  map[string]int
	last      error
	asked     Requests
	sweeps    int
	listening []bool
}

// prepared returns a relay that is not started yet.
func prepared(db *relaytest.Database) *relay {
	db.Helper()
	r := &relay{db: db, Session: alone(db, db), failures: map[string]int{}}
	r.Config.Pool.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
		if r.away.Load() {
			return errors.New("away")
		}
		return nil
	}
	r.Beaten = func(time.Time, int32, News) { r.change(func() { r.beats++ }) }
	r.Rescued = func(relayID int32) { r.change(func() { r.rescued = append(r.rescued, relayID) }) }
	r.Listening = func(is bool) { r.change(func() { r.listening = append(r.listening, is) }) }
	r.Failed = func(operation string, err error) { r.change(func() { r.failures[operation]++; r.last = err }) }
	r.Wake = func(asked Requests) {
		r.change(func() {
			r.asked.Commits += asked.Commits
			r.asked.Routes = r.asked.Routes || asked.Routes
			if asked.Sweep {
				r.sweeps++
			}
		})
	}
	return r
}

// begin starts the relay, which must leave nothing behind when it stops.
func (r *relay) begin() *relay {
	r.db.Helper()
	relaytest.Must(r.db, r.Open(r.db.Context()))
	relaytest.Must(r.db, r.Check(r.db.Context()))
	r.Guard.Shut()
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(r.db.Context()))
	var running sync.WaitGroup
	running.Go(func() { r.Run(ctx) })
	r.stop = sync.OnceFunc(func() {
		cancel(r.ends)
		running.Wait()
		r.Database.Direct.Close()
	})
	r.db.Cleanup(func() { r.stop() })
	return r
}

func started(db *relaytest.Database) *relay {
	db.Helper()
	return prepared(db).begin()
}

func (r *relay) change(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
}

// await waits until something is so.
func (r *relay) await(what string, is func() bool) {
	r.db.Helper()
	relaytest.Eventually(r.db, what, func() (done bool) {
		r.change(func() { done = is() })
		return done
	})
}

// awaitBeats waits for n more beats.
func (r *relay) awaitBeats(n int) {
	r.db.Helper()
	var before int
	r.change(func() { before = r.beats })
	r.await("beats", func() bool { return r.beats >= before+n })
}

func (r *relay) awaitFailures(n int) {
	r.db.Helper()
	r.await("failures of the session", func() bool { return r.failures["session"] >= n })
}

// alive waits until the relay is registered, and returns its number.
func (r *relay) alive() (relayID int32) {
	r.db.Helper()
	r.await("the registration", func() (is bool) {
		relayID, is = r.Presence.Current()
		return is
	})
	return relayID
}

// wantRescued checks which relays this one has rescued.
func (r *relay) wantRescued(want ...int32) {
	r.db.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.rescued) != len(want) || len(want) == 1 && r.rescued[0] != want[0] {
		r.db.Errorf("rescued %v, want %v", r.rescued, want)
	}
}

// cut ends the connections of all relays.
func cut(db *relaytest.Database) {
	db.Helper()
	db.Exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'outbox-relay%'`)
}

// awaitServer waits until the server has run for so long that relays look for dead ones.
func awaitServer(db *relaytest.Database) {
	db.Helper()
	relaytest.Becomes(db, true, `SELECT pg_postmaster_start_time() < now() - interval '4 seconds'`)
}

const relays = `SELECT count(*) FROM outbox_relay`

// A session that breaks is not a relay that dies: it comes back under its number. When it stops it
// leaves.
func TestCutSessionResumes(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	r := started(db)
	relayID := r.alive()
	for range 3 {
		var failures, sweeps int // one cut may fail more than once
		r.change(func() { failures, sweeps = r.failures["session"], r.sweeps })
		cut(db)
		r.awaitFailures(failures + 1)
		r.await("a sweep for the return", func() bool { return r.sweeps > sweeps })
		if again := r.alive(); again != relayID || !r.Presence.WasLost() {
			t.Fatalf("relay %d became %d, or its loss was not noticed", relayID, again)
		}
	}
	r.awaitBeats(1) // it counts as alive before its return is complete, and a stop in between leaves its row to others
	r.stop()
	testkit.Equal(t, "relays left", relaytest.Row[int](db, relays), 0)
}

// Another relay took this one for dead, while its session was away or while it stood still: it
// starts under another number.
func TestRelayTakenForDeadRegistersAnew(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	r := started(db)
	relayID := r.alive()
	r.away.Store(true)
	cut(db)
	r.awaitFailures(1)
	relaytest.Eventually(t, "the rescue", func() bool {
		dead, _, err := Rescue(t.Context(), db.Pool, relayID)
		relaytest.Must(t, err)
		return dead
	})
	r.away.Store(false)
	again := r.alive()
	if again == relayID {
		t.Error("it continues under the number of which others know that it is dead")
	}
	db.Exec(`DELETE FROM outbox_relay`)
	r.await("the notice", func() bool { return errors.Is(r.last, pg.ErrTakenForDead) })
	if r.alive() == again {
		t.Error("it continues although its row is gone")
	}
}

// A beat brings what other relays have written about destinations, and what is to be done beside
// claiming.
func TestBeatBringsNews(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	s, on := beating(t, db)
	var found News
	s.Beaten = func(_ time.Time, _ int32, news News) { found = news }
	beat := func() {
		t.Helper()
		relaytest.Must(t, s.beat(t.Context(), on, time.Now()))
	}
	db.Exec(`INSERT INTO outbox_destination (destination) VALUES ('fine')`)
	if beat(); len(found.States) != 0 || found.Alerts || found.Parked {
		t.Errorf("found %+v where there is nothing", found)
	}
	db.Exec(`INSERT INTO outbox_destination (destination, breaker, breaker_opened_at, breaker_until, breaker_relay_id) VALUES ('tried', 'half_open', now(), now() + interval '1 hour', 7)`)
	db.Exec(`INSERT INTO outbox_destination (destination, breaker_failures, parked_after) VALUES ('failing', 2, 0)`)
	db.Exec(`INSERT INTO outbox_alert (rule, subject) VALUES ('failed', 'default')`)
	if beat(); len(found.States) != 2 || !found.Alerts || !found.Parked {
		t.Fatalf("found %+v", found)
	}
	for _, state := range found.States {
		switch {
		case state.Destination == "tried" && state.Owner == 7 && state.Remaining > 59*time.Minute && state.Breaker == "half_open":
		case state.Destination == "failing" && state.Failures == 2 && state.Breaker == "closed":
		default:
			t.Errorf("found %+v", state)
		}
	}
}

// All relays lose the database for a while and come back one after the other: none of them is dead.
func TestRelaysThatComeBackDoNotRescueEachOther(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := relaytest.Covered(t)
	first, second := started(db), started(db)
	relayIDs := []int32{first.alive(), second.alive()}
	awaitServer(db)
	first.away.Store(true)
	second.away.Store(true)
	cut(db)
	first.awaitFailures(10) // long enough for a relay with growing pauses to be late
	second.awaitFailures(10)
	first.away.Store(false)
	first.alive()
	var n int
	second.change(func() { n = second.failures["session"] })
	second.awaitFailures(n + 1)
	second.away.Store(false)
	for i, r := range []*relay{first, second} {
		if again := r.alive(); again != relayIDs[i] {
			t.Errorf("relay %d became %d", relayIDs[i], again)
		}
		r.wantRescued()
	}
}

// A session that fails half-way must not leave one registration after the other behind, with or
// without a pooler.
func TestFailingSessionLeavesOneRegistration(t *testing.T) {
	t.Parallel()
	for _, mode := range []PoolerMode{PoolerNone, PoolerTransaction} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			r := prepared(db)
			r.Config.Pooler.Mode = mode
			entering := r.Enter
			entries := 0
			r.Enter = func(ctx context.Context, resumed bool, alive func()) error {
				if entries++; entries <= 4 {
					return errors.New("half-way")
				}
				return entering(ctx, resumed, alive)
			}
			r.begin()
			r.awaitFailures(4)
			r.alive()
			testkit.Equal(t, "registrations of one relay", relaytest.Row[int](db, relays), 1)
		})
	}
}

// What a crash has undone is written again before anything else is: until then the pool lets no
// statement through. A connection that outlives the session has met no crash, unless it leads to a
// pooler.
func TestNothingIsWrittenBeforeWhatWasUndone(t *testing.T) {
	t.Parallel()
	for mode, between := range map[PoolerMode]error{PoolerNone: nil, PoolerTransaction: identity.ErrGuarded} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			r := prepared(db)
			r.Config.Pooler.Mode = mode
			restored, entered, ended := make(chan error, 2), make(chan error, 2), make(chan error, 2)
			try := func() error {
				_, err := r.Database.Pool.Exec(t.Context(), `SELECT 1`)
				return err
			}
			r.Restore = func(ctx context.Context, on pg.Pool, _ int32) error {
				restored <- try()
				_, err := on.Exec(ctx, `SELECT 1`)
				return err
			}
			r.Enter = func(_ context.Context, _ bool, alive func()) error {
				entered <- try()
				alive()
				return nil
			}
			r.Failed = func(string, error) { ended <- try() }
			r.begin()
			for range 2 {
				testkit.ErrorIs(t, "a statement before", <-restored, identity.ErrGuarded)
				testkit.ErrorIs(t, "a statement after", <-entered, nil)
				r.alive()
				db.Exec(`DELETE FROM outbox_relay`) // by those who take it for dead
				testkit.ErrorIs(t, "a statement in between", <-ended, between)
			}
		})
	}
}

// A relay that starts takes over at once from those that died before it came, and looks for their
// deliveries and routes. Relays that beat are alive, however often the others look.
func TestOnlyTheDeadAreRescued(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	gone := dead(db)
	first := started(db)
	first.alive()
	first.await("the rescue", func() bool { return len(first.rescued) == 1 && first.sweeps >= 2 && first.asked.Routes })
	second := started(db)
	relayIDs := []int32{first.alive(), second.alive()}
	awaitServer(db)
	first.awaitBeats(1)
	second.awaitBeats(1)
	if first.alive() != relayIDs[0] || second.alive() != relayIDs[1] {
		t.Errorf("relays %v became %d and %d", relayIDs, first.alive(), second.alive())
	}
	first.wantRescued(gone)
	second.wantRescued()
}

// A relay that starts cannot know whether an old heartbeat is that of a frozen relay, or the
// database stood still just before. A session that is gone is seen at once.
func TestNewRelayWatchesBeforeItConvicts(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	lasting := registered(t, db, "silent")
	gone := dead(db)
	db.Exec(`UPDATE outbox_relay SET heartbeat_at = now() - interval '1 hour'`)
	awaitServer(db)
	r := prepared(db)
	r.WatchFor = time.Hour
	r.begin()
	r.await("the rescue of the relay whose session is gone", func() bool { return len(r.rescued) > 0 })
	r.awaitBeats(1)
	r.wantRescued(gone)
	if !relaytest.Row[bool](db, `SELECT EXISTS (SELECT FROM outbox_relay WHERE id = $1)`, lasting.relayID) {
		t.Error("it rescued a relay whose session lasts, without having watched it")
	}
}

// For a while the database only reads, as after a failover that went the wrong way.
func TestReadOnlyDatabaseIsWaitedFor(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	r := started(db)
	r.alive()
	name := relaytest.Row[string](db, `SELECT current_database()`)
	db.Exec(`ALTER DATABASE ` + name + ` SET default_transaction_read_only = on`)
	cut(db)
	r.awaitFailures(3)
	r.change(func() {
		if !pg.HasCode(r.last, pg.ReadOnlyTransaction) || pg.Hint(r.last) == "" {
			t.Errorf("the failure is %v", r.last)
		}
	})
	db.Exec(`ALTER DATABASE ` + name + ` RESET default_transaction_read_only`)
	r.alive()
}

// The session of an idle relay is silent between two beats, for longer than the database allows.
func TestIdleSessionOutlivesTheTimeoutOfIdleSessions(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	r := prepared(db)
	r.Config.Pool.ConnConfig.RuntimeParams["idle_session_timeout"] = "100" // as role or database may have it
	r.Idle = func() bool { return true }
	r.begin()
	r.await("beats", func() bool { return r.beats >= 2 })
	if len(r.failures) != 0 {
		t.Errorf("failed: %v", r.failures)
	}
}

// Passwords that are fetched for every connection come in BeforeConnect: the session's connection
// needs them too.
func TestSessionConnectsAsThePoolDoes(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	r := prepared(db)
	right := r.Config.Pool.ConnConfig.Database
	r.Config.Pool.ConnConfig.Database = "nowhere"
	r.Config.Pool.BeforeConnect = func(_ context.Context, conn *pgx.ConnConfig) error {
		conn.Database = right
		return nil
	}
	var connected atomic.Int32
	r.Config.Pool.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		connected.Add(1)
		_, err := conn.Exec(ctx, `SET work_mem = '7MB'`)
		return err
	}
	shown := ""
	r.Restore = func(ctx context.Context, on pg.Pool, _ int32) error {
		return on.QueryRow(ctx, `SHOW work_mem`).Scan(&shown)
	}
	r.begin().alive()
	if n := connected.Load(); n != 3 || shown != "7MB" { // the one that finds the schema, the pool's first, which was checked, and the session's
		t.Errorf("%d connections with AfterConnect, the session has %s", n, shown)
	}
}

// A stop in the middle of a beat must not cost the connection on which the relay has to leave.
func TestStopDuringABeat(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	r := started(db)
	r.alive()
	operator := db.Begin()
	_, err := operator.Exec(t.Context(), `LOCK TABLE outbox_relay`)
	relaytest.Must(t, err)
	relaytest.Becomes(db, 1, waiting)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		r.stop()
	}()
	relaytest.Must(t, operator.Commit(t.Context()))
	<-stopped
	testkit.Equal(t, "relays left in the registry", relaytest.Row[int](db, relays), 0)
}

// An operator decides that relays of this environment have no business here: the session ends, and
// the relay forgets its number, until the database is accepted for it.
func TestSessionEndsWhereItDoesNotBelong(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	r := prepared(db)
	reasons := make(chan string, 10)
	r.Guard = identity.NewGuard(identity.Config{
		Name: "test", Environment: "production", AlertEvery: time.Hour, Failed: r.Failed, Alert: func() {},
		Disown: func() { r.Presence.Set(0, false) }, Quarantined: func(reason string) { reasons <- reason },
	})
	r.begin().alive()
	db.Exec(`UPDATE outbox_identity SET environment = 'staging'`)
	<-reasons
	if relayID, alive := r.Presence.Current(); relayID != 0 || alive {
		t.Errorf("relay %d, alive: %t", relayID, alive)
	}
	testkit.ErrorIs(t, "a statement", r.Database.Pool.QueryRow(t.Context(), `SELECT 1`).Scan(nil), identity.ErrGuarded)
	db.Exec(`UPDATE outbox_identity SET environment = 'production'`)
	r.alive()
}
