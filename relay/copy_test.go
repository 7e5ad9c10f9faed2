package relay

import (
	"context"
	"net/url"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/identity"
	"github.com/outbox-relay/outbox-relay/relay/ops"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// A relay that watches for its quarantine.
type guarded struct {
	*running
	mu      sync.Mutex
	reasons []string // as the hook said them
}

// preparedGuarded returns a relay that may be quarantined, and does not run yet.
func preparedGuarded(t testing.TB, cfg Config) *guarded {
	t.Helper()
	g := &guarded{}
	cfg.Hooks.Quarantined = func(reason string) {
		g.mu.Lock()
		g.reasons = append(g.reasons, reason)
		g.mu.Unlock()
		g.note(func() {})
	}
	g.running = prepared(t, cfg)
	return g
}

func startGuarded(t testing.TB, cfg Config) *guarded {
	t.Helper()
	g := preparedGuarded(t, cfg)
	g.begin()
	return g
}

// quarantined waits until the relay says for the n-th time that it is, or no longer is, and returns what it says.
func (g *guarded) quarantined(t testing.TB, n int) (reason string) {
	t.Helper()
	g.await(t, "word of a quarantine", func(*observer) bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		if len(g.reasons) < n {
			return false
		}
		reason = g.reasons[n-1]
		return true
	})
	return reason
}

func (g *guarded) wantReason(t testing.TB, what ...string) {
	t.Helper()
	reason := g.quarantined(t, 1)
	for _, part := range what {
		if !strings.Contains(reason, part) {
			t.Errorf("the reason is %q, want it to name the %s", reason, part)
		}
	}
}

// another returns the database at dsn, with a pool to look at it.
func another(t testing.TB, dsn string) *database {
	t.Helper()
	return &database{TB: t, dsn: dsn, pool: pgtest.Pool(t, dsn)}
}

// serve returns the database "postgres" of a server of its own, with an outbox.
func serve(t testing.TB, o localpg.Options) (*localpg.Server, *database) {
	t.Helper()
	server := pgtest.Start(t, o)
	if o.CopyOf == "" {
		pgtest.Migrate(t, server.DSN(""), migrations.Outbox)
	}
	return server, another(t, server.DSN(""))
}

// visited leaves behind what a relay that worked does: the identity, and no living relay.
func (db *database) visited(cfg Config) {
	db.Helper()
	r := start(db, cfg)
	r.instance()
	r.stop()
}

// knows makes an address one that relays have been accepted under, for tests in which the next relay finds no living relay
// to vouch for it. Some relay must have recorded the database before.
func (db *database) knows(dsn string) {
	db.Helper()
	conn, err := pgx.ParseConfig(dsn)
	must(db, err)
	if db.exec(`UPDATE outbox_identity SET addresses = addresses || $1::text`, identity.Address(conn)) != 1 {
		db.Fatal("no relay has recorded this database yet")
	}
}

// name of the database, as CREATE DATABASE takes it.
func (db *database) name() string {
	u, err := url.Parse(db.dsn)
	must(db, err)
	return strings.TrimPrefix(u.Path, "/")
}

// fromTemplate copies the database with CREATE DATABASE … TEMPLATE.
func (db *database) fromTemplate() *database {
	db.Helper()
	db.pool.Close()
	name := db.name() + "_copy"
	elsewhere := another(db, pgtest.New(db))
	eventually(db, "the copy of an unused database", func() bool {
		_, err := elsewhere.pool.Exec(db.Context(), "CREATE DATABASE "+name+" TEMPLATE "+db.name())
		return err == nil
	})
	db.Cleanup(func() {
		conn, err := pgx.Connect(context.Background(), db.dsn)
		must(db, err)
		defer func() { _ = conn.Close(context.Background()) }()
		_, err = conn.Exec(context.Background(), "DROP DATABASE "+name+" WITH (FORCE)")
		must(db, err)
	})
	return another(db, strings.Replace(db.dsn, "/"+db.name()+"?", "/"+name+"?", 1))
}

// dumped copies the database with pg_dump into the empty one at dsn.
func (db *database) dumped(dsn string) *database {
	db.Helper()
	dump := exec.Command(pgtest.Program(db, "pg_dump"), "--no-owner", db.dsn)
	restore := exec.Command(pgtest.Program(db, "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-o", "/dev/null", dsn)
	pipe, err := dump.StdoutPipe()
	must(db, err)
	restore.Stdin = pipe
	var out strings.Builder
	restore.Stderr = &out
	must(db, dump.Start())
	if err := restore.Run(); err != nil {
		db.Fatalf("restore: %v\n%s", err, out.String())
	}
	must(db, dump.Wait())
	return another(db, dsn)
}

// written is everything that a relay may write but the row that shows it and its alert.
const written = `
SELECT md5(string_agg(line, '|' ORDER BY line)) FROM (
    SELECT 'delivery ' || d::text AS line FROM outbox_delivery d
    UNION ALL SELECT 'route ' || r::text FROM outbox_route r
    UNION ALL SELECT 'attempt ' || a::text FROM outbox_attempt a
    UNION ALL SELECT 'destination ' || d::text FROM outbox_destination d
    UNION ALL SELECT 'identity ' || i::text FROM outbox_identity i
    UNION ALL SELECT 'alert ' || a::text FROM outbox_alert a WHERE rule <> 'quarantined'
    UNION ALL SELECT 'relay ' || r::text FROM outbox_relay r WHERE quarantined IS NULL
    UNION ALL SELECT 'event ' || e.id::text FROM outbox e) everything`

// Each way of copying a database in which a relay ran, with deliveries claimed by a relay that is dead in the copy, parked
// ones that have a route, and an alert that was not told: the relay on the copy sends nothing and changes nothing. Once
// accepted it works.
func TestCopies(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const events = 20
	fill := func(db *database) {
		db.insert(events, "key")
		db.exec(`INSERT INTO outbox_relay (name, version, session_pid) VALUES ('original', 'v1', 0)`)
		db.exec(`UPDATE outbox_delivery SET claimed_by = (SELECT instance FROM outbox_relay), lease_expires_at = now() + interval '1 second' WHERE event_id < 10`)
		db.exec(`UPDATE outbox_delivery SET destination = '' WHERE event_id = 10`)
		db.exec(`INSERT INTO outbox_alert (rule, subject, first_error) VALUES ('failed', 'default', 'of the original')`)
	}
	for name, test := range map[string]struct {
		copy func(t *testing.T) *database
		want []string
	}{
		"template": {func(t *testing.T) *database {
			db := newDatabase(t)
			db.visited(db.config(to("http://receiver.test/")))
			fill(db)
			return db.fromTemplate()
		}, []string{"database oid"}},
		"dump into the same server": {func(t *testing.T) *database {
			db := newDatabase(t)
			db.visited(db.config(to("http://receiver.test/")))
			fill(db)
			return db.dumped(pgtest.New(t))
		}, []string{"database oid"}},
		"dump into another server": {func(t *testing.T) *database {
			db := newDatabase(t)
			db.visited(db.config(to("http://receiver.test/")))
			fill(db)
			return db.dumped(pgtest.Start(t, localpg.Options{}).DSN(""))
		}, []string{"system identifier"}},
		"data directory": {func(t *testing.T) *database {
			server, db := serve(t, localpg.Options{})
			db.route()
			db.visited(db.config(to("http://receiver.test/")))
			fill(db)
			backup := pgtest.BaseBackup(t, server, false)
			_, copied := serve(t, localpg.Options{CopyOf: backup})
			return copied
		}, []string{"address"}},
		"data directory of a server that crashed": {func(t *testing.T) *database {
			server, db := serve(t, localpg.Options{})
			db.route()
			db.visited(db.config(to("http://receiver.test/")))
			fill(db)
			db.exec(`CHECKPOINT`)
			must(t, server.StopImmediate(t.Context()))
			_, copied := serve(t, localpg.Options{CopyOf: filepath.Join(server.Dir(), "data")})
			return copied
		}, []string{"address"}},
		"promoted standby elsewhere": {func(t *testing.T) *database {
			server, db := serve(t, localpg.Options{})
			db.route()
			db.visited(db.config(to("http://receiver.test/")))
			fill(db)
			backup := pgtest.BaseBackup(t, server, true)
			_, copied := serve(t, localpg.Options{CopyOf: backup})
			copied.exec(`SELECT pg_promote()`)
			return copied
		}, []string{"address"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			copied := test.copy(t)
			before := row[string](copied, written)
			rc, slack := newReceiver(t, nil), newReceiver(t, nil)
			cfg := copied.config(to(rc.URL))
			cfg.Destinations = append(cfg.Destinations, post.Destination{Name: "new", URL: rc.URL}) // a route to write
			cfg.Alerts.Channels = []alert.Channel{alert.Slack(slack.URL, direct)}
			r := startGuarded(t, cfg)
			r.wantReason(t, test.want...)
			r.await(t, "the alert", func(o *observer) bool { return len(o.notices) == 1 })
			if text := string(slack.all()[0].body); !strings.Contains(text, "quarantine") || !strings.Contains(text, "outbox-relay identity accept") {
				t.Errorf("the alert says %s", text)
			}
			signal(r.wake.parked) // as the session does when a route was added
			signal(r.wake.alerts)
			beat := row[string](copied, `SELECT heartbeat_at::text FROM outbox_relay WHERE quarantined IS NOT NULL`)
			becomes(copied, true, `SELECT heartbeat_at > $1::timestamptz + interval '3 seconds' FROM outbox_relay WHERE quarantined IS NOT NULL`, beat)
			if after := row[string](copied, written); after != before {
				t.Error("the copy has changed")
			}
			if rc.total() != 0 || slack.total() != 1 {
				t.Errorf("%d requests and %d messages from a copy", rc.total(), slack.total())
			}
			if failures := sees(r.observer, func(o *observer) int { return len(o.failures) }); failures != 0 {
				t.Errorf("statements failed: %v", r.failures)
			}

			_, err := ops.New(copied.pool).AcceptIdentity(t.Context(), "")
			must(t, err)
			if reason := r.quarantined(t, 2); reason != "" {
				t.Errorf("after accepting: %s", reason)
			}
			becomes(copied, 0, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending'`)
			becomes(copied, true, `SELECT resolved_at IS NOT NULL FROM outbox_alert WHERE rule = 'quarantined'`)
			if rc.total() < events {
				t.Errorf("%d requests for %d events", rc.total(), events)
			}
			becomes(copied, 0, `SELECT count(*) FROM outbox_relay WHERE quarantined IS NOT NULL`)
		})
	}
}

// A standby that takes over, at the address that relays know, goes on where its primary ended.
func TestFailoverIsNoCopy(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	server, db := serve(t, localpg.Options{})
	db.route()
	l := newLink(t, db.dsn)
	rc := newReceiver(t, nil)
	cfg := db.config(to(rc.URL))
	cfg.Pool = settings(t, l.dsn)
	r := startGuarded(t, cfg)
	r.instance()
	db.insert(10, "before")
	r.settles(t, policy.Delivered, 10)
	backup := pgtest.BaseBackup(t, server, true)
	_, standby := serve(t, localpg.Options{CopyOf: backup})
	db.pool.Close()
	l.lead(t, standby.dsn)
	must(t, server.StopImmediate(t.Context()))
	r.await(t, "the standby, which is not written to", func(o *observer) bool { return o.failures["session"] >= 2 })
	standby.exec(`SELECT pg_promote()`)
	standby.exec(`CHECKPOINT`)
	eventually(t, "the relay's registration", func() bool { _, alive := r.current(); return alive })
	standby.insert(10, "after")
	r.settles(t, policy.Delivered, 20)
	if len(r.reasons) != 0 {
		t.Errorf("quarantined: %s", r.reasons)
	}
	r.stop()
	again := startGuarded(t, cfg) // and who starts later records the timeline
	again.instance()
	if timeline := row[int](standby, `SELECT timeline FROM outbox_identity`); timeline != 2 {
		t.Errorf("timeline %d is recorded", timeline)
	}
}

// A running relay's connections lead to a restored dump, all of them or only those of its pool: nothing of it is sent.
func TestReconnectOntoACopy(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	for name, half := range map[string]bool{"every connection": false, "those of the pool": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, db := serve(t, localpg.Options{})
			db.route()
			l := newLink(t, db.dsn)
			rc := newReceiver(t, nil)
			cfg := db.config(to(rc.URL))
			cfg.Pool = settings(t, l.dsn)
			r := startGuarded(t, cfg)
			instance := r.instance()
			db.insert(10, "before")
			r.settles(t, policy.Delivered, 10)
			copied := db.dumped(pgtest.Start(t, localpg.Options{}).DSN(""))
			copied.insert(50, "copy")
			before := row[string](copied, written)
			l.lead(t, copied.dsn)
			if half {
				db.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'outbox-relay'`)
				r.await(t, "refused connections", func(o *observer) bool { return o.failures["claim"] >= 2 })
			} else {
				l.cut()
				r.wantReason(t, "system identifier")
				if number, _ := r.current(); number != 0 {
					t.Errorf("still instance %d, which is another relay's here", number)
				}
			}
			if after := row[string](copied, written); after != before || rc.total() != 10 {
				t.Errorf("the copy has changed, or %d requests are not 10", rc.total())
			}
			l.lead(t, db.dsn)
			l.cut()
			db.insert(10, "after")
			r.settles(t, policy.Delivered, 20)
			if rc.total() != 20 {
				t.Errorf("%d requests", rc.total())
			}
			if again := r.instance(); half && again != instance {
				t.Errorf("instance %d became %d", instance, again)
			}
		})
	}
}
