package relay

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
	"github.com/outbox-relay/outbox-relay/relay/session"
)

// The database refuses the outcome of a key's head until the lease ends. Once it does not any more, the key goes on.
func TestRefusedSettlementLeavesNoKeyStanding(t *testing.T) {
	testsize.Long(t) // it waits for the end of a lease
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	db.exec(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON outbox_delivery FOR EACH ROW WHEN (NEW.status = 'delivered') EXECUTE FUNCTION refuse()`)
	db.keyed("k", 1, 1)
	d := to(rc.URL)
	d.Timeout = time.Second
	cfg := db.config(d)
	cfg.Lease = d.Timeout + leaseMargin
	r := start(t, cfg)
	r.await(t, "a refused outcome", func(o *observer) bool { return o.failures["settle"] > 0 })
	l := r.lane("default")
	eventually(t, "the end of the lease", func() bool { return !l.busy() })
	db.exec(`DROP TRIGGER refuse ON outbox_delivery`)
	db.keyed("k", 2, 3)
	r.settles(t, policy.Delivered, 3)
	rc.wantFirstInOrder(t, "k", 3)
}

// More ordering keys are ready than a narrow lane has room for, each with a long backlog. What has none of these keys is not
// left waiting until they are through.
func TestReadyKeysLeaveTurnsToOthers(t *testing.T) {
	t.Parallel()
	const keys = 100
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', i, 'key-' || i % $1 FROM generate_series(1, 40 * $1) i`, keys)
	db.letPass(time.Hour)
	d := to(rc.URL)
	d.MaxInFlight, d.RateLimit = 1, 200
	r := start(t, db.config(d))
	r.settles(t, policy.Delivered, 10)
	db.insert(1, "free")
	db.keyed("other", 1, 1)
	eventually(t, "the others", func() bool {
		of := counted(rc.keys())
		return of["free-1"] > 0 && of["other-1"] > 0
	})
	if sent := rc.total(); sent > 1000 {
		t.Errorf("after %d of the backlog", sent)
	}
}

// Deliveries behind a failed one are walked through at leisure, and then left alone for a while.
func TestWalkThroughBlockedKeysRests(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.keyed("k", 1, 2000)
	db.exec(`UPDATE outbox_delivery SET status = 'failed' WHERE event_id = 1`)
	db.letPass(time.Hour)
	r := sessionOf(t, db.config(to("http://receiver.test/")))
	r.settling = t.Context()
	c := r.newClaimer()
	c.pace = policy.Pace{Poll: time.Hour}
	w := &r.lane("default").walks[backlog]
	found, vain := 0, 0
	for {
		before := w.position
		_, err := c.claimIfDue(t.Context())
		must(t, err)
		if w.position != before && w.more && w.barren {
			vain++
		} else if w.position != before && w.more {
			found++
		}
		if !w.more && !w.due.IsZero() {
			break
		}
		w.due = time.Time{} // the rest between two claims is over
	}
	if found > 2 || vain < 5 { // the key is asked for once
		t.Errorf("%d claims found something to send, %d did not", found, vain)
	}
}

// Looking back disturbs no walk, and is done when it has come to its end.
func TestLookingBackLeavesTheWalksAlone(t *testing.T) {
	t.Parallel()
	at := func(second int64) keyset { return keyset{at: time.Unix(1_000_000+second, 0)} }
	l := laneOf(1)
	before := walk{position: at(7), more: true, again: true}
	l.walks[backlog] = before
	l.lookBack(at(5).at)
	l.lookBack(at(6).at)
	if l.walks[backlog] != before || l.back != at(5) || l.hasWalkedAll(time.Now()) {
		t.Errorf("walk %+v, back to %v", l.walks[backlog], l.back)
	}
	l.advanceLookBack(scanResult{last: at(6), more: true})
	if l.back != at(6) {
		t.Errorf("goes on at %v", l.back)
	}
	l.advanceLookBack(scanResult{last: at(8)})
	if l.back != (keyset{}) {
		t.Errorf("then at %v", l.back)
	}
}

// A scan sees an event of a key below what the same claim has learnt of the key: its id was handed out in a block. The next
// claim of the key reads all of it.
func TestFloorYieldsToWhatTheSameClaimHasSeen(t *testing.T) {
	t.Parallel()
	r := prepared(t, Config{Pool: settings(t, "postgres://nowhere.test/"), Destinations: []post.Destination{to("http://receiver.test/")}})
	l := r.lane("default")
	c := r.newClaimer()
	c.writers.Closed = 100
	key := "k"
	d := delivery{eventID: 60, destination: l.name, event: post.Event{OrderingKey: &key}}
	claims := []laneClaim{{l, claimRequest{destination: l.name, scans: []scan{{}}, keys: []readyKey{{key: key}}}}}
	c.applyResult(claims, claimResult{deliveries: []delivery{d}, scans: []scanResult{{keys: []foundKey{{key, 5}}}}}, 0)
	if floor := c.floors.LookUp(policy.OrderingKey{Destination: l.name, Key: key}, 0, false); floor.Event >= 5 {
		t.Errorf("the next claim begins behind event %d", floor.Event)
	}
}

// The head of a run is locked by another session while what follows it is written: the key goes on when the head is written, too.
func TestKeyIsFreedByTheLastToBeWritten(t *testing.T) {
	t.Parallel()
	l := laneOf(1)
	key := "k"
	l.countClaimed(key, 3, 1)
	for i, frees := range []bool{false, true, false} { // the second is the last of the run
		if l.hasReady() {
			t.Fatalf("free with %d in flight", 3-i)
		}
		l.keySettled(key, live, frees)
	}
	if !l.hasReady() {
		t.Error("it is not free")
	}
}

// A relay that starts cannot know whether an old heartbeat is that of a frozen relay, or the database stood still just before. A session
// that is gone is seen at once.
func TestNewRelayWatchesBeforeItConvicts(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	silent, err := db.pool.Acquire(t.Context())
	must(t, err)
	defer silent.Release()
	lasting, err := session.Register(t.Context(), silent, true, "silent", "", time.Hour)
	must(t, err)
	db.dead()
	db.exec(`UPDATE outbox_relay SET heartbeat_at = now() - interval '1 hour'`)
	becomes(db, true, `SELECT pg_postmaster_start_time() < now() - interval '4 seconds'`)
	r := prepared(t, db.config(to("http://receiver.test/")))
	r.session.WatchFor = time.Hour
	r.begin()
	becomes(db, false, `SELECT EXISTS (SELECT FROM outbox_relay WHERE name = 'dead')`)
	beats := row[time.Time](db, `SELECT heartbeat_at FROM outbox_relay WHERE name = 'test'`)
	becomes(db, true, `SELECT heartbeat_at > $1 FROM outbox_relay WHERE name = 'test'`, beats) // it has looked several times more
	if !row[bool](db, `SELECT EXISTS (SELECT FROM outbox_relay WHERE instance = $1)`, lasting) {
		t.Error("it rescued a relay whose session lasts, without having watched it")
	}
}
