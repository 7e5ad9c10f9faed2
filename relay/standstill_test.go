package relay

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// The database refuses the outcome of a key's head until the lease ends. Once it does not any more, the key goes on.
func TestRefusedSettlementLeavesNoKeyStanding(t *testing.T) {
	testsize.Long(t) // it waits for the end of a lease
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	db.Exec(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON outbox_delivery FOR EACH ROW WHEN (NEW.status = 'delivered') EXECUTE FUNCTION refuse()`)
	keyed(db, "k", 1, 1)
	d := to(rc.URL)
	d.Timeout = time.Second
	cfg := config(db, d)
	cfg.Lease = d.Timeout + leaseMargin
	r := start(t, cfg)
	r.await(t, "a refused outcome", func(o *observer) bool { return o.failures["settle"] > 0 })
	l := r.lane("default")
	relaytest.Eventually(t, "the end of the lease", func() bool { return !l.busy() })
	db.Exec(`DROP TRIGGER refuse ON outbox_delivery`)
	keyed(db, "k", 2, 3)
	r.settles(t, policy.Delivered, 3)
	wantFirstInOrder(t, rc, "k", 3)
}

// More ordering keys are ready than a narrow lane has room for, each with a long backlog. What has none of these keys is not
// left waiting until they are through.
func TestReadyKeysLeaveTurnsToOthers(t *testing.T) {
	t.Parallel()
	const keys = 100
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', i, 'key-' || i % $1 FROM generate_series(1, 40 * $1) i`, keys)
	letPass(db, time.Hour)
	d := to(rc.URL)
	d.MaxInFlight, d.RateLimit = 1, 200
	r := start(t, config(db, d))
	r.settles(t, policy.Delivered, 10)
	db.Insert(1, "free")
	keyed(db, "other", 1, 1)
	relaytest.Eventually(t, "the others", func() bool {
		of := counted(rc.Keys())
		return of["free-1"] > 0 && of["other-1"] > 0
	})
	if sent := rc.Total(); sent > 1000 {
		t.Errorf("after %d of the backlog", sent)
	}
}

// Looking back disturbs no walk, and is done when it has come to its end.
func TestLookingBackLeavesTheWalksAlone(t *testing.T) {
	t.Parallel()
	at := func(second int64) keyset { return keyset{at: time.Unix(1_000_000+second, 0)} }
	l := laneOf(1)
	before := cursor{position: at(7), more: true, restarts: true}
	l.cursors[backlog] = before
	l.rescanSince(at(5).at)
	l.rescanSince(at(6).at)
	if l.cursors[backlog] != before || l.rescanFrom != at(5) || l.hasScannedAll(time.Now()) {
		t.Errorf("walk %+v, back to %v", l.cursors[backlog], l.rescanFrom)
	}
	l.advanceRescan(scanResult{last: at(6), more: true})
	if l.rescanFrom != at(6) {
		t.Errorf("goes on at %v", l.rescanFrom)
	}
	l.advanceRescan(scanResult{last: at(8)})
	if l.rescanFrom != (keyset{}) {
		t.Errorf("then at %v", l.rescanFrom)
	}
}

// A scan sees an event of a key below what the same claim has learnt of the key: its id was handed out in a block. The next
// claim of the key reads all of it.
func TestFloorYieldsToWhatTheSameClaimHasSeen(t *testing.T) {
	t.Parallel()
	r := prepared(t, Config{Pool: settings(t, "postgres://nowhere.test/"), Destinations: []post.Destination{to("http://receiver.test/")}})
	l := r.lane("default")
	c := r.newClaimer()
	key := "k"
	d := delivery{eventID: 60, destination: l.name, event: post.Event{OrderingKey: &key}}
	claims := []laneClaim{{l, claimRequest{destination: l.name, scans: []scan{{}}, keys: []readyKey{{key: key}}}}}
	c.rows.applyResult(claims, claimResult{deliveries: []delivery{d}, scans: []scanResult{{keys: []foundKey{{key: key, place: ordering.Place{Event: 5}}}}}}, 0)
	if floor := c.rows.floors.LookUp(ordering.Key{Destination: l.name, Key: key}, 0, false); floor.Event >= 5 {
		t.Errorf("the next claim begins behind event %d", floor.Event)
	}
}

// The head of a run is locked by another session while what follows it is written: the key goes on when the head is written, too.
func TestKeyIsFreedByTheLastToBeWritten(t *testing.T) {
	t.Parallel()
	l := laneOf(1)
	key := "k"
	l.countClaimed(key, 3, ordering.Place{Event: 1})
	for i, frees := range []bool{false, true, false} { // the second is the last of the run
		if l.hasReady() {
			t.Fatalf("free with %d in flight", 3-i)
		}
		l.keySettled(key, live, frees, false)
	}
	if !l.hasReady() {
		t.Error("it is not free")
	}
}
