//go:build pgbouncer

package relay

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// What a relay does for its users it does through a pooler as well: the tests of the direct relay,
// with a PgBouncer between it and the server. Not among them is what rests on a session: wake-up by
// notification, and rescue within a second.
func TestThroughPooler(t *testing.T) {
	t.Parallel()
	for name, scenario := range map[string]func(*testing.T){
		"one event's way":           TestOneEventsWay,
		"retry":                     TestRetryThenSuccess,
		"asks to wait":              TestAskedToWaitIsShown,
		"large payloads":            TestLargePayloadsArriveByteForByte,
		"the future":                TestEventOfTheFutureBecomesPending,
		"gone":                      TestGoneFailsOne,
		"schedule":                  TestOutageOrALoneEventAtFault,
		"independent destinations":  TestDestinationsAreIndependent,
		"hold":                      TestHeldDeliveriesSpendNothing,
		"new events":                TestEventsAreTakenAndWrittenOnce,
		"a range that ends":         TestRangeEndsWhileItsDeliveriesAreInFlight,
		"a backlog of events":       TestBacklogIsTaken,
		"a stop with events":        TestStopGivesBackWhatIsInHand,
		"order within a key":        TestOrderWithinAKey,
		"order behind the position": TestOrderedKeysGoOnBehindThePosition,
		"many behind a failed head": TestManyBehindAFailedHead,
		"stranded behind a head":    TestStrandedDeliveriesAreReleased,
		"order per destination":     TestOrderIsPerDestination,
		"outage":                    TestRelayOutlivesItsDatabase,
		"poison rows":               TestPoisonRowsFailAloneWithAReason,
		"poison deliveries":         TestPoisonDeliveriesHarmNoOther,
		"deleted events":            TestDeletedEventsFail,
		"deleted large payload":     TestEventDeletedWhileItsLargePayloadWaits,
		"crash loop":                TestCrashLoopIsSetAside,
		"graceful stop":             TestGracefulStop,
		"abort":                     TestAbortCutsOffTheDrain,
		"cut off last attempt":      TestCutOffLastAttemptIsNotAFailure,
		"drain timeout":             TestDrainTimeout,
	} {
		t.Run(name, scenario)
	}
}

// A relay through a pooler that is killed has no session that could be gone: the survivor has its
// work when the leases end, though claims continue being made in between.
func TestRecoveryWithinTheLease(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Bounce()
	g, rc := relaytest.NewGated(t)
	db.Insert(200, "key")
	const lease = 16 * time.Second
	t.Log("a lease of", lease)
	cfg := config(db, to(rc.URL))
	cfg.Lease, cfg.Destinations[0].Timeout = lease, lease/2
	victim, said := startProcessWithLease(t, db.DSN, rc.URL, lease)
	said("claimed")
	<-g.Arrived
	relaytest.Becomes(db, "f", `SELECT max((session_pid IS NOT NULL)::text)::char FROM outbox_relay`)
	rc.Kill(t, victim)
	g.Open()
	killed := relaytest.Row[time.Time](db, `SELECT now()`)
	survivor := start(t, cfg)
	survivor.settles(t, policy.Delivered, 1)
	relaytest.Becomes(db, 0, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending'`)
	// By the database's clock; the rest is the survivor's beat and its poll.
	if late := relaytest.Row[bool](db, `SELECT max(delivered_at) > $1::timestamptz + make_interval(secs => $2) FROM outbox_delivery`,
		killed, (lease + 5*time.Second).Seconds()); late {
		t.Error("the dead relay's deliveries waited for longer than its lease")
	}
	relaytest.Becomes(db, 1, `SELECT count(*) FROM outbox_relay`)
	for key, n := range counted(rc.Keys()) {
		if n > 2 {
			t.Errorf("%s came %d times", key, n)
		}
	}
}

// The pooler crashes under load, and comes back.
func TestPoolerCrashes(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	pooler := db.Bounce()
	rc := relaytest.NewReceiver(t, nil)
	cfg := config(db, to(rc.URL))
	cfg.Lease = 16 * time.Second // until then, claims wait whose acknowledgement was lost
	cfg.Destinations[0].Timeout = cfg.Lease / 2
	r := start(t, cfg)
	for round := 1; round <= 3; round++ {
		db.Insert(500, "round"+string(rune('0'+round)))
		r.settles(t, policy.Delivered, 500*(round-1)+1)
		relaytest.Must(t, pooler.Kill())
		relaytest.Must(t, pooler.Resume())
	}
	relaytest.Becomes(db, 1500, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
	for key, n := range counted(rc.Keys()) {
		if n > 3 {
			t.Errorf("%s came %d times", key, n)
		}
	}
}
