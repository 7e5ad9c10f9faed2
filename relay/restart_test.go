package relay

import (
	"net/http"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// The server crashes, again and again, while two relays deliver and producers insert. Afterwards every
// committed event is delivered, and nothing is called delivered that no receiver answered.
func TestDatabaseCrashesUnderLoad(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const batch, rounds = 400, 3
	server, db := relaytest.Serve(t, localpg.Options{Durable: true})
	db.Route()
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
		if r.Number == 1 && len(r.Key)%2 == 0 {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	d := to(rc.URL)
	d.Timeout = 5 * time.Second // a claim whose answer was lost waits for its lease
	cfg := config(db, d)
	cfg.Lease = 10 * time.Second
	relays := []*running{start(t, cfg), start(t, cfg)}
	db.Insert(batch, "round-0")
	for round := 1; round <= rounds; round++ {
		before := rc.Total()
		relaytest.Eventually(t, "some load", func() bool { return rc.Total() >= before+20 })
		if round < rounds {
			relaytest.Must(t, server.StopImmediate(t.Context()))
			relaytest.Must(t, server.StartAgain(t.Context()))
		} else {
			relaytest.Must(t, server.Restart(t.Context()))
		}
		db.Pool.Reset() // the test's own connections are gone too
		db.Insert(batch, "round-"+string(rune('0'+round)))
		const since = ` FROM outbox_delivery WHERE delivered_at > pg_postmaster_start_time()`
		relaytest.Becomes(db, true, `SELECT count(*) > 0`+since)
		t.Logf("the first delivery after a restart came %.2f s after the server's start", relaytest.Row[float64](db, `SELECT extract(epoch FROM min(delivered_at) - pg_postmaster_start_time())::float8`+since))
	}
	const total = batch * (rounds + 1)
	relaytest.Becomes(db, total, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)

	answered := map[string]bool{}
	for _, r := range rc.All() {
		answered[r.Key] = answered[r.Key] || r.Number > 1 || len(r.Key)%2 == 1
	}
	for _, key := range relaytest.Rows[string](db, `SELECT e.idempotency_key FROM outbox_delivery d JOIN outbox e ON e.id = d.event_id WHERE d.status = 'delivered'`) {
		if !answered[key] {
			t.Errorf("%s is called delivered", key)
		}
	}
	for key := range answered {
		if relaytest.Row[int](db, `SELECT count(*) FROM outbox WHERE idempotency_key = $1`, key) != 1 {
			t.Errorf("%s was sent and is no committed event", key)
		}
	}
	for _, r := range relays {
		r.instance()
	}
	db.Insert(10, "afterwards")
	relaytest.Becomes(db, total+10, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
	t.Logf("%d events, %d requests", total+10, rc.Total())
}

// Single sessions are killed all the time, of statements in flight too.
func TestKilledBackendsLoseNothing(t *testing.T) {
	t.Parallel()
	events := testsize.Of(3000, 1000)
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	db.Insert(events, "key")
	d := to(rc.URL)
	d.Timeout = 5 * time.Second
	cfg := config(db, d)
	cfg.Lease = 10 * time.Second
	r := start(t, cfg)
	for kills := 1; kills <= 10; kills++ {
		r.await(t, "progress", func(o *observer) bool { return o.outcomes[policy.Delivered] >= kills*events/20 })
		db.Exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'outbox-relay%'
			AND (state = 'active' OR $1::int % 3 = 0)`, kills)
	}
	relaytest.Becomes(db, events, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND attempts >= 1`)
}
