package relay

import (
	"net/http"
	"sync/atomic"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// A 410 ends the sending at once, not when the queue is empty. One delivery fails, to tell; nothing
// else is lost, and all of it follows once the destination is resumed.
func TestGoneFailsOne(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	events := testsize.Of(2000, 500)
	db.Insert(events, "key")
	var welcome atomic.Bool
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, _ relaytest.Request) {
		if !welcome.Load() {
			w.WriteHeader(http.StatusGone)
		}
	})
	d := to(rc.URL)
	d.MaxInFlight = 64
	r := start(t, config(db, d))
	relaytest.Becomes(db, true, `SELECT count(*) = 1 FROM outbox_destination WHERE paused AND paused_reason LIKE '%410%' AND paused_at <= now()`)
	r.await(t, "an empty lane", func(o *observer) bool {
		n := o.outcomes[policy.Fail] + o.outcomes[policy.Retry] + o.outcomes[policy.Hold]
		return n > 0 && n == o.claimed
	})
	relaytest.Becomes(db, 0, `SELECT count(*) FROM outbox_delivery WHERE claimed_by IS NOT NULL`)
	const failed = `SELECT count(*) FROM outbox_delivery WHERE status = 'failed'`
	if n, sent, claimed := relaytest.Row[int](db, failed), rc.Total(), sees(r.observer, func(o *observer) int { return o.claimed }); n != 1 || sent > 64 || claimed > 1000 {
		t.Errorf("%d failed after %d requests for %d claims", n, sent, claimed)
	}
	if n := relaytest.Row[int](db, `SELECT sum(attempts) FROM outbox_delivery`); n != rc.Total() {
		t.Errorf("%d attempts counted, %d requests", n, rc.Total())
	}
	welcome.Store(true)
	db.Exec(`UPDATE outbox_destination SET paused = false, paused_reason = NULL, paused_at = NULL`)
	r.settles(t, policy.Delivered, events-1)
	testkit.Equal(t, "failed", relaytest.Row[int](db, failed), 1)
}
