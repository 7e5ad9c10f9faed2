package compare

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/reconcile"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// Whichever of the fresh keys have arrived, they explain the difference. One key more, or another
// one, is not explained.
func TestFreshKeysExplainADifference(t *testing.T) {
	t.Parallel()
	for range 2000 {
		hashes := make([]uint64, rand.IntN(12))
		n, sum := int64(0), uint64(0)
		for i := range hashes {
			hashes[i] = rand.Uint64()
			if rand.IntN(2) == 0 {
				n, sum = n+1, sum+hashes[i]
			}
		}
		if !explained(n, sum, hashes) {
			t.Fatalf("%d of %d are not explained", n, len(hashes))
		}
		other := rand.Uint64() | 1
		for what, wrong := range map[string]bool{
			"one more": explained(n+1, sum+other, hashes), "one less": explained(n-1, sum-other, hashes), "another one": explained(n, sum+other, hashes), "another count": explained(n+1, sum, hashes),
		} {
			if wrong {
				t.Fatalf("%s of %d is explained", what, len(hashes))
			}
		}
	}
	// Too many to try: the range is compared key by key.
	many := make([]uint64, 64)
	sum := uint64(0)
	for i := range many {
		if many[i] = rand.Uint64(); i%2 == 0 {
			sum += many[i]
		}
	}
	if explained(31, sum+1, many) {
		t.Error("what has too many sets is explained")
	}
}

// What was received before the window's end, and delivered after it, makes no range differ.
func TestFreshDeliveriesCostNothing(t *testing.T) {
	t.Parallel()
	db, inbox := relaytest.At(t, pgtest.New(t, migrations.Outbox)), pgtest.Pool(t, pgtest.New(t, migrations.Inbox))
	until := time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)
	// Each 15th is delivered after the end. Half of these were received before it.
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, created_at) SELECT 'paid', '{}', md5(i::text), $1::timestamptz - interval '1 hour' FROM generate_series(1, 500) i`, until)
	db.Exec(`INSERT INTO outbox_delivery (event_id, destination, status, delivered_at) SELECT id, 'shop', 'delivered', $1::timestamptz + CASE WHEN id % 15 = 0 THEN 5 ELSE -60 END * interval '1 s' FROM outbox`, until)
	pgtest.Exec(t, inbox, `INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, received_at)
		SELECT 'shop', 'billing', md5(i::text), 'succeeded', $1::timestamptz + CASE WHEN i % 30 = 0 THEN 1 ELSE -1 END * interval '1 s' FROM generate_series(1, 500) i`, until)
	receiver := inboxops.New(inbox).Reconciled(inboxops.Sender{Receiver: "shop", Source: "billing"}, "")
	c := &comparison{Options: Options{Destinations: []string{"shop"}, Ask: receiver.Answer}, db: ops.New(db.Pool).DB()}
	pgtest.Must(t, c.open(t.Context()))
	c.until, c.receiverUntil = until, until
	pgtest.Must(t, c.digest(t.Context()))
	if found := c.differing(); len(found) != 0 || c.report.Sent != 467 || c.freshKeys != 33 {
		t.Errorf("%+v differ; %d compared, %d fresh", found, c.report.Sent, c.freshKeys)
	}
	// One that never arrived is not explained.
	c.sent.Add([]byte("another"))
	if found := c.differing(); len(found) != 1 || !found[0].has("another") {
		t.Errorf("%+v differ", found)
	}
}

func TestBoundsFitIntoAQuestion(t *testing.T) {
	t.Parallel()
	var keys []string
	for range 20_000 {
		keys = append(keys, strings.Repeat("x", rand.IntN(255))+string(rune('a'+rand.IntN(26))))
	}
	bounds := sortBounds(keys)
	size := 0
	for _, key := range bounds {
		size += len(key)
	}
	if size > reconcile.MaxBoundBytes || len(bounds) > reconcile.MaxBounds || !slices.IsSorted(bounds) || len(slices.Compact(slices.Clone(bounds))) != len(bounds) || len(bounds) < 1000 {
		t.Errorf("%d bounds of %d bytes", len(bounds), size)
	}
	testkit.Equal(t, "got", sortBounds([]string{"b", "a", "b"}), []string{"a", "b"})
}

// A list that ignores where it was to begin would be read for ever.
func TestListsThatDoNotAscendAreRefused(t *testing.T) {
	t.Parallel()
	for name, list := range map[string][]string{"it begins again": {"a", "b", "c"}, "it has been read": {"l", "m"}, "backwards": {"p", "o", "n"}} {
		c := &cursor[string]{after: "l", key: func(key string) string { return key }, fetch: func(string, int) ([]string, error) { return list, nil }}
		if _, _, err := c.peek(); err == nil || !strings.Contains(err.Error(), "does not ascend") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
