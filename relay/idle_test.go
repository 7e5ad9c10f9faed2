package relay

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// The relay says when it is idle, and only then; a notification is all it needs to go on.
func TestIdlenessIsDeclaredAndEnds(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`CREATE TABLE declared (n serial, idle bool);
		CREATE FUNCTION note_idle() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO declared (idle) VALUES (NEW.idle); RETURN NULL; END $$;
		CREATE TRIGGER note_idle AFTER UPDATE OF idle ON outbox_relay FOR EACH ROW EXECUTE FUNCTION note_idle()`)
	rc := newReceiver(t, nil)
	cfg := db.config(to(rc.URL))
	cfg.PollInterval = time.Hour
	r := start(t, cfg)
	for round := 1; round <= 2; round++ {
		becomes(db, true, `SELECT coalesce((SELECT idle FROM declared ORDER BY n DESC LIMIT 1), false)`)
		db.insert(1, "round"+string(rune('0'+round)))
		r.settles(t, Delivered, round)
	}
	becomes(db, true, `SELECT idle FROM outbox_relay`)
	declared := rows[bool](db, `SELECT idle FROM declared ORDER BY n`)
	for i := 1; i < len(declared); i++ {
		if declared[i] == declared[i-1] {
			t.Errorf("%v: declared twice in a row", declared)
		}
	}
	if !slices.Contains(declared, false) {
		t.Errorf("%v: a relay with work is idle", declared)
	}
}

// sessionOf runs nothing of a relay but its session: what wakes up stays in the channel.
func sessionOf(t testing.TB, cfg Config) *Relay {
	t.Helper()
	r, err := New(cfg)
	must(t, err)
	pool, err := pgxpool.NewWithConfig(t.Context(), r.poolConfig())
	must(t, err)
	r.pool, r.store, r.chores = pool, &store{pool: pool}, &store{pool: pool}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { r.session.run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
		pool.Close()
	})
	eventually(t, "the registration", func() bool { _, alive := r.session.current(); return alive })
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
	instance, _ := r.session.current()

	db.insert(1, "busy")
	must(t, r.store.declareIdle(t.Context(), instance, true))
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
