package relay

import (
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// The whole history of a destination is replayed while a relay sends it: every delivery goes out
// exactly once more, for what a relay has delivered again is not found again behind the cursor.
func TestReplayOfManyWhileARelayRuns(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const events = 5000
	db := relaytest.Covered(t)
	db.Insert(events, "k")
	db.Settled("delivered", "true")
	db.Exec(`VACUUM ANALYZE outbox, outbox_delivery`)
	rc := relaytest.NewReceiver(t, nil)
	r := start(t, config(db, to(rc.URL)))
	r.relayID()

	b, err := ops.New(db.Pool).Replay(t.Context(), ops.Selection{Statuses: []string{"delivered"}, Type: "t"}, 90*24*time.Hour, nil)
	relaytest.Must(t, err)
	if b.Matched != events || b.Done != events || b.Missed != 0 {
		t.Errorf("%+v", b)
	}
	r.settles(t, policy.Delivered, events)
	relaytest.Becomes(db, events, `SELECT count(*)::int FROM outbox_delivery WHERE status = 'delivered' AND replay AND attempts = 1`)
	if n := len(counted(rc.Keys())); n != events || rc.Total() != events {
		t.Errorf("%d requests for %d events", rc.Total(), n)
	}
}

// What waits for its next attempt is sent at once when an operator says so, an ordering key in its
// order, and keeps its attempts.
func TestRetryNow(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	var mended atomic.Bool
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, _ relaytest.Request) {
		if !mended.Load() {
			w.WriteHeader(http.StatusUnauthorized)
		}
	})
	cfg := config(db, to(rc.URL))
	cfg.Destinations[0].Retry.Schedule = []time.Duration{time.Hour}
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', 'k' || i, 'a' FROM generate_series(1, 3) i`)
	db.Insert(2, "free")
	r := start(t, cfg)
	r.settles(t, policy.Retry, 3) // the head of the key, and those without one
	mended.Store(true)
	sent := rc.Total()
	b, err := ops.New(db.Pool).Retry(t.Context(), ops.Selection{Destination: "default"}, nil)
	relaytest.Must(t, err)
	if b.Matched != 3 || b.Done != 3 || len(b.Obstacles) != 0 {
		t.Errorf("%+v", b)
	}
	r.settles(t, policy.Delivered, 5)
	testkit.Equal(t, "sent in the order", slices.DeleteFunc(rc.Keys()[sent:], func(key string) bool { return !strings.HasPrefix(key, "k") }), []string{"k1", "k2", "k3"})
	relaytest.Becomes(db, "1:2 2:1 3:1 4:2 5:2", `SELECT string_agg(event_id || ':' || attempts, ' ' ORDER BY event_id) FROM outbox_delivery WHERE NOT replay`)
}

// A delivery that fails again after a replay is one that failed, as before: the open alert counts
// it once.
func TestReplaysDoNotRaiseTheAlert(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, relaytest.Status(http.StatusUnprocessableEntity))
	r := start(t, config(db, to(rc.URL)))
	db.Insert(3, "k")
	r.settles(t, policy.Fail, 3)
	const count = `SELECT count - counted_before FROM outbox_alert WHERE rule = 'failed' AND resolved_at IS NULL`
	relaytest.Becomes(db, 3, count)
	for range 2 {
		// Event 3 stays failed. If none were, the watcher could resolve the alert before they fail
		// again.
		_, err := ops.New(db.Pool).Replay(t.Context(), ops.Selection{EventIDs: []int64{1, 2}}, 0, nil)
		relaytest.Must(t, err)
		relaytest.Becomes(db, 2, `SELECT count(*)::int FROM outbox_delivery WHERE status = 'failed' AND replay AND attempts = 1`)
	}
	db.Insert(1, "new")
	relaytest.Becomes(db, 4, count)
}
