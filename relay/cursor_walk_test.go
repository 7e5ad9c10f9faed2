package relay

import (
	"strconv"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// TestScanPassesBlockedDeliveries has more blocked deliveries than one scan reads, and a delivery
// between them that the lane's position has passed.
func TestScanPassesBlockedDeliveries(t *testing.T) {
	t.Parallel()
	const blocked = 6000
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', i, 'k' FROM generate_series(1, $1) i`, blocked)
	db.Exec(`UPDATE outbox_delivery SET status = 'failed' WHERE event_id = 1`)
	db.Insert(1, "first")
	r := start(t, config(db, to(rc.URL)))
	r.settles(t, policy.Delivered, 1)

	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', 'late-1');
		UPDATE outbox_delivery SET next_attempt_at = (SELECT next_attempt_at FROM outbox_delivery WHERE event_id = ` + strconv.Itoa(blocked/2) + `)
		WHERE event_id = (SELECT max(event_id) FROM outbox_delivery)`) // both in one transaction
	r.settles(t, policy.Delivered, 2)
	if keys := rc.Keys(); len(keys) != 2 || keys[0] != "first-1" || keys[1] != "late-1" {
		t.Errorf("sent %q", keys)
	}
}
