package relay

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// The database refuses the outcome of a key's head until the lease ends. Once it does not any more,
// the key continues.
func TestRefusedSettlementLeavesNoKeyStanding(t *testing.T) {
	testsize.Long(t) // it waits for the end of a lease
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	db.Exec(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON outbox_delivery FOR EACH ROW WHEN (NEW.status = 'delivered') EXECUTE FUNCTION refuse()`)
	db.InsertKeyed("k", 1, 1)
	d := to(rc.URL)
	d.Timeout = time.Second
	cfg := config(db, d)
	cfg.Lease = d.Timeout + leaseMargin
	r := start(t, cfg)
	r.await(t, "a refused outcome", func(o *observer) bool { return o.failures["settle"] > 0 })
	l := r.lane("default")
	relaytest.Eventually(t, "the end of the lease", func() bool { return l.InFlight() == 0 })
	db.Exec(`DROP TRIGGER refuse ON outbox_delivery`)
	db.InsertKeyed("k", 2, 3)
	r.settles(t, policy.Delivered, 3)
	wantFirstInOrder(t, rc, "k", 3)
}

// More ordering keys are ready than a narrow lane has room for, each with a long backlog. What has
// none of these keys is not left waiting until they are through.
func TestReadyKeysLeaveTurnsToOthers(t *testing.T) {
	t.Parallel()
	const keys = 100
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', i, 'key-' || i % $1 FROM generate_series(1, 40 * $1) i`, keys)
	letPass(db, time.Hour)
	d := to(rc.URL)
	d.MaxInFlight, d.RateLimit = 1, 200
	r := start(t, config(db, d))
	r.settles(t, policy.Delivered, 10)
	db.Insert(1, "free")
	db.InsertKeyed("other", 1, 1)
	relaytest.Eventually(t, "the others", func() bool {
		of := counted(rc.Keys())
		return of["free-1"] > 0 && of["other-1"] > 0
	})
	if sent := rc.Total(); sent > 1000 {
		t.Errorf("after %d of the backlog", sent)
	}
}
