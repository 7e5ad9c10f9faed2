package relay

import (
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// in returns the same database seen from one of its schemas.
func in(t testing.TB, dsn, schema string) *relaytest.Database {
	t.Helper()
	u, err := url.Parse(dsn)
	relaytest.Must(t, err)
	query := u.Query()
	query.Set("search_path", pgx.Identifier{schema}.Sanitize())
	u.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20") // as PostgreSQL reads it, a plus is a plus
	return relaytest.At(t, u.String())
}

// Two outboxes in one database, in schemas with names that need care: each relay serves its own,
// and each is woken by its own producers only.
func TestSchemasDoNotMix(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	dsn := pgtest.New(t)
	names := []string{`billing`, `My "Odd" schema`}
	var dbs []*relaytest.Database
	var receivers []*relaytest.Receiver
	var relays []*running
	for _, name := range names {
		db := in(t, dsn, name)
		db.Exec(`CREATE SCHEMA ` + pgx.Identifier{name}.Sanitize())
		pgtest.Migrate(t, db.DSN, migrations.Outbox)
		db.Route()
		rc := relaytest.NewReceiver(t, nil)
		cfg := Config{Pool: settings(t, dsn), Schema: name, AllowSuperuser: true, Destinations: []post.Destination{to(rc.URL)}, PollInterval: time.Hour}
		dbs, receivers, relays = append(dbs, db), append(receivers, rc), append(relays, start(t, cfg))
	}
	for _, r := range relays {
		r.relayID() // the same number in both schemas, and two locks
	}
	for i, db := range dbs {
		db.Insert(100, "from-"+string(rune('a'+i)))
	}
	for i, rc := range receivers {
		relays[i].settles(t, policy.Delivered, 100)
		for key, n := range counted(rc.Keys()) {
			if key[:6] != "from-"+string(rune('a'+i)) || n != 1 {
				t.Errorf("%s came %d times to the receiver of %s", key, n, names[i])
			}
		}
		if n := relaytest.Row[int](dbs[i], `SELECT count(*) FROM outbox_relay`); n != 1 {
			t.Errorf("%d relays in %s", n, names[i])
		}
		if n := sees(relays[i].observer, func(o *observer) int { return len(o.rescued) }); n != 0 {
			t.Errorf("the relay of %s took the other one for dead", names[i])
		}
	}
}

// rolesLock: roles belong to the whole server.
var rolesLock sync.Mutex

// The engine needs no right beyond those that roles.sql gives outbox_relay.
func TestRelayWithLeastPrivilege(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rolesLock.Lock()
	db.Exec(migrations.Roles())
	db.Exec(`DO $$ BEGIN
		IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'relay_login') THEN CREATE ROLE relay_login LOGIN IN ROLE outbox_relay; END IF;
	END $$`)
	rolesLock.Unlock()

	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
		switch {
		case r.Key == "key-1" && r.Number == 1:
			w.WriteHeader(500)
		case r.Key == "key-2":
			w.WriteHeader(422)
		case r.Key == "key-3":
			w.WriteHeader(410)
		}
	})
	slack := relaytest.NewReceiver(t, nil)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', ('"' || repeat('x', 20000) || '"')::json, 'large')`)
	db.Insert(2, "key")
	// A dead relay's claims, parked deliveries, and routes to change: everything a relay ever does.
	db.Exec(`INSERT INTO outbox_relay (name, version, lease, session_pid) VALUES ('dead', '', '1 day', 0)`)
	db.Exec(`UPDATE outbox_delivery SET claimed_by = (SELECT id FROM outbox_relay), lease_expires_at = now() + interval '1 day' WHERE event_id = 1`)
	db.Exec(`DELETE FROM outbox_route; INSERT INTO outbox_route (pattern, destination) VALUES ('nothing', 'default')`)
	db.Insert(2, "parked")

	u, err := url.Parse(db.DSN)
	relaytest.Must(t, err)
	u.User = url.User("relay_login")
	cfg := config(db, to(rc.URL))
	cfg.Pool = settings(t, u.String())
	cfg.LogDelivered = true
	cfg.Alerts.Channels = []alert.Channel{alert.Slack(slack.URL, direct)}
	r := start(t, cfg)
	r.settles(t, policy.Delivered, 4)
	r.settles(t, policy.Fail, 1)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', 'key-3')`)
	r.settles(t, policy.Fail, 2)
	r.await(t, "the alert", func(o *observer) bool { return len(o.notices) > 0 })
	relaytest.Becomes(db, true, `SELECT notified_count > 0 FROM outbox_alert`)
	r.relayID()
	r.stop()
	for _, err := range sees(r.observer, func(o *observer) []error { return o.errors }) {
		if !pg.HasCode(err, pg.LockNotAvailable) { // on a busy server a row may be locked for longer than a statement waits
			t.Errorf("refused: %v", err)
		}
	}
	relaytest.Becomes(db, 0, `SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'outbox-relay%' AND datname = current_database()`)
}
