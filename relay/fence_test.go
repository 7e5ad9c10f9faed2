package relay

import (
	"net/http"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
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

// While one relay's POST is in flight, no other relay sends the delivery, however often it looks.
func TestClaimedDeliveriesAreNobodyElses(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	g, rc := relaytest.NewGated(t)
	db.Insert(1, "key")
	a := start(t, config(db, to(rc.URL)))
	<-g.Arrived
	b := start(t, config(db, to(rc.URL)))
	for looks := 1; looks <= 3; looks++ { // each idleness ends with a look at everything
		b.await(t, "a look of the second relay", func(o *observer) bool { return o.idle >= looks })
		b.mailbox.post(agenda.CauseSweep)
	}
	if rc.Total() != 1 || sees(b.observer, func(o *observer) int { return o.claimed }) != 0 {
		t.Errorf("%d requests while the first is in flight", rc.Total())
	}
	g.Open()
	a.settles(t, policy.Delivered, 1)
}

// The first relay's POST outlasts its lease; a second relay claims the delivery and is sending it
// when the first one's answer comes. Whatever that answer says, it is not about the claim that
// counts now.
func TestLateSettleChangesNothing(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]int{"delivered": 204, "retry": 500, "failed": 422, "gone": 410} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			first, second := relaytest.NewGate(t), relaytest.NewGate(t)
			rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
				if r.Number == 1 {
					first.Pass(r)
					w.WriteHeader(answer)
					return
				}
				second.Pass(r)
			})
			db.Insert(1, "key")
			a := start(t, config(db, to(rc.URL)))
			<-first.Arrived
			claim := relaytest.Row[int64](db, `SELECT claim FROM outbox_delivery`)
			a.cancel() // it still waits for its POST, but claims no more
			db.Exec(`UPDATE outbox_delivery SET lease_expires_at = now() - interval '1 second'`)
			b := start(t, config(db, to(rc.URL)))
			<-second.Arrived

			before := relaytest.Row[string](db, `SELECT d::text FROM outbox_delivery d`)
			first.Open()
			a.await(t, "the stale settle", func(o *observer) bool { return o.stale == 1 })
			if after := relaytest.Row[string](db, `SELECT d::text FROM outbox_delivery d`); after != before {
				t.Errorf("the late settle turned\n%s into\n%s", before, after)
			}
			if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_alert`) + relaytest.Row[int](db, `SELECT count(*) FROM outbox_destination`); n != 0 {
				t.Error("the late settle raised an alert or paused the destination")
			}
			a.stop()

			second.Open()
			b.settles(t, policy.Delivered, 1)
			if !relaytest.Row[bool](db, `SELECT status = 'delivered' AND attempts = 1 AND claim > $1 FROM outbox_delivery`, claim) || rc.Total() != 2 {
				t.Errorf("after %d requests: %s", rc.Total(), relaytest.Row[string](db, `SELECT d::text FROM outbox_delivery d`))
			}
			// Both attempts were on the wire; the log holds the one that did not deliver.
			if want, got := map[bool]int{true: 0, false: 1}[answer == 204], relaytest.Row[int](db, `SELECT count(*) FROM outbox_attempt WHERE claim = $1`, claim); got != want {
				t.Errorf("%d attempts of the first claim in the log, want %d", got, want)
			}
		})
	}
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
