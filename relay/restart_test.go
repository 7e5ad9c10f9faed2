package relay

import (
	"net/http"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// The server crashes, again and again, while two relays deliver and producers insert. Afterwards every
// committed event is delivered, and nothing is called delivered that no receiver answered.
func TestDatabaseCrashesUnderLoad(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const batch, rounds = 400, 3
	server := pgtest.Start(t, localpg.Options{Durable: true})
	pgtest.Migrate(t, server.DSN(""), migrations.Outbox)
	db := &database{TB: t, dsn: server.DSN(""), pool: pgtest.Pool(t, server.DSN(""))}
	db.route()
	rc := newReceiver(t, func(w http.ResponseWriter, r request) {
		if r.number == 1 && len(r.key)%2 == 0 {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	d := to(rc.URL)
	d.Timeout = 5 * time.Second // a claim whose answer was lost waits for its lease
	cfg := db.config(d)
	cfg.Lease = 10 * time.Second
	relays := []*running{start(t, cfg), start(t, cfg)}
	db.insert(batch, "round-0")
	for round := 1; round <= rounds; round++ {
		before := rc.total()
		eventually(t, "some load", func() bool { return rc.total() >= before+20 })
		if round < rounds {
			must(t, server.StopImmediate(t.Context()))
			must(t, server.StartAgain(t.Context()))
		} else {
			must(t, server.Restart(t.Context()))
		}
		db.pool.Reset() // the test's own connections are gone too
		db.insert(batch, "round-"+string(rune('0'+round)))
	}
	const total = batch * (rounds + 1)
	becomes(db, total, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)

	answered := map[string]bool{}
	for _, r := range rc.all() {
		answered[r.key] = answered[r.key] || r.number > 1 || len(r.key)%2 == 1
	}
	for _, key := range rows[string](db, `SELECT e.idempotency_key FROM outbox_delivery d JOIN outbox e ON e.id = d.event_id WHERE d.status = 'delivered'`) {
		if !answered[key] {
			t.Errorf("%s is called delivered", key)
		}
	}
	for key := range answered {
		if row[int](db, `SELECT count(*) FROM outbox WHERE idempotency_key = $1`, key) != 1 {
			t.Errorf("%s was sent and is no committed event", key)
		}
	}
	for _, r := range relays {
		r.instance()
	}
	db.insert(10, "afterwards")
	becomes(db, total+10, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
	t.Logf("%d events, %d requests", total+10, rc.total())
}

// For a while the database only reads, as after a failover that went the wrong way.
func TestReadOnlyDatabaseIsWaitedFor(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	r := start(t, db.config(to(rc.URL)))
	r.instance()
	name := row[string](db, `SELECT current_database()`)
	db.exec(`ALTER DATABASE ` + name + ` SET default_transaction_read_only = on`)
	db.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'outbox-relay%'`)
	r.await(t, "refused statements", func(o *observer) bool { return o.failures["session"] >= 3 })
	db.exec(`ALTER DATABASE ` + name + ` RESET default_transaction_read_only`)
	db.exec(`BEGIN; SET TRANSACTION READ WRITE; INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', 'key'); COMMIT`)
	r.settles(t, policy.Delivered, 1)
}

// Single sessions are killed all the time, of statements in flight too.
func TestKilledBackendsLoseNothing(t *testing.T) {
	t.Parallel()
	events := testsize.Of(3000, 1000)
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	db.insert(events, "key")
	d := to(rc.URL)
	d.Timeout = 5 * time.Second
	cfg := db.config(d)
	cfg.Lease = 10 * time.Second
	r := start(t, cfg)
	for kills := 1; kills <= 10; kills++ {
		r.await(t, "progress", func(o *observer) bool { return o.outcomes[policy.Delivered] >= kills*events/20 })
		db.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'outbox-relay%'
			AND (state = 'active' OR $1::int % 3 = 0)`, kills)
	}
	becomes(db, events, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND attempts >= 1`)
}
