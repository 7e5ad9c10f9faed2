package relay

import (
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// later adds n events of an ordering key that are due after the given time.
func later(db *relaytest.Database, prefix, ordering string, n int, after string) {
	db.Helper()
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, available_at)
		SELECT 't', '{}', $1 || '-' || i, $2, now() + $4::interval FROM generate_series(1, $3::int) i`, prefix, ordering, n, after)
}

// A producer that may insert cannot stop the events of another one by a shared ordering key and a far time.
func TestEventsThatAreNotDueHoldNobody(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	rc := relaytest.NewReceiver(t, nil)
	later(db, "hostile", "k", 1, "365 days")
	r := start(t, rarely(config(db, to(rc.URL))))
	relaytest.Becomes(db, 1, `SELECT count(*) FROM outbox_delivery`)
	keyed(db, "k", 1, 3)
	r.settles(t, policy.Delivered, 3)
	later(db, "more", "k", 10_000, "365 days")
	relaytest.Becomes(db, 10_004, `SELECT count(*) FROM outbox_delivery`)
	keyed(db, "k", 4, 6)
	r.settles(t, policy.Delivered, 6)
	wantSent(t, rc, "k", numbers(1, 6))
}
