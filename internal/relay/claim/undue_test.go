package claim

import (
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// A claim of a key reads a few pages beside a million rows of the key that are not due.
func TestRowsThatAreNotDueCostNothing(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	n := testsize.Of(1_000_000, 20_000)
	db.Exec(`INSERT INTO outbox_delivery (event_id, destination, ordering_key, joined, next_attempt_at)
		SELECT i, 'default', 'k', NULL, now() + interval '365 days' FROM generate_series(1, $1::int) i`, n)
	db.Exec(`INSERT INTO outbox_delivery (event_id, destination, ordering_key) SELECT $1::int + i, 'default', 'k' FROM generate_series(1, 3) i`, n)
	relayID := relaytest.Row[int32](db, `INSERT INTO outbox_relay (name, version) VALUES ('test', 'test') RETURNING id`)
	for _, prepare := range []string{`SELECT 1`, `VACUUM ANALYZE outbox_delivery`} {
		db.Exec(prepare)
		pool := db.Pool
		a := newKeyArguments([]Request{{Destination: "default", Run: 16, Keys: []lane.ReadyKey{{Key: "k", Floor: -1 << 63}}}})
		claim := relaytest.Explain(t, pool, claimKeys, append([]any{relayID, 60.0, lane.InlinePayload}, append(a.columns(), 1)...)...)
		t.Logf("%d rows, after %s: claim of the key: %d pages", n, prepare, claim.Buffers)
		if claim.Buffers > 200 {
			t.Errorf("%d pages:\n%s", claim.Buffers, claim.Plan)
		}
	}
}
