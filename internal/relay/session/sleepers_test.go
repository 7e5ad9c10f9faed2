package session

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A dormant is the relay of a database that is asleep.
type dormant struct {
	*relaytest.Database
	Sleep
	*Sleepers
	beats chan time.Time
	awake chan struct{}
	stop  func()
}

func asleep(t *testing.T, db *relaytest.Database, change ...func(*Sleep)) *dormant {
	t.Helper()
	pool, err := pgxpool.ParseConfig(db.DSN)
	relaytest.Must(t, err)
	relayID, err := Register(t.Context(), db.Pool, false, "asleep", "", time.Second)
	relaytest.Must(t, err)
	relaytest.Must(t, fallAsleep(t.Context(), db.Pool, relayID))
	ctx, cancel := context.WithCancel(t.Context())
	d := &dormant{
		Database: db, Sleepers: NewSleepers(zerolog.Nop()),
		beats: make(chan time.Time), awake: make(chan struct{}),
	}
	d.beatEvery, d.patience = 20*time.Millisecond, 200*time.Millisecond
	d.Sleep = Sleep{Pool: pool, RelayID: relayID, Schema: relaytest.Row[string](db, `SELECT current_schema()`), Beaten: func(at time.Time) {
		select {
		case d.beats <- at:
		default:
		}
	}}
	for _, change := range change {
		change(&d.Sleep)
	}
	var sleeping sync.WaitGroup
	sleeping.Go(func() {
		d.Sleepers.Sleep(ctx, d.Sleep)
		close(d.awake)
	})
	d.stop = sync.OnceFunc(func() {
		cancel()
		sleeping.Wait()
		d.Leave(d.Sleep)
		d.Close()
	})
	t.Cleanup(func() { d.stop() })
	return d
}

// sleepsOn waits for some beats.
func (d *dormant) sleepsOn() {
	d.Helper()
	for range 3 {
		select {
		case <-d.beats:
		case <-d.awake:
			d.Fatal("it woke up")
		}
	}
}

// A relay that is asleep counts as alive, and producers notify it.
func TestSleeperIsAlive(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	d := asleep(t, db)
	d.sleepsOn()
	for is, query := range map[string]string{
		"alive":    `SELECT asleep AND heartbeat_at > now() - interval '5 seconds' AND lease >= interval '1 minute' FROM outbox_relay`,
		"notified": `SELECT last_value > extract(epoch FROM now()) * 1000 + 30000 FROM outbox_armed`,
		"alone":    `SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'outbox-relay%'`,
	} {
		if !relaytest.Row[bool](db, query) {
			t.Errorf("it is not %s", is)
		}
	}
	db.Exec(`UPDATE outbox_relay SET heartbeat_at = now() - interval '50 seconds'`)
	d.stop()
	testkit.Equal(t, "left", relaytest.Row[int](db, relays), 0)
}

func TestWhatWakesASleeper(t *testing.T) {
	t.Parallel()
	const due = `INSERT INTO outbox_delivery (event_id, destination, status, next_attempt_at, blocked_by) VALUES (1, 'default', `
	for name, c := range map[string]struct {
		by    string
		wakes bool
	}{
		"a delivery":             {due + `'pending', now() + interval '1 day', NULL)`, true},
		"one that waits":         {due + `'pending', now(), 7)`, true},
		"one that has failed":    {due + `'failed', now(), NULL)`, false},
		"an alert":               {`INSERT INTO outbox_alert (rule, subject) VALUES ('lag', 'default')`, true},
		"a held destination":     {`INSERT INTO outbox_destination (destination, breaker_failures) VALUES ('other', 1)`, true},
		"a living relay":         {`INSERT INTO outbox_relay (name, version) VALUES ('other', '')`, false},
		"a dead relay":           {`INSERT INTO outbox_relay (name, version, heartbeat_at) VALUES ('other', '', now() - interval '1 hour')`, true},
		"its row is gone":        {`DELETE FROM outbox_relay`, true},
		"a commit":               {`SELECT pg_notify('outbox_wake', current_schema())`, true},
		"a request to sweep":     {`SELECT pg_notify('outbox_wake', 'sweep ' || current_schema())`, true},
		"a request about routes": {`SELECT pg_notify('outbox_wake', 'routes ' || current_schema())`, true},
		"another relay":          {`SELECT pg_notify('outbox_wake', 'relay ' || current_schema())`, false},
		"another schema":         {`SELECT pg_notify('outbox_wake', 'other')`, false},
		"its connection ends":    {`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'outbox-relay%'`, false},
		"nothing can be written": {`ALTER TABLE outbox_relay RENAME TO outbox_other`, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := asleep(t, relaytest.Covered(t))
			d.sleepsOn()
			d.Exec(c.by)
			if c.wakes {
				<-d.awake
			} else {
				d.sleepsOn()
			}
		})
	}
}

// Time, a word, and a database that is away wake a sleeper.
func TestOtherEndsOfASleep(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	<-asleep(t, db, func(s *Sleep) { s.Until = time.Now().Add(100 * time.Millisecond) }).awake
	word := make(chan struct{})
	d := asleep(t, db, func(s *Sleep) { s.Wake = word })
	d.sleepsOn()
	close(word)
	<-d.awake
	away, err := pgxpool.ParseConfig("postgres://nobody@/none?host=" + t.TempDir())
	relaytest.Must(t, err)
	<-asleep(t, db, func(s *Sleep) { s.Pool = away }).awake
}

// An idle relay falls asleep when its time has come, unless there is something to do.
func TestIdleSessionFallsAsleep(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	r := prepared(db)
	asked := make(chan int32, 1)
	r.SleepAfter, r.Idle = time.Millisecond, func() bool { return true }
	r.FallAsleep = func(relayID int32, _ string) { asked <- relayID }
	db.Exec(`INSERT INTO outbox_alert (rule, subject) VALUES ('lag', 'default')`)
	r.begin()
	relayID := r.alive()
	r.awaitBeats(3)
	if len(asked) > 0 {
		t.Error("it would sleep beside an alert")
	}
	db.Exec(`DELETE FROM outbox_alert`)
	if got := <-asked; got != relayID {
		t.Errorf("relay %d falls asleep, not %d", got, relayID)
	}
	r.ends = ErrAsleep
	r.stop()
	if !relaytest.Row[bool](db, `SELECT asleep AND session_pid IS NULL FROM outbox_relay WHERE id = $1`, relayID) {
		t.Error("it is not asleep")
	}
}

// Neither statement reads what was delivered, with statistics or without.
func TestSleepersReadNoHistory(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`ALTER TABLE outbox_delivery SET (autovacuum_enabled = off)`)
	db.Fill(50_000, 100)
	pool, err := pgxpool.ParseConfig(db.DSN)
	relaytest.Must(t, err)
	conn, err := pgx.ConnectConfig(t.Context(), (&Config{Pool: pool}).PoolConfig().ConnConfig)
	relaytest.Must(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	db.Exec(`VACUUM outbox, outbox_delivery`)
	for _, state := range []string{`SELECT`, `ANALYZE`} {
		db.Exec(state)
		for name, statement := range map[string]string{"falls asleep": HasWork, "is asleep": BeatOfSleeper} {
			if e := relaytest.Explain(t, conn, statement, 1); e.Buffers > 200 {
				t.Errorf("after %s, who %s reads %d pages:\n%s", state, name, e.Buffers, e.Plan)
			}
		}
	}
}

// A notification ends no relay that leaves: it would stay registered.
func TestNotificationsLeaveThoseWhoLeave(t *testing.T) {
	t.Parallel()
	leaves, sleeps := newSleeper(Sleep{Schema: "a"}), newSleeper(Sleep{Schema: "b"})
	leaves.leaving = true
	h := &sharedSession{sleepers: map[string]*sleeper{"a": leaves, "b": sleeps}}
	for _, payload := range []string{"sweep a", "routes b"} {
		h.hear(nil, &pgconn.Notification{Payload: payload})
	}
	if h.sleepers["a"] == nil || h.sleepers["b"] != nil {
		t.Errorf("left are %v", h.sleepers)
	}
	<-sleeps.ended
}
