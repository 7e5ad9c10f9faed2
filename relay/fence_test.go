package relay

import (
	"net/http"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/claim"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// The fence of a range is even, and that of a claim odd: what gives back claims without an answer
// goes by that.
func TestFencesOfRangesAndClaims(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
		if r.Number < 3 {
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	db.Insert(1, "key")
	cfg := config(db, to(rc.URL))
	cfg.Destinations[0].Retry.Schedule = []time.Duration{time.Millisecond}
	a := start(t, cfg)
	a.settles(t, policy.Delivered, 1)
	testkit.Equal(t, "even and odd", relaytest.Row[[]bool](db, `SELECT ARRAY[(SELECT bool_and(fence % 2 = 0) FROM outbox_range), (SELECT claim % 2 = 1 AND attempts = 3 FROM outbox_delivery)]`), []bool{true, true})
}

// Its lease over, a delivery that waits in the queue of a slow lane is claimed again, even by the
// same relay, and sent once.
func TestHeldDeliveriesSpendNothing(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	g, rc := relaytest.NewGated(t)
	db.Insert(2, "key")
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - event_id * interval '1 minute'`)
	db.Insert(1, "last")
	d := to(rc.URL)
	d.MaxInFlight, d.Timeout = 1, relaytest.Patience
	cfg := config(db, d)
	cfg.Lease = relaytest.Patience + leaseMargin
	cfg.PollInterval = time.Hour // what is given back lies behind the position, and is looked for at once
	r := prepared(t, cfg)
	r.begin()
	<-g.Arrived // one is in flight, the others are queued behind it
	relaytest.Becomes(db, 3, `SELECT count(*) FROM outbox_delivery WHERE claimed_by IS NOT NULL`)
	before := r.config().Destinations
	r.patient(2 * cfg.Lease)
	g.Open()
	r.await(t, "what was queued is given back", func(o *observer) bool { return o.outcomes[policy.Hold] >= 2 })
	relaytest.Must(t, r.lanes.Set(time.Now(), before, nil))
	r.settles(t, policy.Delivered, 3)
	if rc.Total() != 3 || relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE attempts = 1 AND rescues = 0`) != 3 {
		t.Errorf("%d requests", rc.Total())
	}
}

// A crash of the server loses a claim that it has acknowledged. The next one gets a greater fence,
// so that the first holder, which knows nothing of that, cannot settle for it.
func TestFenceIsNotGivenOutTwiceAfterACrash(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := newCrashing(t)
	db.Cover()
	db.Insert(1, "key")
	s, relayID := registered(db.Database)
	conn := engineConn(db.Database) // its commits wait for no disk
	claimAs := func(on claims) lane.Delivery {
		t.Helper()
		result, err := on.Claim(t.Context(), relayID, time.Hour, []claim.Request{{Destination: "default", Scans: []lane.Scan{{Free: 1}}}})
		relaytest.Must(t, err)
		if len(result.Deliveries) != 1 {
			t.Fatalf("%d claimed", len(result.Deliveries))
		}
		return result.Deliveries[0]
	}
	db.freeze()
	lost := claimAs(claims{conn})
	relaytest.Must(t, db.server.StopImmediate(t.Context()))
	relaytest.Must(t, db.server.StartAgain(t.Context()))
	db.Pool.Reset()
	if n := relaytest.Row[int](db.Database, `SELECT count(*) FROM outbox_delivery WHERE claim > 0`); n != 0 {
		t.Fatal("the crash has lost nothing")
	}
	again := claimAs(s)
	if again.Fence <= lost.Fence {
		t.Errorf("claimed as %d, and before the crash as %d", again.Fence, lost.Fence)
	}
}
