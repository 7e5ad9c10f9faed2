//go:build pgbouncer

package relay

import (
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
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
		"killed backends":           TestKilledBackendsLoseNothing,
		"schedule":                  TestScheduleOfAReceiverThatNeverRecovers,
		"Retry-After":               TestRetryAfterOfAReceiver,
		"graceful stop":             TestGracefulStop,
		"abort":                     TestAbortCutsOffTheDrain,
		"cut off last attempt":      TestCutOffLastAttemptIsNotAFailure,
		"drain timeout":             TestDrainTimeout,
		"another schema":            TestRunRefusesAnotherSchema,
		"wire contract":             TestRequestIsTheWireContract,
		"dead relay at the start":   TestStartingRelayRescuesAtOnce,
		"living relays":             TestLivingRelaysAreNotRescued,
		"failures are told once":    TestFailuresAreToldOncePerWindow,
		"two relays tell once":      TestTwoRelaysTellOnce,
		"lost registration":         TestFailingSessionLeavesOneRegistration,
	} {
		t.Run(name, scenario)
	}
}

// A relay through a pooler that is killed has no session that could be gone: the survivor has its work when the leases end,
// though claims go on being made in between.
func TestRecoveryWithinTheLease(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.bounce()
	g := newGate(t)
	rc := newReceiver(t, func(_ http.ResponseWriter, r request) {
		if r.number == 1 {
			g.pass(r)
		}
	})
	db.insert(200, "key")
	const lease = 16 * time.Second
	t.Log("a lease of", lease)
	cfg := db.config(to(rc.URL))
	cfg.Lease, cfg.Destinations[0].Timeout = lease, lease/2
	victim, said := startProcessWithLease(t, db.dsn, rc.URL, lease)
	said("claimed")
	<-g.arrived
	becomes(db, "f", `SELECT max((session_pid IS NOT NULL)::text)::char FROM outbox_relay`)
	rc.kill(t, victim)
	g.open()
	killed := row[time.Time](db, `SELECT now()`)
	survivor := start(t, cfg)
	survivor.settles(t, policy.Delivered, 1)
	becomes(db, 0, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending'`)
	// By the database's clock; the rest is the survivor's beat and its poll.
	if late := row[bool](db, `SELECT max(delivered_at) > $1::timestamptz + make_interval(secs => $2) FROM outbox_delivery`,
		killed, (lease + 5*time.Second).Seconds()); late {
		t.Error("the dead relay's deliveries waited for longer than its lease")
	}
	becomes(db, 1, `SELECT count(*) FROM outbox_relay`)
	for key, n := range counted(rc.keys()) {
		if n > 2 {
			t.Errorf("%s came %d times", key, n)
		}
	}
}

// What the statements rest on holds in every transaction, and in none of anybody else.
func TestSettingsThroughThePooler(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.bounce("default_pool_size = 1")
	db.exec(`CREATE SCHEMA "My schema"`)
	cfg := db.config(to(newReceiver(t, nil).URL))
	cfg.Schema = "public"
	r := prepared(t, cfg)
	r.begin()
	r.instance()
	stranger := pgtest.Pool(t, db.dsn+"&default_query_exec_mode=exec")
	const shown = `SELECT name || '=' || current_setting(name) FROM unnest($1::text[]) AS s (name) ORDER BY 1`
	names := append(slices.Sorted(maps.Keys(pg.SetPooled(db.config().Pool, "public"))), "transaction_isolation")
	settings := func(q pg.DB) []string {
		rows, err := q.Query(t.Context(), shown, names)
		must(t, err)
		all, err := pgx.CollectRows(rows, pgx.RowTo[string])
		must(t, err)
		return all
	}
	want := settings(stranger)
	inside := settings(r.store.pool)
	tx, err := r.store.pool.Begin(t.Context())
	must(t, err)
	if again := settings(tx); !slices.Equal(again, inside) {
		t.Errorf("a transaction of several statements has %v, one of a single statement %v", again, inside)
	}
	must(t, tx.Rollback(t.Context()))
	for _, setting := range []string{
		"enable_seqscan=off", "lock_timeout=200ms", "plan_cache_mode=force_generic_plan", "search_path=\"public\"",
		"statement_timeout=30s", "synchronous_commit=off", "transaction_isolation=read committed",
	} {
		if !slices.Contains(inside, setting) {
			t.Errorf("%s is missing in %v", setting, inside)
		}
	}
	db.insert(100, "key")
	r.settles(t, policy.Delivered, 100)
	_, err = r.store.pool.Exec(t.Context(), `SELECT 1/0`)
	if err == nil {
		t.Error("an error was swallowed")
	}
	if got := settings(stranger); !slices.Equal(got, want) {
		t.Errorf("the server connection is left with %v, not %v", got, want)
	}
	if n := row[int](db, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`); n != 0 {
		t.Errorf("%d advisory locks are left", n)
	}
}

// The pooler crashes under load, and comes back.
func TestPoolerCrashes(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.bounce()
	rc := newReceiver(t, nil)
	cfg := db.config(to(rc.URL))
	cfg.Lease = 16 * time.Second // until then, claims wait whose acknowledgement was lost
	cfg.Destinations[0].Timeout = cfg.Lease / 2
	r := start(t, cfg)
	for round := 1; round <= 3; round++ {
		db.insert(500, "round"+string(rune('0'+round)))
		r.settles(t, policy.Delivered, 500*(round-1)+1)
		must(t, db.pooler.Kill())
		must(t, db.pooler.Resume())
	}
	becomes(db, 1500, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
	for key, n := range counted(rc.keys()) {
		if n > 3 {
			t.Errorf("%s came %d times", key, n)
		}
	}
}
