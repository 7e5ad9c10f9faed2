package relay

import (
	"fmt"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// Damaged rows, one of which is the head of a key, fill a lane. It continues when their leases have
// ended, and the key continues once the rows can be written.
func TestDamagedRowsKeepNeitherLaneNorKey(t *testing.T) {
	testsize.Long(t) // it waits for the end of leases
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	const damaged = 11 // more than the lane holds
	db.InsertKeyed("k", 1, 1)
	db.Insert(damaged-1, "bad")
	db.Damage("UPDATE ON outbox_delivery", fmt.Sprint("NEW.claimed_by IS NULL AND NEW.event_id <= ", damaged))
	d := to(rc.URL)
	d.MaxInFlight, d.Timeout = 1, 100*time.Millisecond
	r := startWithLease(t, config(db, d), shortLease)
	relaytest.Eventually(t, "a full lane", func() bool { return rc.Total() >= 2 })
	db.Insert(3, "good")
	r.settles(t, policy.Delivered, 3)
	relaytest.Eventually(t, "the head", func() bool { return counted(rc.Keys())["k-1"] > 0 })
	db.Exec(`DROP TRIGGER refuse ON outbox_delivery`)
	db.InsertKeyed("k", 2, 3)
	r.settles(t, policy.Delivered, damaged+5)
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
