package relay

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/relay/breaker"
	"github.com/outbox-relay/outbox-relay/relay/ops"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/session"
)

// stranger connects as a login that has no right but CONNECT, under the given application_name.
func (db *database) stranger(application string) *pgx.Conn {
	db.Helper()
	name := row[string](db, `SELECT 'stranger_of_' || current_database()`)
	db.exec(`DO $$ BEGIN CREATE ROLE ` + name + ` LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$`)
	u, err := url.Parse(db.dsn)
	must(db, err)
	u.User = url.User(name)
	cfg, err := pgx.ParseConfig(u.String())
	must(db, err)
	cfg.RuntimeParams["application_name"] = application
	conn, err := pgx.ConnectConfig(db.Context(), cfg)
	must(db, err)
	db.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(db.Context()), patience)
		defer cancel()
		must(db, conn.Close(ctx))
	})
	return conn
}

// A stranger holds the locks of the next 600 relays, of the watcher and of the archive. A relay registers all the same,
// delivers and looks around.
func TestSecurityStrangersLocksStopNoRelay(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	stranger := db.stranger("psql")
	_, err := stranger.Exec(t.Context(), `SELECT pg_advisory_lock('outbox_relay'::regclass::oid::int, i) FROM generate_series(1, 600) i`)
	must(t, err)
	_, err = stranger.Exec(t.Context(), `SELECT pg_advisory_lock('outbox_watch'::regclass::oid::int, 0)`)
	must(t, err)
	db.insert(1, "key")
	cfg := db.config(to(newReceiver(t, nil).URL))
	cfg.Watching.Interval = 10 * time.Millisecond
	began := time.Now()
	r := start(t, cfg)
	r.instance()
	t.Logf("registered within %s", time.Since(began))
	r.settles(t, policy.Delivered, 1)
	becomes(db, true, `SELECT watched_at > $1 FROM outbox_watch`, began)
}

// A stranger waits for the lock of a relay that dies, and its session has the name of the dead relay's. The dead relay's
// claims are rescued all the same.
func TestSecurityStrangerKeepsNoDeadRelayAlive(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	g := newGate(t)
	rc := newReceiver(t, func(_ http.ResponseWriter, r request) {
		if r.number == 1 {
			g.pass(r)
		}
	})
	db.insert(20, "key")
	victim, said := startProcess(t, db.dsn, rc.URL)
	said("claimed")
	<-g.arrived
	dead := row[int32](db, `SELECT instance FROM outbox_relay`)
	stranger := db.stranger(fmt.Sprint("outbox-relay session ", dead))
	inherited := make(chan error, 1)
	go func() {
		_, err := stranger.Exec(t.Context(), `SELECT pg_advisory_lock('outbox_relay'::regclass::oid::int, $1)`, dead)
		inherited <- err
	}()
	becomes(db, true, `SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = $1)`, stranger.PgConn().PID())
	cfg := db.config(to(rc.URL))
	cfg.Lease = time.Hour
	survivor := start(t, cfg)
	survivor.instance()
	becomes(db, true, `SELECT pg_postmaster_start_time() < now() - interval '4 seconds'`) // before that, no relay is dead
	// Nor does the heartbeat say that the relay is dead.
	db.exec(`UPDATE outbox_relay SET heartbeat_at = now() + interval '1 hour' WHERE instance = $1`, dead)
	rc.kill(t, victim)
	killed := time.Now()
	survivor.await(t, "the rescue", func(o *observer) bool { return len(o.rescued) == 1 })
	t.Logf("rescued within %s", time.Since(killed))
	g.open()
	survivor.settles(t, policy.Delivered, 20)
	must(t, <-inherited)
}

// statements counts those that a relay runs.
type statements struct{ atomic.Int64 }

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	s.Add(1)
	return ctx
}

func (*statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A stranger notifies as often as it can. However often that is, the relay runs a few statements a second more than
// without, and goes on delivering.
func TestSecurityNotificationsAreBounded(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	for name, payload := range map[string]string{
		"sweeps": "sweep public", "looks": "public", "routes": "routes public", "unknown": "elsewhere",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			cfg := db.config(to(newReceiver(t, nil).URL))
			var run statements
			cfg.Pool.ConnConfig.Tracer = &run
			r := start(t, cfg)
			r.await(t, "idleness", func(o *observer) bool { return o.idle > 0 })
			stranger := db.stranger("psql")
			before, began := run.Load(), time.Now()
			const notifications = 5000
			for range notifications {
				_, err := stranger.Exec(t.Context(), `SELECT pg_notify('outbox_wake', $1)`, payload)
				must(t, err)
			}
			db.insert(1, "key")
			r.settles(t, policy.Delivered, 1)
			took := time.Since(began)
			n := run.Load() - before
			t.Logf("%d statements in %s of %d notifications", n, took, notifications)
			if most := int64(100 + 60*took.Seconds()); n > most {
				t.Errorf("%d statements in %s, want at most %d", n, took, most)
			}
		})
	}
}

// A stranger sends more notifications than a session can read beside its heartbeat. The relay stops listening for a while,
// goes on delivering, and listens again.
func TestSecurityFloodIsNotListenedTo(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := newDatabase(t)
	cfg := db.config(to(newReceiver(t, nil).URL))
	var listens, resumes atomic.Int64
	cfg.Pool.ConnConfig.Tracer = counting{session.Listen: &listens, session.ResumeRelay: &resumes}
	r := prepared(t, cfg)
	r.session.DeafFor = 2 * time.Second
	r.begin()
	r.await(t, "idleness", func(o *observer) bool { return o.idle > 0 })
	_, err := db.stranger("psql").Exec(t.Context(), `SELECT count(pg_notify('outbox_wake', i || repeat('x', 7900))) FROM generate_series(1, 2000) i`)
	must(t, err)
	eventually(t, "another session", func() bool { return resumes.Load() == 1 })
	db.insert(1, "key")
	r.settles(t, policy.Delivered, 1)
	eventually(t, "listening again", func() bool { return listens.Load() == 2 })
	db.insert(1, "again")
	r.settles(t, policy.Delivered, 2)
}

// counting counts the statements that it has a counter for.
type counting map[string]*atomic.Int64

func (c counting) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if counter := c[data.SQL]; counter != nil {
		counter.Add(1)
	}
	return ctx
}

func (counting) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A login with CONNECT alone listens, leaves a transaction open and fills the server's queue of notifications. Relays start
// with a route of their own, deliver, close breakers, obey operators and leave all the same.
func TestSecurityFullQueueStopsNoRelay(t *testing.T) {
	t.Parallel()
	if row[int](newDatabase(t), `SELECT current_setting('server_version_num')::int`) < 170000 {
		t.Skip("the queue holds 8 GB before PostgreSQL 17")
	}
	_, db := serve(t, localpg.Options{Settings: map[string]string{"max_notify_queue_pages": "64"}})
	listener, filler := db.stranger("psql"), db.stranger("psql")
	for _, statement := range []string{`LISTEN x`, `BEGIN`, `SELECT 1`} {
		_, err := listener.Exec(t.Context(), statement)
		must(t, err)
	}
	for i := range 100 {
		if _, err := filler.Exec(t.Context(), `SELECT pg_notify('x', $1)`, fmt.Sprint(i, strings.Repeat("x", 7900))); err != nil {
			break
		}
	}
	if _, err := db.pool.Exec(t.Context(), `NOTIFY x`); err == nil {
		t.Fatal("the queue is not full")
	}
	cfg := db.config(to(newReceiver(t, nil).URL))
	cfg.Routes = []Route{{Event: "*", To: []string{"default"}}}
	r := start(t, cfg)
	instance := r.instance()
	db.insert(1, "key")
	r.settles(t, policy.Delivered, 1)
	b, err := ops.New(db.pool).Replay(t.Context(), ops.Selection{EventIDs: []int64{1}, Statuses: []string{"delivered"}}, 0, nil)
	must(t, err)
	if b.Done != 1 {
		t.Errorf("%+v", b)
	}
	r.settles(t, policy.Delivered, 2)
	db.exec(`UPDATE outbox_destination SET breaker = 'half_open', breaker_owner = $1, breaker_opened_at = now(), breaker_until = now()`, instance)
	must(t, breaker.CloseBreaker(t.Context(), r.store.pool, "default", instance))
	if state := row[string](db, `SELECT breaker FROM outbox_destination`); state != "closed" {
		t.Errorf("the breaker is %s", state)
	}
	r.stop()
	if n := row[int](db, `SELECT count(*) FROM outbox_relay`); n != 0 {
		t.Error("the relay is still registered")
	}
}
