//go:build pgbouncer

package relay

import (
	"net/url"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
)

// putPoolerBefore makes the relays of TestThroughPooler reach the database through a PgBouncer of its own.
func (db *database) putPoolerBefore() {
	db.Helper()
	if strings.HasPrefix(db.Name(), "TestThroughPooler/") {
		db.bounce()
	}
}

// bounce puts a PgBouncer with further settings before the database, and returns the URL past it.
func (db *database) bounce(settings ...string) (direct string) {
	db.Helper()
	u, err := url.Parse(db.dsn)
	must(db, err)
	db.pooler, err = localpg.StartPooler(db.dsn, settings...)
	must(db, err)
	db.Cleanup(func() { must(db, db.pooler.Stop()) })
	direct, db.dsn = db.dsn, db.pooler.DSN(strings.TrimPrefix(u.Path, "/"))
	return direct
}

// What a relay does for its users it does through a pooler as well: the tests of the direct relay, with a PgBouncer between
// it and the server. Not among them is what rests on a session: wake-up by notification, and rescue within a second.
func TestThroughPooler(t *testing.T) {
	t.Parallel()
	for name, scenario := range map[string]func(*testing.T){
		"one event's way":           TestOneEventsWay,
		"retry":                     TestRetryThenSuccess,
		"large payloads":            TestLargePayloadsArriveByteForByte,
		"the future":                TestEventsOfTheFutureWait,
		"independent destinations":  TestDestinationsAreIndependent,
		"gone":                      TestGonePausesTheDestination,
		"gone fails one":            TestGoneFailsOne,
		"claims are exclusive":      TestClaimedDeliveriesAreNobodyElses,
		"late settle":               TestLateSettleChangesNothing,
		"too little lease":          TestDeliveriesWithTooLittleLeaseAreNotSent,
		"hold":                      TestHeldDeliveriesSpendNothing,
		"late commits":              TestLateCommitsAreDelivered,
		"locked row":                TestLockedRowKeepsNoOther,
		"locked alert":              TestLockedAlertKeepsNoOther,
		"locked row at a stop":      TestStopDoesNotWaitForALockedRow,
		"changed row":               TestChangedRowIsNotStale,
		"locked table":              TestLockedTableIsWaitedFor,
		"locked routes":             TestLockedRoutesAreWaitedFor,
		"parked deliveries":         TestParkedDeliveriesAreReleasedByALaterRoute,
		"order within a key":        TestOrderWithinAKey,
		"order behind the position": TestOrderedKeysGoOnBehindThePosition,
		"failed head":               TestFailedHeadBlocksItsKeyOnly,
		"order per destination":     TestOrderIsPerDestination,
		"outage":                    TestRelayOutlivesItsDatabase,
		"two relays":                TestTwoRelaysShareTheWork,
		"poison rows":               TestPoisonRowsFailAloneWithAReason,
		"poison deliveries":         TestPoisonDeliveriesHarmNoOther,
		"refused outcome":           TestRefusedOutcomeKeepsNoOther,
		"deleted events":            TestDeletedEventsFail,
		"deleted large payload":     TestEventDeletedWhileItsLargePayloadWaits,
		"unknown destinations":      TestUnknownDestinationsWait,
		"crash loop":                TestCrashLoopIsSetAside,
		"panic":                     TestPanicOfOneDelivery,
		"read-only database":        TestReadOnlyDatabaseIsWaitedFor,
		"killed backends":           TestKilledBackendsLoseNothing,
		"later routes":              TestReconnectKeepsLaterRoutes,
		"schedule":                  TestScheduleOfAReceiverThatNeverRecovers,
		"Retry-After":               TestRetryAfterOfAReceiver,
		"graceful stop":             TestGracefulStop,
		"abort":                     TestAbortCutsOffTheDrain,
		"cut off last attempt":      TestCutOffLastAttemptIsNotAFailure,
		"drain timeout":             TestDrainTimeout,
		"stop without a database":   TestStopWhileTheDatabaseIsAway,
		"another schema":            TestRunRefusesAnotherSchema,
		"wire contract":             TestRequestIsTheWireContract,
		"dead relay at the start":   TestStartingRelayRescuesAtOnce,
		"living relays":             TestLivingRelaysAreNotRescued,
		"rescue of the dead one's":  TestRescueTakesOnlyTheDeadOnesRows,
		"failures are told once":    TestFailuresAreToldOncePerWindow,
		"two relays tell once":      TestTwoRelaysTellOnce,
		"back after an outage":      TestRelaysThatComeBackDoNotRescueEachOther,
		"lost registration":         TestFailingSessionLeavesOneRegistration,
	} {
		t.Run(name, scenario)
	}
}
